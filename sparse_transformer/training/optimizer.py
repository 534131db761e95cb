"""The optimizer of Child et al. 2019, section 6, and Muon in its place."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparse_transformer import model as model_lib, schema

CLIP_NORM = 1.0  # of all gradients together; Child et al. 2019
EPSILON = 1e-8  # added to the root of the mean squared gradient; as released
DECAY = 0.2  # of the steps after the warm-up, with wsd; arXiv 2405.18392


class Schedule(NamedTuple):
  """What the learning rate depends on: arguments of a program, not part of it.

  Attributes:
    step: the step whose rate is due; -1 for `num_updates`.
    steps: all steps, `train.steps`.
    warmup: the steps of the warm-up.
    peak: the largest learning rate.
    minimum: the last one, as a share of the peak.
  """

  step: jax.typing.ArrayLike
  steps: jax.typing.ArrayLike
  warmup: jax.typing.ArrayLike
  peak: jax.typing.ArrayLike
  minimum: jax.typing.ArrayLike


def schedule(
  config: schema.Config, step: int = 0, share: float | None = None
) -> Schedule:
  """The schedule of the next update.

  Args:
    config: the experiment's.
    step: how many steps are done.
    share: the fraction of a time limit that has passed. The decay follows it,
      and the warm-up takes at most a tenth of the time. If None, the number of
      updates decides.

  Raises ValueError if the warm-up does not end before the last step, or a
  constant rate has a minimum.
  """
  steps = config.train.steps
  settings = config.optimizer
  warmup = settings.warmup_steps
  if steps and warmup >= steps:
    raise ValueError(
      f"optimizer.warmup_steps={warmup} must be less than train.steps={steps}"
    )
  if settings.schedule == "constant" and settings.minimum:
    raise ValueError(
      f"optimizer.minimum={settings.minimum} must be 0 with"
      " optimizer.schedule=constant, which does not decay"
    )

  # With a time limit, the share of the time stands for that of the steps.
  # During the warm-up it is taken ten times: a slow run must not spend all of
  # its time on it.
  due = -1
  if share is not None:
    due = max(step, int(10 * share * warmup))
    if due >= warmup:
      due = max(warmup, int(share * steps))

  return Schedule(
    step=np.int32(due),
    steps=np.int32(steps),
    warmup=np.int32(warmup),
    peak=np.float32(settings.learning_rate),
    minimum=np.float32(settings.minimum),
  )


def rate(kind: str, due: Schedule) -> jax.Array:
  """The learning rate that is due.

  It rises linearly to its peak, then does what its kind says: stays, or falls
  to the minimum, along a line, along half a period of a cosine, or (wsd) along
  a line over the last fifth of the steps after the warm-up.

  Args:
    kind: what `optimizer.schedule` names.
    due: from `schedule`.

  Returns a float32 scalar.
  """
  step, steps, warmup, peak, minimum = map(jnp.asarray, due)
  decayed = step - warmup
  rest = jnp.maximum(1, steps - warmup)
  last = jnp.maximum(1, jnp.round(DECAY * rest))

  # The share of `steps` that has passed at a step, times `of`.
  def gone(step, steps, of=1):
    # XLA multiplies by the inverse of a constant. Here `steps` is an argument;
    # written like this, the rate has the same bits as that of a constant.
    return of * jnp.clip(step, 0, steps) * (1 / steps)

  left: jax.Array | float = 1.0  # the share of the peak, without a minimum
  if kind == "linear":
    left = 1 - gone(decayed, rest)
  elif kind == "cosine":
    angle = gone(decayed, rest, jnp.pi)
    left = 0.5 * (1 + jnp.cos(angle))
  elif kind == "wsd":
    constant = rest - last
    left = 1 - gone(decayed - constant, last)

  missing = 1 - gone(step, jnp.maximum(1, warmup))
  rising = peak - peak * missing
  share = (1 - minimum) * left + minimum
  falling = peak * share
  return jnp.where(step < warmup, rising, falling)


def make_optimizer(
  config: schema.Config, due: Schedule | None = None
) -> optax.GradientTransformation:
  """Makes the optimizer that the config names, with clipped gradients.

  Gradients are clipped by their global norm. With Muon, only the matrices of
  blocks, which decay, have its updates, and all else has Adam's. Muon's updates
  are scaled to the root mean square of Adam's, so that learning rates carry
  over. Source: Jordan et al. 2024, Muon; Liu et al. 2025, arXiv 2502.16982.

  Args:
    config: the experiment's.
    due: the schedule that the learning rate follows; if None, the config's, at
      the number of updates.

  Raises ValueError if the schedule is invalid, see `schedule`.
  """
  settings = config.optimizer
  by_config = schedule(config)

  def learning_rate(count: jax.Array) -> jax.Array:
    return rate(settings.schedule, due or by_config._replace(step=count))

  # Both decay the same weights, scaled by the learning rate.
  if settings.name == "muon":
    optimizer = optax.contrib.muon(
      learning_rate,
      adam_b1=settings.beta1,
      adam_b2=settings.beta2,
      adam_learning_rate=learning_rate,
      eps=EPSILON,
      weight_decay=settings.weight_decay,
      # By default it would take the embeddings and the stacked biases, which
      # have two axes, and leave out the stacked matrices, which have three.
      muon_weight_dimension_numbers=_block_matrices,
      consistent_rms=0.2,
    )
  else:
    optimizer = optax.adamw(
      learning_rate,
      b1=settings.beta1,
      b2=settings.beta2,
      eps=EPSILON,
      weight_decay=settings.weight_decay,
      mask=decays,
    )

  return optax.chain(optax.clip_by_global_norm(CLIP_NORM), optimizer)


def _block_matrices(params):
  """The axes (inputs, outputs) of the stacked matrices of blocks.

  Returns a tree like the parameters; None stands for those that Adam updates.
  """

  def axes(path, x):
    stacks = model_lib.num_stacks(path)
    if stacks and _is_matrix(path, x):
      return optax.contrib.MuonDimensionNumbers(stacks, stacks + 1)
    return None

  return jax.tree_util.tree_map_with_path(axes, params)


def num_updates(opt_state: optax.OptState) -> jax.Array:
  """The number of updates, int32 scalar: steps that were not skipped."""
  # All counts are equal.
  return optax.tree.get_all_with_path(opt_state, "count")[0][1]


def decays(params: dict) -> dict:
  """Whether each parameter decays: those of two axes, as in the released code.

  Axes of layers and experts do not count. Centroids have three axes and do not
  decay: they are directions, whose length means nothing.
  """
  return jax.tree_util.tree_map_with_path(_is_matrix, params)


def _is_matrix(path, x):
  return jnp.ndim(x) - model_lib.num_stacks(path) == 2
