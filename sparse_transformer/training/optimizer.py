"""The optimizer of Child et al. 2019, section 6."""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


def make_schedule(config: ConfigDict) -> optax.Schedule:
  """Learning rate by step: linear warm-up, then cosine decay to 0.

  Args:
    config: the experiment's config; uses `train.steps`,
      `optimizer.warmup_steps` and `optimizer.learning_rate`, the peak.

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
    peak_value=config.optimizer.learning_rate,
    warmup_steps=warmup,
    decay_steps=max(steps, warmup + 1),
  )


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
  """AdamW on gradients that are clipped by their global norm."""
  optimizer = config.optimizer
  return optax.chain(
    optax.clip_by_global_norm(optimizer.clip_norm),
    optax.adamw(
      make_schedule(config),
      b1=optimizer.beta1,
      b2=optimizer.beta2,
      eps=optimizer.epsilon,
      weight_decay=optimizer.weight_decay,
      mask=decays,
    ),
  )


def learning_rate(
  config: ConfigDict, opt_state: optax.OptState
) -> jax.Array | float:
  """The learning rate of the next update, by the number of updates so far."""
  count = optax.tree.get(
    opt_state,
    "count",
    filtering=lambda path, _: path[-1].tuple_name == "ScaleByScheduleState",
  )
  return make_schedule(config)(count)


def decays(params: dict) -> dict:
  """Which parameters decay: matrices, but not biases, gains or start vector.

  As in the released code, these are tensors of two or more dimensions. The axis
  of layers along which the parameters of the blocks are stacked does not count.

  Returns:
    A bool for each array, in the structure of `params`.
  """

  def is_matrix(path, x):
    is_stacked = path[0] == jax.tree_util.DictKey("blocks")
    return jnp.ndim(x) - is_stacked >= 2

  return jax.tree_util.tree_map_with_path(is_matrix, params)
