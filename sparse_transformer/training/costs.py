"""What a training step costs: operations, traffic, memory, decoding's cache.

Counted in the program of the step itself, traced without data or weights, so
that it follows the network and its rematerialisation; attention, whose program
holds the tables of its pattern, is counted by its pairs.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax

from sparse_transformer import patterns as patterns_lib
from sparse_transformer.model import transformer as model_lib
from sparse_transformer.training import step as training

BLOCK = 64  # positions of the tile that tells what is recomputed


def widths(model):
  """(K, E): widths of a head's queries and keys, and of its values."""
  return model.qk_width // model.num_heads, model.width // model.num_heads


def flops_per_pair(model):
  """Of training, forward and backward, two for a multiply-add.

  Forward: q k^T (K), p v (E). Backward: q k^T again and the gradients of q
  and k (K each), those of p and v (E each).
  """
  k, e = widths(model)
  return 2 * (4 * k + 3 * e)


def step(config, model, attended):
  """Operations and traffic of one update over the whole batch.

  attended: operations of attention in it, see `flops_per_pair`.
  """
  batch = config.train.batch_size
  tokens = batch * model.length
  state, width = _state(config, model), sum(widths(model)) * model.num_heads
  operations = dict(
    weights=_operations(_keep_all(model), batch)[0],
    attention=attended,
    recomputed=_recomputed_flops(model, batch, attended),
  )
  traffic = dict(
    weights=_operations(model, batch)[1],
    # q, k, v, out forward; these and dout, dq, dk, dv backward.
    attention=6 * tokens * width * model.num_layers * itemsize(model),
    # The state is read and written, the gradients are read.
    optimizer=2 * _bytes(state) + _bytes(state.params),
  )
  return dict(
    sequences=batch,
    tokens=tokens,
    flops=operations | dict(total=sum(operations.values())),
    bytes=traffic | dict(total=sum(traffic.values())),
  )


def memory(config, model):
  """Bytes on one device, at the end of the forward pass of a micro-batch."""
  state, sequences = _state(config, model), _sequences(config)
  activations, copies = _kept(model, sequences)
  parts = dict(
    parameters=_bytes(state.params),
    optimizer=_bytes(state.opt_state),
    average=_bytes(state.ema),
    # Those of a micro-batch and, where there are several, their sum.
    gradients=_bytes(state.params) * min(config.train.accumulation, 2),
    activations=activations,
    copies=copies,
    layer=_made_anew(model, sequences),
  )
  return dict(sequences=sequences, **parts, total=sum(parts.values()))


def rematerialisation(config, model, attended):
  """What each way of rematerialisation keeps, makes anew, and costs."""
  batch, sequences = config.train.batch_size, _sequences(config)
  ways = [dataclasses.replace(model, remat=r) for r in model_lib.REMATS]
  return {
    way.remat: dict(
      activations=_kept(way, sequences)[0],
      layer=_made_anew(way, sequences),
      recomputed=_recomputed_flops(way, batch, attended),
    )
    for way in ways
  }


def _sequences(config):
  """Of a micro-batch on one device."""
  devices = jax.local_device_count()
  return config.train.batch_size // devices // config.train.accumulation


@dataclasses.dataclass(frozen=True)
class _First(patterns_lib.Pattern):
  """One pair. The program around attention is the same for all patterns."""

  index: int

  def mask(self, q, k):
    return (q < 1) & (k < 1)


def _simple(model):
  """The network with stand-ins for its patterns, which are laid out at once."""
  index = {heads: _First(i) for i, heads in enumerate({*model.patterns})}
  layers = tuple((index[heads],) * len(heads) for heads in model.patterns)
  return dataclasses.replace(model, patterns=layers)


def _keep_all(model):
  return dataclasses.replace(model, remat="none")


def _state(config, model):
  """The shapes of all that training changes."""
  optimizer = training.make_optimizer(config)
  return jax.eval_shape(lambda: training.init_state(model, optimizer, 0))


def itemsize(model):
  return jnp.dtype(model.dtype).itemsize


def _bytes(tree):
  return sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )


def _trace(model, batch, differentiate, length=None):
  """The program of a derivative of the training loss: a jaxpr."""
  apply = training.make_apply(model)

  def loss(params, tokens_BL, key):
    logits_BLV = apply(params, tokens_BL, key)
    return training.position_losses(logits_BLV, tokens_BL).mean()

  def init():
    return training.init_state(model, optax.identity(), 0).params

  return jax.make_jaxpr(differentiate(loss))(
    jax.eval_shape(init),
    jax.ShapeDtypeStruct((batch, length or model.length), jnp.uint8),
    jax.eval_shape(lambda: jax.random.key(0)),
  )


@functools.lru_cache(maxsize=64)
def _kept(model, batch):
  """Bytes kept from the forward for the backward pass: (activations, rest).

  Activations are what grows with the batch. The rest are copies of weights,
  such as a scan over layers makes; the parameters themselves do not count.
  """

  def backward(loss):
    return lambda params, *inputs: jax.vjp(
      lambda params: loss(params, *inputs), params
    )[1]

  def kept(batch):
    program = _trace(_simple(model), batch, backward).jaxpr
    given = {id(x) for x in program.invars}
    made = {id(x): x.aval for x in program.outvars if id(x) not in given}
    return _bytes(list(made.values()))

  once, twice = kept(batch), kept(2 * batch)
  return twice - once, 2 * once - twice


def _made_anew(model, batch):
  """Bytes of activations that one layer's backward pass makes anew."""
  thrown_away = _kept(_keep_all(model), batch)[0] - _kept(model, batch)[0]
  return thrown_away // model.num_layers


def _recomputed_flops(model, batch, attended):
  """Operations of the forward pass that the backward pass repeats."""
  weights, without = (
    _operations(m, batch)[0] for m in (model, _keep_all(model))
  )
  k, e = widths(model)
  forward = attended * (k + e) // (4 * k + 3 * e)
  return weights - without + forward * _attended_again(model)


@functools.lru_cache(maxsize=64)
def _operations(model, batch):
  """(operations, bytes moved) of the matmuls with weights of a step."""
  found = list(_matmuls(_trace(_simple(model), batch, jax.grad)))
  return tuple(sum(numbers) for numbers in zip(*found, strict=True))


def _attended_again(model):
  """How often the forward pass of attention is run in the backward pass."""
  n, (k, e) = min(BLOCK, model.length), widths(model)
  layer = dataclasses.replace(
    model,
    num_layers=1,
    patterns=((patterns_lib.Causal(),) * model.num_heads,),
    backend="blocked",
    tile=n,
  )
  flops, without = (_attention_flops(m, n) for m in (layer, _keep_all(layer)))
  return round((flops - without) / (2 * (k + e) * model.num_heads * n**2))


@functools.lru_cache(maxsize=64)
def _attention_flops(model, length):
  """Operations of attention in a step on one sequence of some length."""
  program = _trace(model, 1, jax.grad, length)
  return sum(flops for flops, _ in _matmuls(program, of_attention=True))


def _matmuls(program, of_attention=False):
  """(operations, bytes read and written) of each matmul that is run.

  Those of attention have one matrix for each sequence and head, those of
  weights one for all.
  """
  for eqn, times in _equations(program):
    if eqn.primitive.name != "dot_general":
      continue
    (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
    if bool(batched) == of_attention:
      left, out = eqn.invars[0].aval, eqn.outvars[0].aval
      depth = math.prod(left.shape[axis] for axis in contracted)
      moved = _bytes([x.aval for x in (*eqn.invars, *eqn.outvars)])
      yield 2 * times * depth * math.prod(out.shape), times * moved


def _equations(program, times=1):
  """All equations of a jaxpr, with how often each is run."""
  for eqn in program.eqns:
    yield eqn, times
    inner = times * eqn.params.get("length", 1)  # of a scan
    for value in jax.tree.leaves(eqn.params, is_leaf=_is_program):
      if _is_program(value):
        yield from _equations(value, inner)


def _is_program(value):
  return hasattr(value, "eqns")
