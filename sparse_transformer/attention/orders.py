"""Orders of positions, in which queries and keys are cut into tiles.

The pairs of a pattern may be scattered in natural order, but form dense blocks
in a different order. For example, the pairs of a strided pattern form dense
blocks if positions are sorted by their remainder modulo the stride. An order
also stores the original positions, because masks are defined on these.
"""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.patterns import Layout

# Metadata of static pytree fields, which are not arrays.
STATIC = dict(static=True)

# A host constant, or a traced array.
Table = np.ndarray | jax.Array


class Arrangement(abc.ABC):
  """An order of positions, on one device or on several.

  `arrange` and `restore` map a pytree of arrays, with positions on axis 1, to a
  pytree of the same structure. An order has places, each of which contains a
  position or padding.
  """

  @property
  @abc.abstractmethod
  def positions(self) -> Table:
    """The position at each place, int32 [places]; -1 for padding."""

  @abc.abstractmethod
  def arrange(self, arrays: Any) -> Any:
    """Sorts arrays [B, L, ...] into this order; padding gets finite values."""

  @abc.abstractmethod
  def restore(self, arrays: Any) -> Any:
    """Undoes `arrange`; positions without a place get 0."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Order(Arrangement):
  """An order of positions on one device."""

  rows: Table  # int32 [places], the row at each place, -1 for padding
  # int32 [n], the place of each row, or `len(rows)` if it has none.
  places: Table
  # Whether this is the natural order, without padding.
  is_natural: bool = dataclasses.field(metadata=STATIC)
  first: jax.Array | None = None  # the position of the first row; None for 0

  @property
  def positions(self) -> Table:
    if self.first is None:
      return self.rows
    rows = jnp.asarray(self.rows)
    return jnp.where(rows < 0, -1, self.first + rows)

  def arrange(self, arrays: Any) -> Any:
    if self.is_natural:
      return arrays

    # Padding gets row 0, which masks hide. Zeros would need another pass over
    # the arrays.
    rows = self.rows.clip(0)
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=1), arrays)

  def restore(self, arrays: Any) -> Any:
    if self.is_natural:
      return arrays

    # Gather by the inverse order, because a scatter would have to write zeros
    # first.
    take = functools.partial(jnp.take, axis=1, mode="fill", fill_value=0)
    return jax.tree.map(lambda x: take(x, self.places), arrays)


def make_order(
  order: np.ndarray, num_places: int, first: jax.Array | None = None
) -> Order:
  """Makes an `Order` from the first rows that a permutation lists.

  The order is padded if the permutation is shorter than the order.

  Args:
    order: a permutation of n rows.
    num_places: number of places of the order.
    first: the position of the first row; None for 0.
  """
  n = len(order)
  kept = order[:num_places]

  rows = np.full(num_places, -1, np.int32)
  rows[: len(kept)] = kept

  places = np.full(n, num_places, np.int32)
  places[kept] = np.arange(len(kept))

  return Order(
    rows=rows,
    places=places,
    is_natural=np.array_equal(rows, np.arange(n)),
    first=first,
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Orders(Arrangement):
  """Several orders, one after another; a position may have a place in each."""

  orders: tuple[Order, ...]

  @property
  def positions(self) -> Table:
    return jnp.concatenate([jnp.asarray(x.positions) for x in self.orders])

  def arrange(self, arrays: Any) -> Any:
    def arrange_array(x):
      # Joining the heads makes rows long and few, which are faster to gather.
      rows = _join_heads(x)
      pieces = [order.arrange(rows) for order in self.orders]

      joined = pieces[0]
      if len(pieces) > 1:
        joined = jnp.concatenate(pieces, 1)
      return _split_heads(joined, x)

    return jax.tree.map(arrange_array, arrays)

  def restore(self, arrays: Any) -> Any:
    """Undoes `arrange` for gradients, by adding up all places of a position."""
    leaves, structure = jax.tree.flatten(arrays)
    restored: list[jax.Array] = []
    for x in leaves:
      # Arrays are restored one after another, so that only one needs memory at
      # a time.
      x, restored = lax.optimization_barrier((x, restored))
      total = self._sum_places(_join_heads(x))
      restored.append(_split_heads(total, x))
    return jax.tree.unflatten(structure, restored)

  def _sum_places(self, x):
    """Sums the rows of each position over all orders."""
    sizes = [len(order.rows) for order in self.orders]
    ends = np.cumsum(sizes)[:-1]
    sums: list[jax.Array] = []
    pieces = jnp.split(x, ends, 1)
    for order, piece in zip(self.orders, pieces, strict=True):
      sums.append(order.restore(piece))
    return functools.reduce(jnp.add, sums)


def _join_heads(x_BLH):
  batch, length = x_BLH.shape[:2]
  return x_BLH.reshape(batch, length, -1)


def _split_heads(x_BL, like_BLH):
  """Undoes `_join_heads`, with the trailing axes of another array."""
  return x_BL.reshape(x_BL.shape[:2] + like_BLH.shape[2:])


def orders_of(layout: Layout) -> tuple[Order, Order]:
  """Returns the orders of queries and of keys of a layout, in whole tiles.

  Keys after the last tile that is processed are omitted if they are at least
  half of all keys. If fewer keys were omitted, the savings would not be worth
  the copy that pads the gradients of the omitted keys.
  """
  n = len(layout.query_order)
  num_rows = -(-n // layout.tile)
  num_cols = max(layout.cols, default=0) + 1
  if num_cols > num_rows // 2:
    num_cols = num_rows

  queries = make_order(layout.query_order, num_rows * layout.tile)
  keys = make_order(layout.key_order, num_cols * layout.tile)
  return queries, keys


# An order that leaves arrays of any length unchanged. Its positions are never
# read.
NATURAL = make_order(np.arange(0), 0)
