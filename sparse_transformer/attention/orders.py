"""Orders of positions, in which queries and keys are cut into tiles."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.patterns import Layout

# Metadata of the fields of a pytree that are not arrays.
STATIC = dict(static=True)

# A constant on the host, or a traced array.
Table = np.ndarray | jax.Array


class Arrangement(abc.ABC):
  """An order of positions, here or on several devices.

  `positions`, int32 [places], are -1 at places of padding.
  """

  @abc.abstractmethod
  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [B, L, ...] in this order; padded places hold finite values."""

  @abc.abstractmethod
  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Undoes `arrange`; a position without a place gets 0."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Order(Arrangement):
  """An order of positions on one device."""

  positions: Table  # int32 [places], the position at each place, -1 for padding
  # int32 [n], the place of each position, `len(positions)` for none.
  places: Table
  # Whether this is the natural order, without padding.
  is_natural: bool = dataclasses.field(metadata=STATIC)

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    if self.is_natural:
      return arrays
    return tuple(jnp.take(x, self.positions.clip(0), axis=1) for x in arrays)

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    if self.is_natural:
      return arrays
    take = functools.partial(jnp.take, axis=1, mode="fill", fill_value=0)
    return tuple(take(x, self.places) for x in arrays)


def make_order(order: np.ndarray, num_places: int) -> Order:
  """The first places of a permutation, padded where it has fewer."""
  n, kept = len(order), order[:num_places]
  positions = np.full(num_places, -1, np.int32)
  positions[: len(kept)] = kept
  places = np.full(n, num_places, np.int32)
  places[kept] = np.arange(len(kept))
  is_natural = np.array_equal(positions, np.arange(n))
  return Order(positions, places, is_natural)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Orders(Arrangement):
  """Several orders, one after another: a position has a place in each."""

  orders: tuple[Order, ...]

  @property
  def positions(self) -> jax.Array:
    return jnp.concatenate([jnp.asarray(x.positions) for x in self.orders])

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    # Rows of all heads at once are long, and few.
    rows = [x.reshape(*x.shape[:2], -1) for x in arrays]
    found = zip(*(x.arrange(*rows) for x in self.orders), strict=True)
    joined = (jnp.concatenate(x, 1) if len(x) > 1 else x[0] for x in found)
    return tuple(
      x.reshape(*x.shape[:2], *like.shape[2:])
      for x, like in zip(joined, arrays, strict=True)
    )

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Undoes `arrange` for gradients: adds up all places of a position."""
    ends = np.cumsum([len(x.positions) for x in self.orders])[:-1]
    found: list[jax.Array] = []
    for x in arrays:
      # In turn, so that only one of them needs memory at a time.
      x, found = lax.optimization_barrier((x, found))
      pieces = jnp.split(x.reshape(*x.shape[:2], -1), ends, 1)
      restored = [
        order.restore(piece)[0]
        for order, piece in zip(self.orders, pieces, strict=True)
      ]
      total = functools.reduce(jnp.add, restored)
      found.append(total.reshape(*total.shape[:2], *x.shape[2:]))
    return tuple(found)


def orders_of(layout: Layout) -> tuple[Order, Order]:
  """The orders of queries and of keys of a layout, in whole tiles.

  Keys after the last tile that is processed are left out if they are at least
  half of all; fewer do not pay for the copy that pads their gradients.
  """
  num_rows = -(-len(layout.query_order) // layout.tile)
  num_cols = max(layout.cols, default=0) + 1
  if num_cols > num_rows // 2:
    num_cols = num_rows
  queries = make_order(layout.query_order, num_rows * layout.tile)
  return queries, make_order(layout.key_order, num_cols * layout.tile)


# Arranges nothing, at any length; its positions are never read.
NATURAL = make_order(np.arange(0), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Slice(Arrangement):
  """An order of some consecutive positions."""

  order: Order  # of their numbers, counted from the first
  first: jax.Array  # int32, the first position

  @property
  def positions(self) -> jax.Array:
    at = jnp.asarray(self.order.positions)
    return jnp.where(at < 0, -1, self.first + at)

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return self.order.arrange(*arrays)

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return self.order.restore(*arrays)


def apply(function: Callable[..., Any], arrays: Any) -> Any:
  """function(*arrays) of a pytree's arrays, in the same structure."""
  leaves, structure = jax.tree.flatten(arrays)
  return jax.tree.unflatten(structure, function(*leaves))
