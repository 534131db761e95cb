"""Layers as stacks: parameters of blocks with a leading axis of layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_transformer.model import experts, options, sharding
from sparse_transformer.model.block import ResidualBlock
from sparse_transformer.model.configure import Config
from sparse_transformer.model.experts import block_kinds

# What blocks measure: {name: [blocks that have it, ...]}. Scalars of a block
# are auxiliary losses; longer values are for the log.
Measured = dict[str, jax.Array]
# Of auxiliary losses, each the mean over the blocks that have it.
LOSS_WEIGHTS = experts.LOSSES | options.LOSSES


def period(config: Config) -> int:
  """The smallest number of layers after which patterns and blocks repeat."""
  layers = [*zip(config.patterns, block_kinds(config), strict=True)]
  periods = range(1, len(layers) + 1)
  return next(x for x in periods if layers[x:] == layers[:-x])


def sizes(config: Config) -> dict[int, int]:
  """{first layer: how many layers, one in each period, run as one}.

  Each layer after the last full period is alone.
  """
  num, every = config.num_layers, period(config)
  alone = range(num - num % every, num)
  return dict.fromkeys(range(every), num // every) | dict.fromkeys(alone, 1)


def layers_of(config: Config, name: str) -> list[int]:
  """The layers that have a part, by its name: a kind of blocks, or anything."""
  kinds = enumerate(block_kinds(config))
  is_kind = name.endswith("blocks")
  return [i for i, kind in kinds if kind.stack == name or not is_kind]


def num_stacks(path: tuple[Any, ...]) -> int:
  """Number of axes along which the parameter at a path is stacked."""
  stacked = {"blocks", *experts.STACKED, *options.STACKED}
  return len(stacked & {key.key for key in path})


def init(config: Config, rngs: nnx.Rngs) -> dict[str, ResidualBlock]:
  """The blocks of all layers by the names of their stacks."""
  kinds = block_kinds(config)

  def stack(kind):
    split = nnx.split_rngs(splits=kinds.count(kind))
    return split(nnx.vmap(lambda rngs: kind(config, rngs=rngs)))(rngs)

  return {kind.stack: stack(kind) for kind in dict.fromkeys(kinds)}


def pack(blocks: ResidualBlock) -> jax.tree_util.Partial:
  """A function that makes the block, as a pytree of a stack's parameters.

  All vectors become one array: a scan copies a layer out of each, and its
  gradient into another, with two launches on GPUs.
  """
  graph, params = nnx.split(blocks)
  leaves, structure = jax.tree.flatten(params)
  is_matrix = [x.ndim > 2 for x in leaves]
  matrices = [x for x in leaves if x.ndim > 2]
  vectors = [x for x in leaves if x.ndim == 2]
  ends = np.cumsum([x.shape[1] for x in vectors])[:-1]

  def make_block(matrices, vectors):
    vectors = map(sharding.keep_whole, jnp.split(vectors, ends, axis=-1))
    # Without a barrier, the compiler for GPUs would not add a bias, which is a
    # slice, in the kernel of a product.
    vectors = jax.lax.optimization_barrier(list(vectors))
    kinds = iter(vectors), iter(matrices)
    params = [next(kinds[k]) for k in is_matrix]
    return nnx.merge(graph, jax.tree.unflatten(structure, params))

  joined = jnp.concatenate(vectors, axis=1)
  return jax.tree_util.Partial(make_block, matrices, joined)


def take(config: Config, layer: int, stacked: dict[str, Any]) -> dict[str, Any]:
  """What a layer has of stacked parts, without parts that it lacks."""
  found = {}
  for name, tree in stacked.items():
    if layer in (layers := layers_of(config, name)):
      place = layers.index(layer)
      found[name] = jax.tree.map(lambda x, i=place: x[i], tree)
  return found


def scan(
  config: Config, step: Callable, carry: Any, stacked: dict[str, Any]
) -> tuple[Any, Measured]:
  """Runs all layers: a scan over full periods, and then the last layers.

  `step(carry, layer, index, stacked)` returns the next carry and what the layer
  measures. The layer is the first of the layers that run as one, `index` its
  place among them, see `sizes`; `take` finds what it has of the stacked parts.
  """
  num, every = config.num_layers, period(config)
  times = num // every

  def split(name, tree):
    """The arrays of full periods: [periods, places in one, ...]."""
    count = sum(layer < every for layer in layers_of(config, name))
    return jax.tree.map(
      lambda x: x[: times * count].reshape(times, count, *x.shape[1:]), tree
    )

  def run(carry, layers, index, stacked):
    measured = []
    for layer in layers:
      carry, new = step(carry, layer, index, stacked)
      measured.append(new)
    return carry, measured

  carry, scanned = jax.lax.scan(
    lambda carry, inputs: run(carry, range(every), *inputs),
    carry,
    (jnp.arange(times), {name: split(name, x) for name, x in stacked.items()}),
  )
  carry, last = run(carry, range(num - num % every, num), 0, stacked)
  return carry, _by_layer(scanned, last)


def _by_layer(scanned, last):
  """Joins what scanned layers [periods, ...] and the last ones measured."""
  measured = {}
  for name in sorted({name for layer in scanned for name in layer}):
    of_periods = jnp.stack([x[name] for x in scanned if name in x], axis=1)
    rest = [x[name][None] for x in last if name in x]
    measured[name] = jnp.concatenate(
      [of_periods.reshape(-1, *of_periods.shape[2:]), *rest]
    )
  return measured
