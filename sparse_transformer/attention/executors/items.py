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
    batches = pairs_of_tiles(
      part,
      (layout.query_order, layout.key_order),
      self.tile,
      layout.rows[partial],
      layout.cols[partial],
    )
    for batch, pairs in batches:
      packed = np.packbits(pairs, axis=-1, bitorder="little")
      numbers[partial[batch]] = [
        self._numbers.setdefault(mask.tobytes(), len(self._numbers))
        for mask in packed
      ]
    return numbers

  def packed(self, turned: bool = False) -> np.ndarray:
    """All masks, int32 [masks, tile, words]; `turned`: a row per key."""
    num_bytes = -(-self.tile // 8)
    # Without masks there is one that is never used: tables may not be empty.
    content = b"".join(self._numbers) or bytes(self.tile * num_bytes)
    shape = -1, self.tile, num_bytes
    packed = np.frombuffer(content, np.uint8).reshape(shape)
    if turned:
      pairs = np.unpackbits(packed, -1, self.tile, bitorder="little")
      packed = np.packbits(pairs.swapaxes(1, 2), axis=-1, bitorder="little")

    padding = (0, 0), (0, 0), (0, -num_bytes % 4)  # to whole words
    padded = np.ascontiguousarray(np.pad(packed, padding))
    return padded.view("<i4").astype(np.int32)


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
  query_orders: dict[bytes, np.ndarray] = {}
  key_orders: dict[bytes, np.ndarray] = {}
  masks = Masks(tile)
  parts = []
  num_tiles = -(-n // tile)  # of one order

  for part, heads in heads_of_parts(patterns, n):
    layout = part.layout(n, tile)
    query_order = _number(query_orders, layout.query_order)
    key_order = _number(key_orders, layout.key_order)
    tiles = Tiles(
      heads=heads,
      rows=layout.rows + num_tiles * query_order,
      cols=layout.cols + num_tiles * key_order,
      masks=masks.add(part, layout),
    )
    parts.append(tiles)

  queries = _by_position(query_orders, n, tile)
  keys = _by_position(key_orders, n, tile)
  return make_work(parts, masks, (queries, keys), len(patterns), group)


def make_shares(
  part: Pattern, layouts: Sequence[Layout], num_heads: int, group: int
) -> list[Work]:
  """The work of devices, with the same masks; see `Executor.device_tables`."""
  first = layouts[0]
  queries = by_place(len(first.query_order), first.tile)
  keys = by_place(len(first.key_order), first.tile)

  # All masks are added before any work is made, so that all works have them.
  masks = Masks(first.tile)
  tiles_of_devices = [
    Tiles(
      heads=range(num_heads),
      rows=layout.rows,
      cols=layout.cols,
      masks=masks.add(part, layout),
    )
    for layout in layouts
  ]
  return [
    make_work([tiles], masks, (queries, keys), num_heads, group)
    for tiles in tiles_of_devices
  ]


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
    queries=queries.positions,
    keys=keys.positions,
    by_query=_make_lists(parts, queries, masks.packed(), num_heads, group=1),
    by_key=_make_lists(
      turned, keys, masks.packed(turned=True), num_heads, group
    ),
  )


def _make_lists(parts, side, masks, num_heads, group):
  """The lists of one side, which has a head for each `group` query heads."""
  num_heads //= group
  num_tiles = side.num_tiles
  items: list[np.ndarray] = []
  others: list[np.ndarray] = []
  # Heads with the same parts list the same tiles of the other side: those are
  # written once. The key names each part, and which query head uses it.
  known: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

  for head in range(num_heads):
    slots = _slots(parts, head, group, num_tiles)
    for slot, members in enumerate(slots):
      if members not in known:
        start = sum(map(len, others))
        used = [(parts[number], member) for number, member in members]
        ranges, tiles = _items(used, num_tiles)
        known[members] = ranges + [0, start, start, start]
        others.append(tiles if group > 1 else tiles[:, :2])
      ranges = known[members]
      if slot:  # rows without tiles are written to the first slot
        ranges = ranges[ranges[:, 1] < ranges[:, 3]]
      items.append(_with_columns(head, ranges, slot))
    if not slots:  # a head without pairs
      ranges = np.arange(num_tiles)[:, None] * [1, 0, 0, 0]
      items.append(_with_columns(head, ranges, 0))

  all_items = np.concatenate(items).astype(np.int32)
  lengths = all_items[:, 4] - all_items[:, 2]
  all_items = all_items[np.argsort(-lengths, kind="stable")]

  heads, tiles, slots = all_items[:, 0], all_items[:, 1], all_items[:, 5]
  # Padding has position -1: it marks the row after the last, which is cut off.
  written = np.zeros((slots.max() + 1, side.n + 1, num_heads), bool)
  written[slots[:, None], side.positions[tiles], heads[:, None]] = True

  unused = np.zeros((1, 2 + (group > 1)))  # a table may not be empty
  return Lists(
    items=all_items,
    others=np.concatenate([*others, unused]).astype(np.int32),
    masks=masks,
    written=written[:, : side.n],
  )


def _slots(parts, head, group, num_tiles):
  """The parts of a head, by order: ((number of a part, query head), ...)s."""
  by_order: dict[int, list] = collections.defaultdict(list)
  for number, part in enumerate(parts):
    order = part.rows[0] // num_tiles
    for query_head in part.heads:
      if query_head // group == head:
        by_order[order].append((number, query_head % group))
  return [tuple(members) for members in by_order.values()]


def _with_columns(head, ranges, slot):
  """Items of a head and a slot, with these (tile, first, middle, last)."""
  shape = len(ranges), 1
  return np.hstack([np.full(shape, head), ranges, np.full(shape, slot)])


def _items(parts, num_tiles):
  """Items of parts in one order, each part with the query head that uses it.

  Returns int [num_tiles, 4], the (tile, first, middle, last) of each item, and
  int [tiles, 3], the (tile of the other side, mask, query head) of each tile.
  """
  rows = np.concatenate([part.rows for part, _ in parts])
  cols = np.concatenate([part.cols for part, _ in parts])
  masks = np.concatenate([part.masks for part, _ in parts])
  sizes = [len(part.rows) for part, _ in parts]
  members = np.repeat([member for _, member in parts], sizes)

  # By item; in it, partial tiles before full ones.
  order = np.lexsort((members, cols, masks < 0, rows))
  rows, cols, masks = rows[order], cols[order], masks[order]
  start = rows[0] // num_tiles * num_tiles
  tiles = np.arange(start, start + num_tiles)
  first = np.searchsorted(rows, tiles)
  last = np.searchsorted(rows, tiles, side="right")
  num_partial = np.bincount(rows[masks >= 0] - start, minlength=num_tiles)

  items = np.stack([tiles, first, first + num_partial, last], axis=1)
  others = np.stack([cols, masks.clip(0), members[order]], axis=1)
  return items, others
