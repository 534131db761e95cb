"""The optimizer of Child et al. 2019, section 6, and Muon as an alternative."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparse_transformer import model as model_lib, schema

# Largest global norm of all gradients (Child et al. 2019).
CLIP_NORM = 1.0
# Added to the root of the mean squared gradient, as in the released code.
EPSILON = 1e-8
# With wsd, the share of the steps after the warm-up in which the learning rate
# decays (arXiv 2405.18392).
DECAY = 0.2


class Schedule(NamedTuple):
  """The values on which the learning rate depends.

  These values are arguments of the compiled program, not constants in it.
  Therefore, a change of a value does not require another compilation.

  Attributes:
    step: the step whose learning rate is needed, int32; -1 for the number of
      updates so far, see `num_updates`.
    steps: the total number of steps, `train.steps`, int32.
    warmup: the number of warm-up steps, int32.
    peak: the peak learning rate, float32.
    minimum: the final learning rate as a fraction of the peak, float32.
  """

  step: jax.typing.ArrayLike
  steps: jax.typing.ArrayLike
  warmup: jax.typing.ArrayLike
  peak: jax.typing.ArrayLike
  minimum: jax.typing.ArrayLike


def schedule(
  config: schema.Config, step: int = 0, share: float | None = None
) -> Schedule:
  """Returns the schedule of the next update.

  Args:
    config: the config of the experiment.
    step: the number of completed steps.
    share: the fraction of the time limit that has passed, or None. With a
      fraction, the learning rate decays with time, and the warm-up takes at
      most a tenth of the time. With None, the learning rate depends on the
      number of updates.

  Raises ValueError if the warm-up does not end before the last step, or if a
  constant schedule has a minimum.
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

  # With a time limit, the fraction of time replaces the fraction of steps.
  # During the warm-up, this fraction is multiplied by ten, because a slow run
  # must not spend all of its time on the warm-up.
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
  """Returns the learning rate of a step.

  The learning rate rises linearly to its peak during the warm-up. Then, it
  stays constant ("constant") or falls to the minimum: linearly ("linear"),
  along half a period of a cosine ("cosine"), or linearly over the last fifth of
  the steps after the warm-up ("wsd").

  Args:
    kind: the value of `optimizer.schedule`.
    due: the schedule, from `schedule`.

  Returns:
    A float32 scalar.
  """
  step, steps, warmup, peak, minimum = map(jnp.asarray, due)
  decayed = step - warmup
  rest = jnp.maximum(1, steps - warmup)
  last = jnp.maximum(1, jnp.round(DECAY * rest))

  # The fraction of `steps` that has passed at `step`, multiplied by `of`.
  def gone(step, steps, of=1):
    # XLA replaces division by a constant with multiplication by its inverse.
    # Here `steps` is an argument, so this is written out, to make the learning
    # rate bitwise-identical to that of a program with constants.
    return of * jnp.clip(step, 0, steps) * (1 / steps)

  left: jax.Array | float = 1.0  # the fraction of the peak if the minimum is 0
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
  """Returns the optimizer that the config names.

  Gradients are first clipped by their global norm. If Muon is selected, it
  updates only the matrices in blocks, and AdamW updates all other parameters.
  Muon's updates are scaled to the root mean square of Adam's updates, so that
  the same learning rates are suitable for both.
  Source: Jordan et al. 2024, Muon; Liu et al. 2025, arXiv 2502.16982.

  Args:
    config: the config of the experiment.
    due: the schedule of the learning rate. If None, the learning rate follows
      the schedule of the config, at the number of updates so far.

  Raises ValueError if the schedule is invalid, see `schedule`.
  """
  settings = config.optimizer
  by_config = schedule(config)

  def learning_rate(count: jax.Array) -> jax.Array:
    return rate(settings.schedule, due or by_config._replace(step=count))

  # Both optimizers decay the same weights, by the decay times the learning
  # rate.
  if settings.name == "muon":
    optimizer = optax.contrib.muon(
      learning_rate,
      adam_b1=settings.beta1,
      adam_b2=settings.beta2,
      adam_learning_rate=learning_rate,
      eps=EPSILON,
      weight_decay=settings.weight_decay,
      # By default, Muon would update arrays with two axes, which here are
      # embeddings and stacked biases, but not the stacked matrices, which have
      # three.
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
  """Returns the axes (inputs, outputs) of each matrix that Muon updates.

  The result is a pytree like the parameters, with None for each parameter that
  Adam updates.
  """

  def axes(path, x):
    stacks = model_lib.num_stacks(path)
    if stacks and _is_matrix(path, x):
      return optax.contrib.MuonDimensionNumbers(stacks, stacks + 1)
    return None

  return jax.tree_util.tree_map_with_path(axes, params)


def num_updates(opt_state: optax.OptState) -> jax.Array:
  """Returns the number of steps that were not skipped, int32 scalar."""
  # The state contains several counts, which are all equal.
  return optax.tree.get_all_with_path(opt_state, "count")[0][1]


def decays(params: dict) -> dict:
  """Returns which parameters have weight decay, as a pytree of bools.

  As in the released code, parameters with two axes decay. The axes over layers
  and experts do not count. Centroids have three axes and do not decay, because
  only their direction has an effect, not their length.
  """
  return jax.tree_util.tree_map_with_path(_is_matrix, params)


def _is_matrix(path, x):
  return jnp.ndim(x) - model_lib.num_stacks(path) == 2
