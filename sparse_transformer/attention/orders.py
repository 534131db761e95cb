"""Orders of positions, in which queries and keys are cut into tiles.

A pattern that is sparse in natural order may be dense in blocks in another one,
such as a strided pattern by columns. Masks are defined on original positions,
which an order therefore knows.
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

# Metadata of the fields of a pytree that are not arrays.
STATIC = dict(static=True)

# A constant on the host, or a traced array.
Table = np.ndarray | jax.Array


class Arrangement(abc.ABC):
  """An order of positions, here or on several devices.

  `arrange` and `restore` take a pytree of arrays, with positions on axis 1, and
  return one of the same structure.
  """

  @property
  @abc.abstractmethod
  def positions(self) -> Table:
    """The position at each place, int32 [places], -1 for padding."""

  @abc.abstractmethod
  def arrange(self, arrays: Any) -> Any:
    """Arrays [B, L, ...] in this order; padded places hold finite values."""

  @abc.abstractmethod
  def restore(self, arrays: Any) -> Any:
    """Undoes `arrange`; a position without a place gets 0."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Order(Arrangement):
  """An order of positions on one device."""

  rows: Table  # int32 [places], the row of arrays at each place, -1 for padding
  # int32 [n], the place of each row, `len(rows)` for none.
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

    # Padding holds row 0: zeros would cost another pass, and masks hide it.
    rows = self.rows.clip(0)
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=1), arrays)

  def restore(self, arrays: Any) -> Any:
    if self.is_natural:
      return arrays

    # A gather by the inverse: a scatter would have to write zeros first.
    take = functools.partial(jnp.take, axis=1, mode="fill", fill_value=0)
    return jax.tree.map(lambda x: take(x, self.places), arrays)


def make_order(
  order: np.ndarray, num_places: int, first: jax.Array | None = None
) -> Order:
  """The first places of a permutation, padded where it has fewer.

  Args:
    order: a permutation of n rows.
    num_places: places to fill.
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
  """Several orders, one after another: a position has a place in each."""

  orders: tuple[Order, ...]

  @property
  def positions(self) -> Table:
    return jnp.concatenate([jnp.asarray(x.positions) for x in self.orders])

  def arrange(self, arrays: Any) -> Any:
    def arrange_array(x):
      # Rows of all heads at once are long, and few.
      rows = _join_heads(x)
      pieces = [order.arrange(rows) for order in self.orders]

      joined = pieces[0]
      if len(pieces) > 1:
        joined = jnp.concatenate(pieces, 1)
      return _split_heads(joined, x)

    return jax.tree.map(arrange_array, arrays)

  def restore(self, arrays: Any) -> Any:
    """Undoes `arrange` for gradients: adds up all places of a position."""
    leaves, structure = jax.tree.flatten(arrays)
    restored: list[jax.Array] = []
    for x in leaves:
      # In turn, so that only one of them needs memory at a time.
      x, restored = lax.optimization_barrier((x, restored))
      total = self._sum_places(_join_heads(x))
      restored.append(_split_heads(total, x))
    return jax.tree.unflatten(structure, restored)

  def _sum_places(self, x):
    """The sum over the orders of the rows that a position has in each."""
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
  """Rows that `_join_heads` joined, with the heads of another array."""
  return x_BL.reshape(x_BL.shape[:2] + like_BLH.shape[2:])


def orders_of(layout: Layout) -> tuple[Order, Order]:
  """The orders of queries and of keys of a layout, in whole tiles.

  Keys after the last tile that is processed are left out if they are at least
  half of all; fewer do not pay for the copy that pads their gradients.
  """
  n = len(layout.query_order)
  num_rows = -(-n // layout.tile)
  num_cols = max(layout.cols, default=0) + 1
  if num_cols > num_rows // 2:
    num_cols = num_rows

  queries = make_order(layout.query_order, num_rows * layout.tile)
  keys = make_order(layout.key_order, num_cols * layout.tile)
  return queries, keys


# Arranges nothing, at any length; its positions are never read.
NATURAL = make_order(np.arange(0), 0)
