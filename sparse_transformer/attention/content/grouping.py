"""Groups entries by label into whole tiles, with shapes known when tracing.

Axes: N rows, each of which is grouped separately, E entries of a row, V tiles.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

LIMIT = 2**31  # integers must be smaller, to fit in 32 bits


class Groups(NamedTuple):
  """Entries sorted by label, so that no tile contains two labels."""

  # int32 [N, V, tile], the entries in each tile, in increasing order, padded
  # with -1.
  entries: jax.Array
  # int32 [N, V], the label of each tile; `num` for unused tiles at the end.
  labels: jax.Array
  # int32 [N, E], the place of each entry in all V * tile places of its row; V *
  # tile if the entry is omitted.
  slots: jax.Array


def group_by_label(labels_NE: jax.Array, num: int, tile: int) -> Groups:
  """Groups the entries of each row by label, into tiles of a single label.

  Args:
    labels_NE: integers [rows, entries] from 0 to `num`. Entries with label
      `num` are omitted.
    num: number of labels.
    tile: number of entries in a tile.

  >>> groups = group_by_label(jnp.array([[1, 0, 1, 1]]), num=2, tile=2)
  >>> groups.entries.tolist(), groups.labels.tolist(), groups.slots.tolist()
  ([[[1, -1], [0, 2], [3, -1]]], [[0, 1, 1]], [[2, 0, 3, 4]])
  """
  group_row = functools.partial(_group_row, num=num, tile=tile)
  return jax.vmap(group_row)(labels_NE.astype(jnp.int32))


def _group_row(labels_E, num, tile):
  """Returns the `Groups` of one row, without the axis N."""
  size = len(labels_E)
  num_tiles = most_tiles(size, num, tile)
  sorted_E, order_E = _sort(labels_E, num)

  # Label c has the sorted entries from first[c] to last[c] - 1. They fill the
  # tiles from start[c] to end[c] - 1.
  bounds = _search(sorted_E, jnp.arange(num + 1), "left")
  first = bounds[:-1]
  last = bounds[1:]
  count = -(-(last - first) // tile)
  end = jnp.cumsum(count, dtype=jnp.int32)
  start = end - count

  # Find the entries in each tile.
  tiles_V = jnp.arange(num_tiles, dtype=jnp.int32)
  labels_V = _search(end, tiles_V, "right")
  tile_of_label_V = tiles_V - _at(start, labels_V)
  rank_V = tile_of_label_V * tile + _at(first, labels_V)
  rank_VT = rank_V[:, None] + jnp.arange(tile, dtype=jnp.int32)[None]
  stop_V = _at(last, labels_V)
  is_entry_VT = rank_VT < stop_V[:, None]
  # Tiles after the tiles of the last label are empty.
  is_entry_VT &= (labels_V < num)[:, None]
  entries_VT = jnp.where(
    is_entry_VT,
    _at(order_E, rank_VT),
    -1,
  )

  # Find the place of each entry, from its index among the entries of its label.
  number_E = jnp.arange(size, dtype=jnp.int32)
  number_E = number_E - _at(first, sorted_E)
  slots_E = number_E + _at(start, sorted_E) * tile
  slots_E = jnp.where(
    sorted_E < num,
    slots_E,
    num_tiles * tile,
  )
  slots_E = (
    jnp.zeros_like(slots_E)
    .at[order_E]
    .set(
      slots_E,
      unique_indices=True,
    )
  )
  return Groups(
    entries=entries_VT,
    labels=labels_V,
    slots=slots_E,
  )


def most_tiles(size: int, num: int, tile: int) -> int:
  """Returns the maximum number of tiles that `size` entries can need.

  `num` is the number of labels. The shapes of arrays depend on this maximum, so
  it must be sufficient for any labels of the entries.
  """
  # The worst case is that as many labels as possible have one entry more than
  # fills their tiles.
  used = min(num, size)
  return used + (size - used) // tile


def _sort(labels_E, num):
  """Returns (sorted labels, the indices that sort the labels)."""
  size = len(labels_E)
  if (num + 1) * size > LIMIT:
    order_E = jnp.argsort(labels_E, stable=True).astype(jnp.int32)
    return labels_E[order_E], order_E
  # Sorting a single array of combined integers is several times faster.
  ids = jnp.sort(labels_E * size + jnp.arange(size, dtype=jnp.int32))
  return ids // size, ids % size


def _search(sorted_E, values, side):
  return jnp.searchsorted(sorted_E, values, side=side).astype(jnp.int32)


def _at(table, places):
  """Looks up values in a table; indices past its end get the last value."""
  return jnp.take(table, places, mode="clip")
