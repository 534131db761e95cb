"""The optimizer of Child et al. 2019, section 6, and Muon in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparse_transformer import model as model_lib, schema

CLIP_NORM = 1.0  # of all gradients together; Child et al. 2019
EPSILON = 1e-8  # added to the root of the mean squared gradient; as released
DECAY = 0.2  # of the steps after the warm-up, with wsd; arXiv 2405.18392


def make_schedule(config: schema.Config, peak: float = 0.0) -> optax.Schedule:
  """Learning rate by step: linear warm-up to a peak, then `optimizer.schedule`.

  The peak of 0 stands for `optimizer.learning_rate`.
  Raises ValueError if the warm-up does not end before the last step, or a
  constant rate has a minimum.
  """
  steps, settings = config.train.steps, config.optimizer
  warmup, least = settings.warmup_steps, settings.minimum
  if steps and warmup >= steps:
    raise ValueError(
      f"optimizer.warmup_steps={warmup} must be less than train.steps={steps}"
    )
  if settings.schedule == "constant" and least:
    raise ValueError(
      f"optimizer.minimum={least} must be 0 with optimizer.schedule=constant,"
      " which does not decay"
    )
  peak = peak or settings.learning_rate
  rest = max(1, steps - warmup)
  last = max(1, round(DECAY * rest))
  after = dict(
    constant=optax.constant_schedule(peak),
    linear=optax.linear_schedule(peak, least * peak, rest),
    cosine=optax.cosine_decay_schedule(peak, rest, alpha=least),
    wsd=optax.linear_schedule(peak, least * peak, last, rest - last),
  )
  rising = optax.linear_schedule(0.0, peak, warmup)
  return optax.join_schedules([rising, after[settings.schedule]], [warmup])


def make_optimizer(
  config: schema.Config, step: jax.Array | None = None
) -> optax.GradientTransformation:
  """`optimizer.name` on gradients that are clipped by their global norm.

  The learning rate is that of `step`; if None, of the number of its updates.

  Muon is for the matrices of the blocks, which decay; Adam for all else. Its
  updates have the root mean square of Adam's, so learning rates carry over.
  Source: Jordan et al. 2024, Muon; Liu et al. 2025, arXiv 2502.16982.
  Raises ValueError if the schedule is invalid, see `make_schedule`, or AdamW is
  given a learning rate of Muon's Adam.
  """
  settings, rate = config.optimizer, config.optimizer.adam_learning_rate

  def schedule(peak: float) -> optax.Schedule:
    by_step = make_schedule(config, peak)
    return by_step if step is None else lambda _: by_step(step)

  common = dict(eps=EPSILON, weight_decay=settings.weight_decay)
  clip = optax.clip_by_global_norm(CLIP_NORM)
  if settings.name == "muon":
    return optax.chain(
      clip,
      optax.contrib.muon(
        schedule(0.0),
        adam_b1=settings.beta1,
        adam_b2=settings.beta2,
        adam_learning_rate=schedule(rate),
        # By default it would take the embeddings and the stacked biases, which
        # have two axes, and leave out the stacked matrices, which have three.
        muon_weight_dimension_numbers=_block_matrices,
        consistent_rms=0.2,
        **common,
      ),
    )
  if rate:
    raise ValueError(
      f"optimizer.adam_learning_rate={rate} is for optimizer.name=muon, not"
      f" {settings.name}; set optimizer.learning_rate"
    )
  betas = dict(b1=settings.beta1, b2=settings.beta2)
  adamw = optax.adamw(schedule(0.0), mask=decays, **betas, **common)
  return optax.chain(clip, adamw)


def _block_matrices(params):
  """(inputs, outputs) axes of the stacked matrices of blocks; else None."""

  def of(path, x):
    if (first := model_lib.num_stacks(path)) and _is_matrix(path, x):
      return optax.contrib.MuonDimensionNumbers(first, first + 1)
    return None

  return jax.tree_util.tree_map_with_path(of, params)


def due(config: schema.Config, step: int, share: float | None) -> np.int32:
  """The step whose learning rate the next update has; -1: `num_updates`.

  `share` is the fraction of a time limit that has passed. The decay follows
  it, and warm-up takes at most a tenth of the time.
  """
  if share is None:
    return np.int32(-1)
  warmup = config.optimizer.warmup_steps
  warmed = max(step, int(10 * share * warmup))
  if warmed < warmup:
    return np.int32(warmed)
  return np.int32(max(warmup, int(share * config.train.steps)))


def num_updates(opt_state: optax.OptState) -> jax.Array:
  """The number of updates: steps that were not skipped."""
  (_, count), *_ = optax.tree.get_all_with_path(opt_state, "count")
  return count  # all are equal


def decays(params: dict) -> dict:
  """Whether parameters decay: if they have two axes, as in the released code.

  Axes of layers and experts do not count. Centroids, which have three, are
  directions of any length.
  """
  return jax.tree_util.tree_map_with_path(_is_matrix, params)


def _is_matrix(path, x):
  return jnp.ndim(x) - model_lib.num_stacks(path) == 2
