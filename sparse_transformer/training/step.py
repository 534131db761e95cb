"""One training step, as pure functions of the state and a batch."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparse_transformer import model as model_lib, schema
from sparse_transformer.training import optimizer as optimizer_lib

# Loss scales are powers of two, so that scaling causes no rounding.
FIRST = 2.0**15
SMALLEST = 1.0
LARGEST = 2.0**24
# The number of consecutive finite gradients after which the scale doubles.
GROWTH_INTERVAL = 2000


class LossScale(NamedTuple):
  """Dynamic loss scaling, which prevents float16 gradients from underflowing.

  The loss is multiplied by the scale, a power of two, before it is
  differentiated. The gradient is divided by the scale in float32. The scale
  doubles after `GROWTH_INTERVAL` consecutive finite gradients. A step with a
  non-finite gradient is skipped, and halves the scale.
  Source: Micikevicius et al. 2018, "Mixed precision training", section 3.2.
  """

  scale: jax.Array  # float32 scalar by which the loss is multiplied
  finite: jax.Array  # int32, finite gradients since the scale last changed
  skipped: jax.Array  # int32, steps skipped so far for non-finite gradients

  def after(self, loss: jax.Array, gradient_norm: jax.Array) -> "LossScale":
    """Returns the loss scale after a step.

    A non-finite loss does not change the scale, because the loss itself is
    computed before scaling.

    Args:
      loss: the unscaled loss, a scalar.
      gradient_norm: the norm of the unscaled gradient, a scalar.
    """
    # A gradient that overflows halves the scale; many finite ones double it.
    is_finite = jnp.isfinite(gradient_norm)
    grows = self.finite + 1 >= GROWTH_INTERVAL
    doubled = jnp.minimum(2 * self.scale, LARGEST)
    larger = jnp.where(grows, doubled, self.scale)
    smaller = jnp.maximum(self.scale / 2, SMALLEST)
    new = LossScale(
      scale=jnp.where(is_finite, larger, smaller),
      finite=jnp.where(is_finite & ~grows, self.finite + 1, 0),
      skipped=self.skipped + ~is_finite,
    )
    return jax.tree.map(
      lambda new, old: jnp.where(jnp.isfinite(loss), new, old),
      new,
      self,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """The training state: everything that a training step changes."""

  step: jax.Array  # int32 scalar, steps so far, including skipped steps
  params: dict  # nested dicts of arrays
  opt_state: optax.OptState
  ema: dict  # moving average of `params`, for evaluation and sampling
  loss_scale: LossScale | None = None  # only with float16


def init_state(
  params: dict, optimizer: optax.GradientTransformation, dtype: str
) -> State:
  """Returns the state before the first step.

  Args:
    params: the parameters of the network, which become part of the state.
    optimizer: the optimizer, from `optimizer.make_optimizer`.
    dtype: the dtype of activations. If it is float16, the state includes a loss
      scale.
  """
  # Each leaf must have its own buffer, because the whole state is donated to
  # `Experiment.update`, and a buffer cannot be donated twice.
  zero = lambda: jnp.zeros((), jnp.int32)
  loss_scale = None
  if dtype == "float16":
    loss_scale = LossScale(
      scale=jnp.float32(FIRST), finite=zero(), skipped=zero()
    )

  return State(
    step=zero(),
    params=params,
    opt_state=optimizer.init(params),
    ema=jax.tree.map(jnp.copy, params),
    loss_scale=loss_scale,
  )


def position_losses(logits_BLV: jax.Array, tokens_BL: jax.Array) -> jax.Array:
  """Returns the cross-entropy of each position in nats.

  Args:
    logits_BLV: predictions [B, L, V], or [B, C] for a classifier.
    tokens_BL: the integers to predict [B, L], or labelled rows [B, L + 2] for a
      classifier.

  Returns:
    float32 [B, L], or [B, 1] for a classifier.
  """
  if logits_BLV.ndim == 2:
    logits_BLV = logits_BLV[:, None]
    tokens_BL = labels(tokens_BL)[:, None]

  # Rows of images may end with the labels of their order. The network is
  # conditioned on these labels and does not predict them.
  tokens_BL = tokens_BL[:, : logits_BLV.shape[1]]
  return optax.softmax_cross_entropy_with_integer_labels(
    logits_BLV.astype(jnp.float32), tokens_BL.astype(jnp.int32)
  )


def labels(rows_BM: jax.Array) -> jax.Array:
  """Returns the labels [B] of labelled rows, see `data.Sequences`."""
  return rows_BM[:, -2]


def hits(logits_BC: jax.Array, rows_BM: jax.Array) -> jax.Array:
  """Returns whether the most probable class of each row is its label, [B]."""
  return logits_BC.argmax(1) == labels(rows_BM)


def make_losses(apply: Callable[..., jax.Array]) -> Callable[..., Any]:
  """Returns a jitted function that scores batches.

  Args:
    apply: the network, from `model.make_apply`.

  Returns:
    A function of (params, tokens_BL) that returns the loss of each position in
    nats, float32 [B, L]. For a classifier, this function returns a tuple: the
    loss of each label in nats, float32 [B, 1], and whether each prediction is
    correct, bool [B].
  """

  def losses(params, tokens_BL):
    logits = apply(params, tokens_BL)
    nats_BL = position_losses(logits, tokens_BL)
    if logits.ndim == 2:
      return nats_BL, hits(logits, tokens_BL)
    return nats_BL

  return jax.jit(losses)


def train_step(
  state: State,
  tokens_BL: jax.Array,
  schedule: optimizer_lib.Schedule | None = None,
  *,
  predict: Callable[..., tuple[jax.Array, model_lib.Measured]],
  config: schema.Config,
) -> tuple[State, dict[str, jax.Array]]:
  """Updates the parameters and their average on one batch.

  If the loss or the gradient of a batch is non-finite, the parameters, their
  average and the optimizer stay unchanged. Random numbers depend only on
  `train.seed` and `state.step`.

  Args:
    state: the state before the step.
    tokens_BL: integers [B, L], or labelled rows [B, L + 2]. B must be a
      multiple of `train.accumulation`.
    schedule: the schedule of the learning rate, from `optimizer.schedule`. If
      None, the schedule of the config is used.
    predict: a function (params, tokens_BL, rng) -> (logits_BLV, measured), from
      `model.make_predict`.
    config: the config of the experiment.

  Returns:
    (new state, metrics). The metrics are `nats`, the mean loss;
    `gradient_norm`, the norm before clipping; `learning_rate`; for a
    classifier, `accuracy`; with loss scaling, `loss_scale` and the number of
    `skipped_steps` so far; and the measurements of blocks.
  """
  (nats, measured), grads = _accumulate(state, tokens_BL, predict, config)

  # The schedule is an argument of the program, so that a change of the learning
  # rate or the number of steps does not require another compilation. Skipped
  # steps are not counted.
  due = schedule or optimizer_lib.schedule(config)
  updates_so_far = optimizer_lib.num_updates(state.opt_state)
  due = due._replace(
    step=jnp.where(jnp.less(due.step, 0), updates_so_far, due.step)
  )
  optimizer = optimizer_lib.make_optimizer(config, due)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  params = model_lib.project(params)

  # At first, the decay is small, so that the average of a short run is not
  # dominated by its initial weights. The schedule is that of
  # tf.train.ExponentialMovingAverage.
  decay = jnp.minimum(
    config.optimizer.ema_decay, (1 + state.step) / (10 + state.step)
  )
  ema = optax.incremental_update(params, state.ema, 1 - decay)

  metrics = dict(
    nats=nats,
    gradient_norm=optax.tree.norm(grads),
    learning_rate=optimizer_lib.rate(config.optimizer.schedule, due),
  )
  for name, x in measured.items():
    metrics[name] = x.mean(0) if x.ndim == 1 else x

  # A non-finite batch must not change the weights. The program has to ensure
  # this itself, because the caller reads the metrics one step later, when the
  # next update is already running.
  is_finite = jnp.isfinite(nats) & jnp.isfinite(metrics["gradient_norm"])
  params, opt_state, ema = jax.tree.map(
    lambda new, old: jnp.where(is_finite, new, old),
    (params, opt_state, ema),
    (state.params, state.opt_state, state.ema),
  )
  loss_scale = state.loss_scale
  if loss_scale:
    metrics["loss_scale"] = loss_scale.scale
    loss_scale = loss_scale.after(nats, metrics["gradient_norm"])
    metrics["skipped_steps"] = loss_scale.skipped
  new_state = State(
    step=state.step + 1,
    params=params,
    opt_state=opt_state,
    ema=ema,
    loss_scale=loss_scale,
  )
  return new_state, metrics


def _accumulate(state, tokens_BL, predict, config):
  """Computes the gradients and metrics of a batch in micro-batches.

  Returns:
    ((nats, measurements of blocks), gradients). Each value is the mean over the
    batch. The gradients are already divided by the loss scale.
  """
  micro = config.train.accumulation
  b, n = tokens_BL.shape
  # Assign neighboring examples to different micro-batches. A batch is split
  # over devices into contiguous parts, and each micro-batch must include
  # examples from every device.
  tokens_ABL = tokens_BL.reshape(b // micro, micro, n).swapaxes(0, 1)
  seed = jax.random.key(config.train.seed)
  rng = jax.random.fold_in(seed, state.step)
  scale = state.loss_scale.scale if state.loss_scale else 1.0

  def loss(params, tokens_BL, rng):
    logits_BLV, measured = predict(params, tokens_BL, rng)
    nats = position_losses(logits_BLV, tokens_BL).mean()

    # A measurement with one number per block is an auxiliary loss. A
    # measurement of any other shape is only reported.
    extra = 0.0
    for name, x in measured.items():
      if x.ndim == 1:
        extra += model_lib.LOSS_WEIGHTS[name] * x.mean()
    total = nats + extra
    if logits_BLV.ndim == 2:
      measured["accuracy"] = hits(logits_BLV, tokens_BL).mean()
    return total * scale, (nats, measured)

  gradient = jax.grad(loss, has_aux=True)

  def add(total, inputs):
    new = gradient(state.params, *inputs)
    return jax.tree.map(jnp.add, total, new), None

  # For a single micro-batch, avoid the sum, which would need memory for a
  # second copy of the gradients.
  rngs_A = jax.random.split(rng, micro)
  inputs = tokens_ABL, rngs_A
  first = [state.params] + [x[0] for x in inputs]
  if micro == 1:
    grads, means = gradient(*first)
  else:
    shapes = jax.eval_shape(gradient, *first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (grads, means), _ = jax.lax.scan(add, zeros, inputs)

  return (
    jax.tree.map(lambda x: x / micro, means),
    jax.tree.map(lambda x: x / (micro * scale), grads),
  )
