"""Layers as stacks: parameters of blocks with a leading axis of layers.

A scan runs over the periods of patterns and blocks, so that the compiled
program does not grow with depth; the layers after the last period follow.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_transformer.model import options, sharding
from sparse_transformer.model.block import ResidualBlock
from sparse_transformer.model.hyperparameters import Config

# What blocks measure: {name: [blocks that have it, ...]}. Scalars of a block
# are auxiliary losses; longer values are for the log.
Measured = dict[str, jax.Array]


def period(config: Config) -> int:
  """The smallest number of layers after which patterns and blocks repeat."""
  layers = [*zip(config.patterns, options.block_kinds(config), strict=True)]
  return next(
    period
    for period in range(1, len(layers) + 1)
    if layers[period:] == layers[:-period]
  )


def stacks(config: Config) -> dict[int, range]:
  """The layers that run as one, by their first: those at a place of periods.

  Each layer after the last full period is alone.
  """
  num, every = config.num_layers, period(config)
  end = num - num % every
  found = {first: range(first, end, every) for first in range(every)}
  return found | {last: range(last, last + 1) for last in range(end, num)}


def init(config: Config, rngs: nnx.Rngs) -> dict[str, ResidualBlock]:
  """The blocks of all layers by the names of their stacks."""
  kinds = options.block_kinds(config)

  def stack(kind):
    split = nnx.split_rngs(splits=kinds.count(kind))
    return split(nnx.vmap(lambda rngs: kind(config, rngs=rngs)))(rngs)

  return {kind.stack: stack(kind) for kind in dict.fromkeys(kinds)}


def pack(blocks: ResidualBlock) -> tuple[Any, Callable]:
  """(parameters of a stack of blocks, function from those of one to the block).

  All vectors become one array: a scan copies a layer out of each, and its
  gradient into another, with two launches on GPUs.
  """
  graph, params = nnx.split(blocks)
  leaves, structure = jax.tree.flatten(params)
  is_matrix = [leaf.ndim > 2 for leaf in leaves]
  matrices = [x for x in leaves if x.ndim > 2]
  vectors = [x for x in leaves if x.ndim == 2]
  ends = np.cumsum([x.shape[1] for x in vectors])[:-1]

  def make_block(packed):
    matrices, vectors = packed
    vectors = map(sharding.keep_whole, jnp.split(vectors, ends, axis=-1))
    # Without a barrier, the compiler for GPUs would not add a bias, which is a
    # slice, in the kernel of a product.
    vectors = jax.lax.optimization_barrier(list(vectors))
    kinds = iter(vectors), iter(matrices)
    params = [next(kinds[k]) for k in is_matrix]
    return nnx.merge(graph, jax.tree.unflatten(structure, params))

  return (matrices, jnp.concatenate(vectors, axis=1)), make_block


def layers_of(config: Config, stack: str) -> list[int]:
  """The layers whose blocks have this name in the parameters."""
  kinds = enumerate(options.block_kinds(config))
  return [layer for layer, kind in kinds if kind.stack == stack]


def index_in(config: Config, name: str, layer: int) -> int:
  """The place of a layer in what is stacked, by name: all layers, or a kind."""
  kinds = [kind.stack for kind in options.block_kinds(config)]
  return kinds[:layer].count(name) if name in kinds else layer


def by_period(config: Config, stacked: dict[str, Any]) -> dict[str, Any]:
  """The stacked arrays of full periods: [periods, places in one, ...]."""
  every = period(config)
  times = config.num_layers // every

  def split(name, tree):
    count = index_in(config, name, every)
    return jax.tree.map(
      lambda p: p[: times * count].reshape(times, count, *p.shape[1:]), tree
    )

  return {name: split(name, tree) for name, tree in stacked.items()}


def by_layer(scanned: list[Measured], last: list[Measured]) -> Measured:
  """Joins what scanned layers [periods, ...] and the last ones measured."""
  measured = {}
  for name in sorted({name for layer in scanned for name in layer}):
    of_periods = jnp.stack([x[name] for x in scanned if name in x], axis=1)
    rest = [x[name][None] for x in last if name in x]
    measured[name] = jnp.concatenate(
      [of_periods.reshape(-1, *of_periods.shape[2:]), *rest]
    )
  return measured
