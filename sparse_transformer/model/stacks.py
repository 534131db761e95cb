"""Stacks of layers: parameters of blocks with a leading axis of layers.

Layers whose patterns and blocks repeat are run by one scan over periods, so a
network of any depth compiles about as fast as a single period.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_transformer.model import options, sharding
from sparse_transformer.model.block import ResidualBlock
from sparse_transformer.model.configure import Config

# Measurements of blocks: {name: array [blocks with this measurement, ...]}.
# Scalars of a block are auxiliary losses; other values are only logged.
Measured = dict[str, jax.Array]


@functools.lru_cache(maxsize=64)
def block_kinds(config: Config) -> tuple[type[ResidualBlock], ...]:
  """Returns the class of each layer's block, which options may replace."""
  kinds = []
  for layer in range(config.num_layers):
    kind = ResidualBlock
    for option in options.of(config):
      kind = option.block(layer, kind)
    kinds.append(kind)
  return tuple(kinds)


def period(config: Config) -> int:
  """Returns the number of layers after which patterns and blocks repeat."""
  layers = list(zip(config.patterns, block_kinds(config), strict=True))

  # Find the smallest shift, at least 1, at which the list is equal to itself.
  # The loop always ends, because both sides finally become empty.
  num = 1
  while layers[num:] != layers[:-num]:
    num += 1
  return num


def sizes(config: Config) -> dict[int, int]:
  """Maps the first layer of each scanned group to the size of the group.

  A scanned group contains one layer of each full period, always at the same
  place within the period. Each layer after the last full period is a group of
  its own.

  Example: 5 layers of period 2 give {0: 2, 1: 2, 4: 1}.
  """
  every = period(config)
  times = config.num_layers // every
  alone = range(times * every, config.num_layers)
  return dict.fromkeys(range(every), times) | dict.fromkeys(alone, 1)


def layers_of(config: Config, name: str) -> list[int]:
  """Returns the indices of the layers that have a given part.

  Args:
    config: config of the network.
    name: name of the part. Only layers with the same kind of block have a stack
      of blocks. All layers have the parts with other names.
  """
  is_stack = name.endswith("blocks")
  return [
    layer
    for layer, kind in enumerate(block_kinds(config))
    if kind.stack == name or not is_stack
  ]


def num_stacks(path: tuple[Any, ...]) -> int:
  """Counts the axes along which the parameter at a path is stacked."""
  names = [str(key.key) for key in path]
  return sum(x in options.STACKED or x.endswith("blocks") for x in names)


def init(config: Config, rngs: nnx.Rngs) -> dict[str, ResidualBlock]:
  """Draws the blocks of all layers.

  Returns:
    {name of a stack: one block, whose parameters have a first axis of layers}.
  """
  kinds = block_kinds(config)

  def stack(kind):
    split = nnx.split_rngs(splits=kinds.count(kind))
    make = split(nnx.vmap(lambda rngs: kind(config, rngs=rngs)))
    return make(rngs)

  return {kind.stack: stack(kind) for kind in dict.fromkeys(kinds)}


def pack(blocks: ResidualBlock) -> jax.tree_util.Partial:
  """Packs stacked blocks, so that a scan needs only a few arrays.

  All vectors are joined into one array. For each array, a scan copies one
  layer's slice out of the array, and the gradient of this slice into another
  array. On GPUs, the two copies take two kernel launches.

  Returns:
    A function without arguments that returns the block. The function is also a
    pytree whose leaves are the packed arrays. If each array is replaced by its
    slice for one layer, the function returns the block of this layer.
  """
  graph, params = nnx.split(blocks)
  leaves, structure = jax.tree.flatten(params)

  # A stacked matrix has three axes: layers and its own two.
  is_matrix = [x.ndim > 2 for x in leaves]
  matrices = [x for x in leaves if x.ndim > 2]
  vectors = [x for x in leaves if x.ndim <= 2]
  sizes = [x.shape[1] for x in vectors]
  ends = np.cumsum(sizes)[:-1]

  def make_block(matrices, vectors):
    vectors = jnp.split(vectors, ends, axis=-1)
    vectors = [sharding.keep_whole(x) for x in vectors]
    # Without this barrier, the compiler for GPUs would not fuse the addition of
    # a bias, which is a slice of the array, with a product.
    vectors = jax.lax.optimization_barrier(vectors)

    # Restore the order of the leaves.
    remaining = {
      True: iter(matrices),
      False: iter(vectors),
    }
    leaves = [next(remaining[x]) for x in is_matrix]
    params = jax.tree.unflatten(structure, leaves)
    return nnx.merge(graph, params)

  joined = jnp.concatenate(vectors, axis=1)
  return jax.tree_util.Partial(make_block, matrices, joined)


def take(config: Config, layer: int, stacked: dict[str, Any]) -> dict[str, Any]:
  """Takes a layer's slice of each stacked part that the layer has.

  Args:
    config: config of the network.
    layer: index of the layer, counted from the first layer in the stacks.
    stacked: {name: a pytree of arrays with a first axis of layers}.
  """
  parts = {}
  for name, tree in stacked.items():
    layers = layers_of(config, name)
    if layer in layers:
      index = layers.index(layer)
      parts[name] = jax.tree.map(operator.itemgetter(index), tree)
  return parts


def scan(
  config: Config, step: Callable, carry: Any, stacked: dict[str, Any]
) -> tuple[Any, Measured]:
  """Scans over full periods of layers, and then runs the remaining layers.

  Args:
    step: (carry, layer, index, stacked) -> (carry, measurements). `layer` is
      the first layer of a scanned group, see `sizes`, and `index` is the place
      of the current layer in this group. `take` returns the layer's slice of
      the stacked parts.
    carry: the initial carry.
    stacked: {name: a pytree of arrays with a first axis of layers}.

  Returns:
    (the final carry, measurements of all layers).
  """
  every = period(config)
  times = config.num_layers // every  # full periods

  def split(name, tree):
    """Returns the arrays of full periods: [periods, layers per period, ...]."""
    # The number of layers in a period that have this part.
    count = sum(layer < every for layer in layers_of(config, name))
    return jax.tree.map(
      lambda x: x[: times * count].reshape((times, count) + x.shape[1:]), tree
    )

  def run(layers, carry, inputs):
    """Runs layers one after another; a `partial` of it is the scan's body."""
    index, stacked = inputs
    measured = []
    for layer in layers:
      carry, measured_by_layer = step(carry, layer, index, stacked)
      measured.append(measured_by_layer)
    return carry, measured

  run_period = functools.partial(run, range(every))
  periods = {name: split(name, tree) for name, tree in stacked.items()}
  inputs = jnp.arange(times), periods
  carry, scanned = jax.lax.scan(run_period, carry, inputs)

  # The last layers, which begin an incomplete period, are not in the scan. They
  # take their parts from the stacks of all layers.
  alone = range(times * every, config.num_layers)
  carry, last = run(alone, carry, (0, stacked))
  return carry, _by_layer(scanned, last)


def _by_layer(scanned, last):
  """Joins measurements of scanned [periods, ...] and of remaining layers."""
  # The last layers repeat the first ones, so they measure nothing new.
  names = sorted({name for layer in scanned for name in layer})

  measured = {}
  for name in names:
    # Periods are on the first axis, so that layers stay in order.
    in_period = [x[name] for x in scanned if name in x]
    by_period = jnp.stack(in_period, axis=1)
    by_layer = [by_period.reshape((-1,) + by_period.shape[2:])]

    # The layers after the last full period.
    for x in last:
      if name in x:
        by_layer.append(x[name][None])
    measured[name] = jnp.concatenate(by_layer)
  return measured
