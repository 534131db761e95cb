"""One step of training: pure functions of the state and a batch."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparse_transformer import model as model_lib, schema
from sparse_transformer.training import optimizer as optimizer_lib

# Scales of the loss are powers of two, so that they change no digits.
FIRST = 2.0**15
SMALLEST = 1.0
LARGEST = 2.0**24
GROWTH_INTERVAL = 2000  # finite gradients in a row that double the scale


class LossScale(NamedTuple):
  """Dynamic loss scaling, with which gradients in float16 do not underflow.

  The loss is multiplied by a power of two before it is differentiated, and its
  gradient is divided by it, in float32. The scale doubles after many finite
  gradients in a row; a non-finite one is skipped, and halves it.
  Source: Micikevicius et al. 2018, "Mixed precision training", section 3.2.
  """

  scale: jax.Array  # float32 scalar, what the loss is multiplied by
  finite: jax.Array  # int32, finite gradients since the scale last changed
  skipped: jax.Array  # int32, steps skipped so far because of their gradients

  def after(self, loss: jax.Array, gradient_norm: jax.Array) -> "LossScale":
    """The scale after a step with this loss and this norm, both unscaled.

    A non-finite loss changes nothing: it does not depend on the scale.
    """
    # Halved by a gradient that overflows, doubled after many that do not.
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
  """Everything that training changes."""

  step: jax.Array  # int32 scalar, steps so far, skipped ones included
  params: dict  # nested dicts of arrays
  opt_state: optax.OptState
  ema: dict  # moving average of `params`, for evaluation and sampling
  loss_scale: LossScale | None = None  # of float16


def init_state(
  params: dict, optimizer: optax.GradientTransformation, dtype: str
) -> State:
  """The state before the first step.

  Args:
    params: the network's parameters, which it contains.
    optimizer: from `optimizer.make_optimizer`.
    dtype: of activations; float16 has a loss scale.
  """
  # Each number and each tree has its own memory: `Experiment.update` is given
  # that of the whole state, and the same memory cannot be given twice.
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
  """Cross-entropy of each position in nats.

  Args:
    logits_BLV: predictions; [B, C] of a classifier.
    tokens_BL: the integers to predict; labelled rows [B, L + 2] of a
      classifier.

  Returns float32 [B, L]; [B, 1] of a classifier.
  """
  if logits_BLV.ndim == 2:
    logits_BLV = logits_BLV[:, None]
    tokens_BL = labels(tokens_BL)[:, None]

  # Rows of images may end in the labels of their order, which are given to the
  # network and not predicted.
  tokens_BL = tokens_BL[:, : logits_BLV.shape[1]]
  return optax.softmax_cross_entropy_with_integer_labels(
    logits_BLV.astype(jnp.float32), tokens_BL.astype(jnp.int32)
  )


def labels(rows_BM: jax.Array) -> jax.Array:
  """The labels [B] of labelled rows, see `data.Sequences`."""
  return rows_BM[:, -2]


def hits(logits_BC: jax.Array, rows_BM: jax.Array) -> jax.Array:
  """Whether the most probable class of each row is its label, bool [B]."""
  return logits_BC.argmax(1) == labels(rows_BM)


def make_losses(apply: Callable[..., jax.Array]) -> Callable[..., Any]:
  """A jitted function that scores batches.

  Args:
    apply: the network, from `model.make_apply`.

  Returns:
    (params, tokens_BL) -> nats of each position, float32 [B, L]; for a
    classifier, (nats of each label [B, 1], whether it is right [B]).
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

  A batch whose loss or gradient is non-finite changes neither these nor the
  optimizer. Random numbers depend on (`train.seed`, `state.step`) alone.

  Args:
    state: the state before the step.
    tokens_BL: integers, or labelled rows; `train.accumulation` divides B.
    schedule: from `optimizer.schedule`; if None, the config's.
    predict: (params, tokens_BL, rng) -> (logits_BLV, measured), from
      `model.make_predict`.
    config: the experiment's.

  Returns:
    (new state, metrics). Metrics are `nats`, the mean loss; `gradient_norm`,
    before clipping; `learning_rate`; for a classifier `accuracy`; with loss
    scaling `loss_scale` and `skipped_steps` so far; and what blocks measure.
  """
  (nats, measured), grads = _accumulate(state, tokens_BL, predict, config)

  # The schedule is an argument of the program, so that a change of the rate or
  # the number of steps needs no other program. Skipped steps do not count.
  due = schedule or optimizer_lib.schedule(config)
  updates_so_far = optimizer_lib.num_updates(state.opt_state)
  due = due._replace(
    step=jnp.where(jnp.less(due.step, 0), updates_so_far, due.step)
  )
  optimizer = optimizer_lib.make_optimizer(config, due)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  params = model_lib.project(params)

  # At first the average follows closely, so that the initial weights do not
  # hold back short runs (the schedule of tf.train.ExponentialMovingAverage).
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

  # A bad batch must not reach the weights. The caller sees it in the metrics
  # one step later, when the next update is already on its way.
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
  """Gradients and metrics of a batch, computed in micro-batches.

  Returns ((nats, what blocks measure), gradients), each the mean of the batch,
  and the gradients unscaled.
  """
  micro = config.train.accumulation
  b, n = tokens_BL.shape
  # Neighbors are assigned to different micro-batches: a batch is split over
  # devices in contiguous parts, and each micro-batch must have some of each.
  tokens_ABL = tokens_BL.reshape(b // micro, micro, n).swapaxes(0, 1)
  seed = jax.random.key(config.train.seed)
  rng = jax.random.fold_in(seed, state.step)
  scale = state.loss_scale.scale if state.loss_scale else 1.0

  def loss(params, tokens_BL, rng):
    logits_BLV, measured = predict(params, tokens_BL, rng)
    nats = position_losses(logits_BLV, tokens_BL).mean()

    # What blocks add to the loss is a number for each of them. Anything of
    # another shape is only measured.
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

  # A single micro-batch needs no sum, which would be a second copy of the
  # gradients in memory.
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
