"""One step of training: pure functions of the state and a batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sparse_transformer.model import transformer as model_lib


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["step", "params", "opt_state", "ema"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
  """All that training changes.

  step: updates done so far. params: nested dicts of arrays. ema: their
  exponential moving average, which evaluation and sampling use.
  """

  step: jax.Array
  params: dict
  opt_state: optax.OptState
  ema: dict


def make_schedule(config):
  """Learning rate by step: linear warm-up, then cosine decay to 0.

  Child et al. 2019, section 6: 5,000 steps of warm-up.
  """
  steps, warmup = config.train.steps, config.optimizer.warmup_steps
  if steps < 0:
    raise ValueError(f"train.{steps=} must be at least 0")
  if not 0 <= warmup < max(1, steps) and steps:
    raise ValueError(
      f"optimizer.warmup_steps={warmup} must lie below train.steps={steps}"
    )
  return optax.warmup_cosine_decay_schedule(
    0.0,
    config.optimizer.learning_rate,
    warmup,
    max(steps, warmup + 1),
  )


def make_optimizer(config):
  """AdamW on gradients clipped by their global norm."""
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


def decays(params):
  """Which parameters decay: matrices, not biases, gains, the start vector.

  The released code decays every tensor of two dimensions or more; the axis
  of layers, by which those of the blocks are stacked, does not count.
  """

  def is_matrix(path, x):
    stacked = path[0] == jax.tree_util.DictKey("blocks")
    return jnp.ndim(x) - stacked > 1

  return jax.tree_util.tree_map_with_path(is_matrix, params)


def init_state(model_config, optimizer, seed):
  """The state before the first step."""
  model = model_lib.Transformer(model_config, rngs=nnx.Rngs(seed))
  params = nnx.to_pure_dict(nnx.state(model))
  return State(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    ema=jax.tree.map(jnp.copy, params),  # a copy: the state is donated
  )


def make_apply(model_config):
  """The network as a function (params, tokens_BL, key=None) -> logits_BLV."""
  graph = nnx.graphdef(
    nnx.eval_shape(
      lambda: model_lib.Transformer(model_config, rngs=nnx.Rngs(0))
    )
  )

  def apply(params, tokens_BL, key=None):
    return nnx.merge(graph, params)(tokens_BL, key=key)

  return apply


def position_losses(logits_BLV, tokens_BL):
  """Nats of each position, float32 [B, L]."""
  return optax.softmax_cross_entropy_with_integer_labels(
    logits_BLV.astype(jnp.float32), tokens_BL.astype(jnp.int32)
  )


def train_step(state, tokens_BL, *, apply, optimizer, config):
  """One update: (new state, metrics). Metrics are scalars on the device.

  apply: from `make_apply`. Randomness comes from (config.train.seed, step)
  alone, so a run that was cut goes on as if it had not been.
  """
  micro = config.train.accumulation
  b, n = tokens_BL.shape
  # Neighbours go to different micro-batches: with the batch sharded over
  # devices each micro-batch then still lies on all of them.
  tokens_ABL = tokens_BL.reshape(b // micro, micro, n).swapaxes(0, 1)
  key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)

  def loss(params, tokens_BL, key):
    return position_losses(apply(params, tokens_BL, key), tokens_BL).mean()

  def accumulate(total, inputs):
    new = jax.value_and_grad(loss)(state.params, *inputs)
    return jax.tree.map(jnp.add, total, new), None

  zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
  inputs = tokens_ABL, jax.random.split(key, micro)
  (nats, grads), _ = jax.lax.scan(accumulate, zeros, inputs)
  nats, grads = jax.tree.map(lambda x: x / micro, (nats, grads))

  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  # A young average follows closely, so that short runs are not held back by
  # their initial weights (the schedule of tf.train.ExponentialMovingAverage).
  decay = jnp.minimum(
    config.optimizer.ema_decay, (1 + state.step) / (10 + state.step)
  )
  ema = optax.incremental_update(params, state.ema, 1 - decay)
  metrics = dict(
    nats=nats,
    gradient_norm=optax.tree.norm(grads),
    learning_rate=make_schedule(config)(state.step),
  )
  # A bad batch must not reach the weights; the caller sees it in the metrics.
  good = jnp.isfinite(nats) & jnp.isfinite(metrics["gradient_norm"])
  kept = jax.tree.map(
    lambda new, old: jnp.where(good, new, old),
    (params, opt_state, ema),
    (state.params, state.opt_state, state.ema),
  )
  return State(state.step + 1, *kept), metrics
