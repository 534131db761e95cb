"""The costs of a step: FLOPs, memory traffic, state, utilization.

They follow from the sizes of the network and the number of pairs in its
patterns. How much memory activations take, only the compiler knows.
"""

import collections
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from sparse_transformer import model as model_lib
from sparse_transformer.attention import platforms
from sparse_transformer.attention.contract import Case
from sparse_transformer.model.experts import PER_TOKEN
from sparse_transformer.model.sharding import spec
from sparse_transformer.patterns import analysis
from sparse_transformer.training import step as step_lib
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.explanation.peaks import peak_flops
from sparse_transformer.training.optimizer import make_optimizer

# The products that the backward pass of a block recomputes, by `model.remat`:
# all that its other matmuls and attention need again. "none" recomputes the
# cheapest, the one after attention, in place of keeping a sum.
REPEATED: dict[str, tuple[str, ...]] = {
  "none": ("out",),
  "attention": ("qkv", "attention", "out"),
  "block_but_attention": ("qkv", "out", "router", "mlp_in"),
  "block": ("qkv", "attention", "out", "router", "mlp_in"),
}


class Matmul(NamedTuple):
  """A product with weights."""

  inputs: int  # rows of the matrix
  outputs: int  # columns of the matrix
  matrices: int = 1  # number of matrices, one for each expert
  used: int = 1  # how many of them each token is multiplied by

  @property
  def flops(self) -> int:
    """FLOPs of a token."""
    return 2 * self.inputs * self.outputs * self.used

  def moved(self, tokens: int) -> int:
    """Numbers that are read and written: operands and results."""
    of_tokens = tokens * self.used * (self.inputs + self.outputs)
    return of_tokens + self.inputs * self.outputs * self.matrices


def widths(model: model_lib.Config) -> tuple[int, int]:
  """(K, E): widths of a head's queries and keys, and of its values."""
  return model.qk_width // model.num_heads, model.width // model.num_heads


def attention_case(
  config: ConfigDict, model: model_lib.Config, platform: str = ""
) -> Case:
  """The attention of one micro-batch; by default, on this machine's devices."""
  platform = platform or platforms.current_platform()
  micro = config.train.batch_size // config.train.accumulation
  sizes = micro, model.length, model.num_heads, *widths(model)
  return Case(*sizes, model.dtype, platform, model.tile, model.num_key_heads)


def count_pairs(model: model_lib.Config) -> int:
  """Pairs of one sequence in all heads; of content-based ones, as expected."""
  heads = collections.Counter(itertools.chain(*model.patterns))
  return sum(heads[x] * analysis.count_pairs(x, model.length) for x in heads)


def keys_per_query(model: model_lib.Config) -> float:
  """Mean number of keys of a query, over positions, heads and layers."""
  return count_pairs(model) / (model.length * sum(map(len, model.patterns)))


def flops_per_pair(model: model_lib.Config) -> int:
  """FLOPs of a pair in one head, forward and backward, as executed.

  Forward: q k^T (K multiply-adds) and p v (E). Backward: q k^T again, the
  gradients of q and k (K each), and those of p and v (E each).
  """
  k, e = widths(model)
  return 2 * (4 * k + 3 * e)


def model_flops(config: ConfigDict, model: model_lib.Config) -> int:
  """FLOPs that one step needs, however it is executed.

  The backward pass counts as twice the forward pass. What it recomputes does
  not count, whether for rematerialization or the scores of attention.
  Attention counts by the pairs of its patterns, and experts by how many of them
  a position passes through.

  Source: Chowdhery et al. 2022 (PaLM), appendix B.
  """
  batch = config.train.batch_size
  attention = 6 * sum(widths(model)) * count_pairs(model)
  return batch * (3 * _weight_flops(model) * model.length + attention)


def flops_per_token(config: ConfigDict, model: model_lib.Config) -> float:
  """`model_flops` of a token; the same for any batch."""
  tokens = config.train.batch_size * model.length
  return model_flops(config, model) / tokens


def speed(
  tokens_per_second: float, flops_per_token: float, dtype: str
) -> dict[str, float]:
  """The speed fields of a line of metrics; none if the speed is unknown (0).

  `mfu`, model-FLOPs utilization, is the fraction of the peak of all devices; it
  is omitted for devices whose peak is not known. `tokens_per_second` counts all
  devices; `dtype` is that of activations.
  """
  if not tokens_per_second:
    return {}
  flops, devices = tokens_per_second * flops_per_token, jax.devices()
  fields = {"tokens_per_second": tokens_per_second}
  fields["model_flops_per_second"] = flops
  if peak := peak_flops(devices[0].device_kind, dtype):
    fields["mfu"] = flops / (peak * len(devices))
  return fields


def step(
  config: ConfigDict, model: model_lib.Config, pairs: int
) -> dict[str, Any]:
  """FLOPs and bytes moved of a step; `pairs` is from `count_pairs`."""
  batch = config.train.batch_size
  tokens = batch * model.length
  state, repeated = abstract_state(config, model), REPEATED[model.remat]
  again = sum(p.flops for name, p in _matmuls(model) if name in repeated)
  scores = 2 * pairs * batch * sum(widths(model)) * ("attention" in repeated)
  flops = dict(
    weights=3 * _weight_flops(model) * tokens,
    attention=pairs * batch * flops_per_pair(model),
    recomputed=again * tokens + scores,
  )
  head_widths = sum(widths(model)) * model.num_heads * model.num_layers
  # Each matmul runs three times, forward and for both gradients, and once more
  # if it is recomputed.
  moved = sum(
    product.moved(tokens) * (3 + (name in repeated))
    for name, product in _matmuls(model)
  )
  predicted = batch if model.classifies else tokens
  logits = 3 * Matmul(model.width, model.outputs).moved(predicted)  # in float32
  traffic = dict(
    weights=moved * itemsize(model) + logits * 4,
    # q, k, v, out forward; these and dout, dq, dk, dv backward.
    attention=6 * tokens * head_widths * itemsize(model),
    # The state is read and written, the gradients are read.
    optimizer=2 * _num_bytes(state) + _num_bytes(state.params),
  )
  flops["total"], traffic["total"] = sum(flops.values()), sum(traffic.values())
  return dict(sequences=batch, tokens=tokens, flops=flops, bytes=traffic)


def memory(config: ConfigDict, model: model_lib.Config) -> dict[str, int]:
  """Bytes of the training state and of its gradients on one device."""
  state, sizes = abstract_state(config, model), mesh.sizes(config)
  weights = bytes_on_device(state.params, sizes)
  parts = dict(
    parameters=weights,
    optimizer=bytes_on_device(state.opt_state, sizes),
    average=bytes_on_device(state.ema, sizes),
    # Of one micro-batch and, if there are several, also their sum.
    gradients=weights * min(config.train.accumulation, 2),
  )
  return parts | dict(total=sum(parts.values()))


def itemsize(model: model_lib.Config) -> int:
  """Bytes of an activation."""
  return jnp.dtype(model.dtype).itemsize


def _matmuls(model: model_lib.Config) -> Iterator[tuple[str, Matmul]]:
  """(name, product) for each product with weights in each block."""
  width, inner = model.width, model.mlp_width
  with_experts = model_lib.layers_of(model, "expert_blocks")
  for layer in range(model.num_layers):
    has_experts = layer in with_experts
    experts = (model.experts, PER_TOKEN) if has_experts else ()
    yield "qkv", Matmul(width, model.qk_width)
    for of_key_head in widths(model):
      yield "qkv", Matmul(width, of_key_head * model.num_key_heads)
    yield "out", Matmul(width, width)
    yield "mlp_in", Matmul(width, inner, *experts)
    yield "mlp_out", Matmul(inner, width, *experts)
    if has_experts:
      yield "router", Matmul(width, model.experts)


def _weight_flops(model: model_lib.Config) -> int:
  """FLOPs of a token's products with weights, in a forward pass."""
  of_blocks = sum(product.flops for _, product in _matmuls(model))
  if model.classifies:
    return of_blocks  # the output layer runs once for a sequence
  return of_blocks + Matmul(model.width, model.vocab_size).flops


def bytes_on_device(tree: Any, sizes: mesh.Sizes) -> int:
  """Bytes that a training state, or a part of one, takes on each device."""
  return sum(
    _num_bytes(x) // math.prod(sizes[axis] for axis in spec(path, x) if axis)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  )


def abstract_state(
  config: ConfigDict, model: model_lib.Config
) -> step_lib.State:
  """The shapes of a network's training state."""
  optimizer, params = make_optimizer(config), model_lib.param_shapes(model)
  init = functools.partial(
    step_lib.init_state, optimizer=optimizer, dtype=model.dtype
  )
  return jax.eval_shape(init, params)


def _num_bytes(tree: Any) -> int:
  return sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )
