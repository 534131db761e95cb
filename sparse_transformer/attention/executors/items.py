"""Items: what the fused kernels do, for all heads and parts together.

An item is one tile of one head: of queries in the forward pass and for dq, of
keys for dk and dv. A tile of keys lists tiles of all query heads that share its
key head. Parts whose tiles are cut in the same order share an item. Other parts
write to different slots, whose results are combined.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from sparse_transformer.attention.heads import heads_of_parts
from sparse_transformer.attention.orders import Table
from sparse_transformer.patterns import Layout, Pattern
from sparse_transformer.patterns.layout import pairs_of_tiles


class Lists(NamedTuple):
  """The work of one kernel."""

  # int32 [items, 6]: head, tile, first, middle, last, slot; those with the most
  # tiles come first. An item processes `others[first:last]`; from
  # `middle` on, they are full.
  items: Table
  # int32 [tiles, 2 or 3]: tile of the other side, its mask and, for keys with
  # several query heads, which of them.
  others: Table
  # int32 [masks, tile, ceil(tile / 32)], the pairs of partial tiles: a row for
  # each position of this side, a bit for each of the other.
  masks: Table
  # bool [slots, n, heads], the rows that each slot holds; the first, all.
  written: Table


class Work(NamedTuple):
  """The work of all kernels."""

  # int32 [tiles, tile], the positions in each tile, -1 for padding. The tiles
  # of several orders follow each other.
  queries: Table
  keys: Table
  by_query: Lists  # an item for each tile of queries
  by_key: Lists  # an item for each tile of keys


@dataclasses.dataclass(frozen=True, eq=False)
class Tiles:
  """The tiles of one part, seen from one side."""

  heads: Sequence[int]  # the query heads that use the part
  rows: np.ndarray  # int [tiles], the tiles of this side
  cols: np.ndarray  # and of the other
  masks: np.ndarray  # the number of each tile's mask, -1 for a full tile

  def turned(self) -> "Tiles":
    """The same, seen from the other side."""
    return dataclasses.replace(self, rows=self.cols, cols=self.rows)


class Masks:
  """Distinct masks of tiles."""

  def __init__(self, tile: int):
    self.tile = tile
    self._numbers: dict[bytes, int] = {}

  def add(self, part: Pattern, layout: Layout) -> np.ndarray:
    """The number of the mask of each tile, -1 for a full one: int [tiles]."""
    numbers = np.full(len(layout.rows), -1)
    # The layout calls tiles that the end of the sequence cuts full as well.
    partial = np.flatnonzero(layout.pairs < self.tile**2)
    places = layout.query_order, layout.key_order
    rows, cols = layout.rows[partial], layout.cols[partial]
    for here, pairs in pairs_of_tiles(part, places, self.tile, rows, cols):
      numbers[partial[here]] = [
        self._numbers.setdefault(bits.tobytes(), len(self._numbers))
        for bits in np.packbits(pairs, axis=-1, bitorder="little")
      ]
    return numbers

  def packed(self, turned: bool = False) -> np.ndarray:
    """All masks, int32 [masks, tile, words]; `turned`: a row per key."""
    num_bytes = -(-self.tile // 8)
    content = b"".join(self._numbers) or bytes(self.tile * num_bytes)
    shape = -1, self.tile, num_bytes
    bits = np.frombuffer(content, np.uint8).reshape(shape)
    if turned:
      pairs = np.unpackbits(bits, -1, self.tile, bitorder="little")
      bits = np.packbits(pairs.swapaxes(1, 2), axis=-1, bitorder="little")
    words = np.pad(bits, ((0, 0), (0, 0), (0, -num_bytes % 4)))
    return np.ascontiguousarray(words).view("<i4").astype(np.int32)


class Side(NamedTuple):
  """All queries, or all keys."""

  positions: np.ndarray  # int32 [tiles, tile], see `Work`
  n: int  # positions in each order

  @property
  def num_tiles(self) -> int:
    """Tiles of one order."""
    return -(-self.n // self.positions.shape[1])


def by_place(size: int, tile: int) -> Side:
  """A side of arrays that are in the order of its tiles, in whole tiles."""
  return Side(np.arange(size, dtype=np.int32).reshape(-1, tile), size)


def _by_position(orders, n, tile):
  """A side of arrays in natural order, whose tiles are in several orders."""
  positions = np.stack([*orders.values()] or [np.arange(n)])
  padding = (0, 0), (0, -n % tile)
  positions = np.pad(positions, padding, constant_values=-1)
  return Side(positions.reshape(-1, tile).astype(np.int32), n)


def _number(orders, order):
  """The number of an order, which is added if it is new."""
  orders.setdefault(order.tobytes(), order)
  return [*orders].index(order.tobytes())


@functools.lru_cache(maxsize=64)
def work_by_position(
  patterns: tuple[Pattern, ...], n: int, tile: int, group: int = 1
) -> Work:
  """The work of query heads; each `group` of them shares a key head."""
  of_queries: dict[bytes, np.ndarray] = {}
  of_keys: dict[bytes, np.ndarray] = {}
  masks, parts, num_tiles = Masks(tile), [], -(-n // tile)
  for part, chosen in heads_of_parts(patterns, n):
    layout = part.layout(n, tile)
    rows = layout.rows + num_tiles * _number(of_queries, layout.query_order)
    cols = layout.cols + num_tiles * _number(of_keys, layout.key_order)
    heads = range(len(patterns)) if chosen is None else chosen
    parts.append(Tiles(heads, rows, cols, masks.add(part, layout)))
  sides = _by_position(of_queries, n, tile), _by_position(of_keys, n, tile)
  return make_work(parts, masks, sides, len(patterns), group)


def make_shares(
  part: Pattern, layouts: Sequence[Layout], num_heads: int, group: int
) -> list[Work]:
  """The work of devices, with the same masks; see `Executor.shares`."""
  tile, heads = layouts[0].tile, range(num_heads)
  orders, masks = (layouts[0].query_order, layouts[0].key_order), Masks(tile)
  sides = [by_place(len(order), tile) for order in orders]
  found = [Tiles(heads, x.rows, x.cols, masks.add(part, x)) for x in layouts]
  return [make_work([x], masks, sides, num_heads, group) for x in found]


def pad(works: Sequence[Work]) -> list[Work]:
  """The same work, in lists of the same lengths.

  Added items repeat the last, which is the shortest: they write the same again.
  """
  sizes = jax.tree.map(lambda *tables: max(map(len, tables)), *works)

  def to_size(table, size):
    more = [(0, size - len(table)), *[(0, 0)] * (table.ndim - 1)]
    # A device without pairs has no tiles of the other side.
    return np.pad(table, more, mode="edge" if len(table) else "constant")

  return [jax.tree.map(to_size, work, sizes) for work in works]


def make_work(
  parts: Sequence[Tiles],
  masks: Masks,
  sides: Sequence[Side],
  num_heads: int,
  group: int,
) -> Work:
  """The work of parts with these masks, on queries and keys.

  Of `num_heads` query heads, `group` share a key head.
  """
  queries, keys = sides
  parts = [x for x in parts if len(x.rows)]
  turned = [x.turned() for x in parts]
  return Work(
    queries.positions,
    keys.positions,
    _make_lists(parts, queries, masks.packed(), num_heads, 1),
    _make_lists(turned, keys, masks.packed(turned=True), num_heads, group),
  )


def _make_lists(parts, side, masks, num_heads, group):
  """The lists of one side, whose heads number num_heads // group."""
  num_heads, num_tiles = num_heads // group, side.num_tiles
  others: list[np.ndarray] = []
  # Items by parts, each with one of the query heads that use it.
  known: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
  items = []
  for head in range(num_heads):
    by_order: dict[int, list] = collections.defaultdict(list)
    for i, part in enumerate(parts):
      if chosen := [(i, h % group) for h in part.heads if h // group == head]:
        by_order[part.rows[0] // num_tiles] += chosen
    for slot, numbers in enumerate(map(tuple, by_order.values())):
      if numbers not in known:
        count = sum(map(len, others))
        chosen = [(parts[i], member) for i, member in numbers]
        found, tiles = _items(chosen, num_tiles)
        known[numbers] = found + [0, count, count, count]
        others.append(tiles[:, : 3 if group > 1 else 2])
      new = known[numbers]
      if slot:  # rows without tiles are written to the first slot
        new = new[new[:, 1] < new[:, 3]]
      items.append(np.pad(new, ((0, 0), (1, 1)), constant_values=slot))
      items[-1][:, 0] = head
    if not by_order:  # a head without pairs
      tiles = np.arange(num_tiles)[:, None]
      items.append(tiles * [0, 1, 0, 0, 0, 0] + [head, 0, 0, 0, 0, 0])
  all_items = np.concatenate(items).astype(np.int32)
  lengths = all_items[:, 4] - all_items[:, 2]
  all_items = all_items[np.argsort(-lengths, kind="stable")]
  heads, tiles, slots = all_items[:, 0], all_items[:, 1], all_items[:, 5]
  written = np.zeros((slots.max() + 1, side.n + 1, num_heads), bool)
  written[slots[:, None], side.positions[tiles], heads[:, None]] = True
  none = np.zeros((1, 2 + (group > 1)))
  return Lists(
    all_items,
    np.concatenate([*others, none]).astype(np.int32),
    masks,
    written[:, : side.n],
  )


def _items(parts, num_tiles):
  """(tile, first, middle, last of items; others) of parts in one order."""
  found = [(x.rows, x.cols, x.masks, np.full_like(x.rows, i)) for x, i in parts]
  rows, cols, masks, members = np.concatenate(found, axis=1)
  order = np.lexsort((members, cols, masks < 0, rows))
  rows, cols, masks = rows[order], cols[order], masks[order]
  start = rows[0] // num_tiles * num_tiles
  tiles = np.arange(start, start + num_tiles)
  first = np.searchsorted(rows, tiles)
  last = np.searchsorted(rows, tiles, side="right")
  middle = first + np.bincount(rows[masks >= 0] - start, minlength=num_tiles)
  items = np.stack([tiles, first, middle, last], axis=1)
  return items, np.stack([cols, masks.clip(0), members[order]], axis=1)
