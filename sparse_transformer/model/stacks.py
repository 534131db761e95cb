"""Layers as stacks: parameters of blocks with a leading axis of layers.

Layers whose patterns and blocks repeat run as one scan over periods: a network
of any depth compiles about as fast as one period.
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

# What blocks measure: {name: [blocks that have it, ...]}. Scalars of a block
# are auxiliary losses; longer values are for the log.
Measured = dict[str, jax.Array]


@functools.lru_cache(maxsize=64)
def block_kinds(config: Config) -> tuple[type[ResidualBlock], ...]:
  """Returns the class of each layer's block, as the options decide."""
  kinds = []
  for layer in range(config.num_layers):
    kind = ResidualBlock
    for option in options.of(config):
      kind = option.block(layer, kind)
    kinds.append(kind)
  return tuple(kinds)


def period(config: Config) -> int:
  """Returns after how many layers patterns and blocks repeat, at least 1."""
  layers = list(zip(config.patterns, block_kinds(config), strict=True))

  # The smallest shift at which the list is equal to itself. Without layers, or
  # a repetition, the two sides are empty at last.
  num = 1
  while layers[num:] != layers[:-num]:
    num += 1
  return num


def sizes(config: Config) -> dict[int, int]:
  """Counts the layers that run as one, by the first of them.

  These are the layers at one place in all periods. Each layer after the last
  full period is alone.

  Example: 5 layers of period 2 give {0: 2, 1: 2, 4: 1}.
  """
  every = period(config)
  times = config.num_layers // every
  alone = range(times * every, config.num_layers)
  return dict.fromkeys(range(every), times) | dict.fromkeys(alone, 1)


def layers_of(config: Config, name: str) -> list[int]:
  """Returns the layers that have a part.

  Args:
    config: of the network.
    name: of a stack, which only the layers of its kind of block have, or of
      anything else, which all have.
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
  """Draws the blocks of all layers, by the names of their stacks.

  Returns:
    One block for each stack, whose parameters have a first axis of layers.
  """
  kinds = block_kinds(config)

  def stack(kind):
    split = nnx.split_rngs(splits=kinds.count(kind))
    make = split(nnx.vmap(lambda rngs: kind(config, rngs=rngs)))
    return make(rngs)

  return {kind.stack: stack(kind) for kind in dict.fromkeys(kinds)}


def pack(blocks: ResidualBlock) -> jax.tree_util.Partial:
  """Packs stacked blocks, so that a scan takes few arrays.

  All vectors become one array: a scan copies a layer out of each, and its
  gradient into another, with two launches on GPUs.

  Returns:
    A function without arguments that makes the block. It is a pytree of the
    packed arrays: take a layer of each, and it makes the block of that layer.
  """
  graph, params = nnx.split(blocks)
  leaves, structure = jax.tree.flatten(params)

  # Two axes and that of layers are a matrix.
  is_matrix = [x.ndim > 2 for x in leaves]
  matrices = [x for x in leaves if x.ndim > 2]
  vectors = [x for x in leaves if x.ndim <= 2]
  sizes = [x.shape[1] for x in vectors]
  ends = np.cumsum(sizes)[:-1]

  def make_block(matrices, vectors):
    vectors = jnp.split(vectors, ends, axis=-1)
    vectors = [sharding.keep_whole(x) for x in vectors]
    # Without a barrier, the compiler for GPUs would not add a bias, which is a
    # slice, in the kernel of a product.
    vectors = jax.lax.optimization_barrier(vectors)

    # Back in the order of the leaves.
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
  """Takes a layer's own part of each stacked part, without those it lacks.

  Args:
    config: of the network.
    layer: its number among the layers that the stacks have.
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
  """Runs all layers: a scan over full periods, and then the last layers.

  Args:
    step: (carry, layer, index, stacked) -> (carry, measurements). The layer is
      the first of those that run as one, `index` its place among them, see
      `sizes`; `take` finds what it has of the stacked parts.
    carry: the first layer's.
    stacked: {name: a pytree of arrays with a first axis of layers}.

  Returns:
    (the last layer's carry, what layers measure).
  """
  every = period(config)
  times = config.num_layers // every  # full periods

  def split(name, tree):
    """Returns the arrays of full periods: [periods, layers of one, ...]."""
    # Of the layers of a period, as many as have this part.
    count = sum(layer < every for layer in layers_of(config, name))
    return jax.tree.map(
      lambda x: x[: times * count].reshape((times, count) + x.shape[1:]), tree
    )

  def run(layers, carry, inputs):
    """Runs some layers in turn; with its first argument set, a scan's body."""
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

  # The last layers, which begin another period, are not in a scan: they take
  # their parts from the stacks of all layers.
  alone = range(times * every, config.num_layers)
  carry, last = run(alone, carry, (0, stacked))
  return carry, _by_layer(scanned, last)


def _by_layer(scanned, last):
  """Joins what scanned layers [periods, ...] and the last ones measured."""
  # The last layers repeat the first ones: they measure nothing else.
  names = sorted({name for layer in scanned for name in layer})

  measured = {}
  for name in names:
    # Periods are the first axis, so that layers come in their own order.
    in_period = [x[name] for x in scanned if name in x]
    by_period = jnp.stack(in_period, axis=1)
    by_layer = [by_period.reshape((-1,) + by_period.shape[2:])]

    # The layers after the last full period.
    for x in last:
      if name in x:
        by_layer.append(x[name][None])
    measured[name] = jnp.concatenate(by_layer)
  return measured
