"""The optimizer of Child et al. 2019, section 6, and Muon in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparse_transformer import model as model_lib, schema

CLIP_NORM = 1.0  # of all gradients together; Child et al. 2019
EPSILON = 1e-8  # added to the root of the mean squared gradient; as released


def make_schedule(config: schema.Config, peak: float = 0.0) -> optax.Schedule:
  """Learning rate by step: linear warm-up to a peak, then cosine decay to 0.

  The peak of 0 stands for `optimizer.learning_rate`.

  Raises:
    ValueError: the warm-up does not end before the last step.
  """
  steps, warmup = config.train.steps, config.optimizer.warmup_steps
  if steps and warmup >= steps:
    raise ValueError(
      f"optimizer.warmup_steps={warmup} must be less than train.steps={steps}"
    )
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=peak or config.optimizer.learning_rate,
    warmup_steps=warmup,
    decay_steps=max(steps, warmup + 1),
  )


def make_optimizer(config: schema.Config) -> optax.GradientTransformation:
  """`optimizer.name` on gradients that are clipped by their global norm.

  Muon is for the matrices of the blocks, which decay; Adam for all else. Its
  updates have the root mean square of Adam's, so learning rates carry over.

  Source: Jordan et al. 2024, Muon; Liu et al. 2025, arXiv 2502.16982.

  Raises:
    ValueError: the warm-up does not end before the last step, or AdamW is given
      a learning rate of Muon's Adam.
  """
  settings, rate = config.optimizer, config.optimizer.adam_learning_rate
  common = dict(eps=EPSILON, weight_decay=settings.weight_decay)
  clip = optax.clip_by_global_norm(CLIP_NORM)
  if settings.name == "muon":
    return optax.chain(
      clip,
      optax.contrib.muon(
        make_schedule(config),
        adam_b1=settings.beta1,
        adam_b2=settings.beta2,
        adam_learning_rate=make_schedule(config, rate),
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
  adamw = optax.adamw(make_schedule(config), mask=decays, **betas, **common)
  return optax.chain(clip, adamw)


def _block_matrices(params):
  """(inputs, outputs) axes of the stacked matrices of blocks; else None."""

  def of(path, x):
    if (first := model_lib.num_stacks(path)) and _is_matrix(path, x):
      return optax.contrib.MuonDimensionNumbers(first, first + 1)
    return None

  return jax.tree_util.tree_map_with_path(of, params)


def _of_schedule(path, _):
  return path[-1].tuple_name == "ScaleByScheduleState"


def due(config: schema.Config, step: int, share: float | None) -> np.int32:
  """Which step's learning rate the next update has; -1 for that of its own.

  With a limit of time, of which a share has passed, the decay follows the
  clock, and warm-up takes at most a tenth of the time.
  """
  if share is None:
    return np.int32(-1)
  warmup = config.optimizer.warmup_steps
  warmed = max(step, int(10 * share * warmup))
  if warmed < warmup:
    return np.int32(warmed)
  return np.int32(max(warmup, int(share * config.train.steps)))


def at_step(opt_state: optax.OptState, step: jax.Array | int) -> optax.OptState:
  """The state with the learning rate of a step from `due`."""
  count = jnp.where(step < 0, _updates(opt_state), step)
  return optax.tree.set(opt_state, _of_schedule, count=count)


def learning_rate(
  config: schema.Config, opt_state: optax.OptState
) -> jax.Array | float:
  """The learning rate of the next update, by the number of updates so far."""
  return make_schedule(config)(_updates(opt_state))


def _updates(opt_state):
  find = optax.tree.get_all_with_path
  counts = find(opt_state, "count", filtering=_of_schedule)
  return counts[0][1]  # Muon's and Adam's are equal


def decays(params: dict) -> dict:
  """Whether parameters decay: those with two axes, as in the released code.

  Axes of layers and experts do not count. Centroids, which have three, are
  directions of any length.
  """
  return jax.tree_util.tree_map_with_path(_is_matrix, params)


def _is_matrix(path, x):
  return jnp.ndim(x) - model_lib.num_stacks(path) == 2
