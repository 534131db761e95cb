"""Items: what the fused kernels do, for all heads and parts together.

An item is one tile of one head: of queries in the forward pass and for dq, of
keys for dk and dv. A tile of keys lists tiles of all query heads that share its
key head. Parts whose tiles are cut in the same order share an item. Other parts
write to different slots, whose results are combined.

All of this is NumPy on the host: tables are constants of a program, or, where
positions are split over devices, its arguments.
"""

import collections
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
  """The work of one kernel, whose items are on one side.

  "This side" has the items: queries forward and for dq, keys for dk and dv.
  """

  # int32 [items, 6]: head, tile, first, middle, last, slot; those with the most
  # tiles come first. An item processes `tiles[first:last]`; from `middle` on,
  # they are full.
  items: Table
  # int32 [tiles, 2 or 3]: tile of the other side, its mask and, for keys with
  # several query heads, which of them.
  tiles: Table
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


class Tiles(NamedTuple):
  """The tiles of one part, seen from one side."""

  heads: Sequence[int]  # the query heads that use the part
  rows: np.ndarray  # int [tiles], the tiles of this side
  cols: np.ndarray  # and of the other
  masks: np.ndarray  # the number of each tile's mask, -1 for a full tile


class Masks:
  """Distinct masks of tiles, numbered as they are added.

  Patterns are regular: most partial tiles, of all heads and parts, share a few
  masks, each of which is stored once.

  Args:
    tile: positions on a side of a tile.
  """

  def __init__(self, tile: int):
    self.tile = tile
    self._numbers: dict[bytes, int] = {}

  def add(self, part: Pattern, layout: Layout) -> np.ndarray:
    """Adds the masks of a part's partial tiles.

    Args:
      part: the part, whose `mask` says which pairs a tile has.
      layout: its tiles.

    Returns:
      int [tiles], the number of each tile's mask, -1 for a full tile.
    """
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

    # In batches: the masks of a long sequence would not fit in memory at once.
    for batch, pairs in batches:
      packed = np.packbits(pairs, axis=-1, bitorder="little")
      numbers[partial[batch]] = [
        self._numbers.setdefault(mask.tobytes(), len(self._numbers))
        for mask in packed
      ]
    return numbers

  def packed(self, transposed: bool = False) -> np.ndarray:
    """Packs all masks into words, bit i of word w for place 32 w + i.

    Args:
      transposed: whether rows are keys, rather than queries.

    Returns:
      int32 [masks, tile, ceil(tile / 32)].
    """
    num_bytes = -(-self.tile // 8)

    # Without masks there is one that is never used: tables may not be empty.
    content = b"".join(self._numbers) or bytes(self.tile * num_bytes)
    packed: np.ndarray = np.frombuffer(content, np.uint8)
    packed = packed.reshape(-1, self.tile, num_bytes)

    if transposed:
      pairs = np.unpackbits(
        packed,
        axis=-1,
        count=self.tile,
        bitorder="little",
      )
      pairs = pairs.swapaxes(1, 2)
      packed = np.packbits(pairs, axis=-1, bitorder="little")

    # Little-endian bytes of little-endian bits: `unpack` counts bits from the
    # lowest.
    to_words = (0, 0), (0, 0), (0, -num_bytes % 4)
    packed = np.pad(packed, to_words)
    packed = np.ascontiguousarray(packed)
    return packed.view("<i4").astype(np.int32)


class Side(NamedTuple):
  """All queries, or all keys."""

  positions: np.ndarray  # int32 [tiles, tile], see `Work`
  n: int  # positions in each order

  @property
  def num_tiles(self) -> int:
    """Tiles of one order."""
    return -(-self.n // self.positions.shape[1])


def arranged_side(size: int, tile: int) -> Side:
  """A side of arrays that are in the order of its tiles, in whole tiles."""
  positions = np.arange(size, dtype=np.int32)
  return Side(positions.reshape(-1, tile), size)


def _side_by_position(orders, n, tile):
  """A side of arrays in natural order, whose tiles are in several orders."""
  positions = np.stack(list(orders.values()) or [np.arange(n)])
  to_tiles = (0, 0), (0, -n % tile)
  positions = np.pad(positions, to_tiles, constant_values=-1)
  positions = positions.reshape(-1, tile)
  return Side(positions.astype(np.int32), n)


def _number(orders, order):
  """The number of an order in `orders`, which is added if it is new."""
  key = order.tobytes()
  orders.setdefault(key, order)
  return list(orders).index(key)


@functools.lru_cache(maxsize=64)
def work_by_position(
  patterns: tuple[Pattern, ...],
  n: int,
  tile: int,
  group: int = 1,
) -> Work:
  """Makes the work of heads on arrays in their natural order.

  Args:
    patterns: one for each query head.
    n: positions of a sequence.
    tile: positions on a side of a tile.
    group: query heads that share a key head.
  """
  query_orders: dict[bytes, np.ndarray] = {}
  key_orders: dict[bytes, np.ndarray] = {}
  masks = Masks(tile)
  num_tiles = -(-n // tile)  # of one order

  # Tiles of the second order are numbered after those of the first, and so on.
  parts = []
  for part, heads in heads_of_parts(patterns, n):
    layout = part.layout(n, tile)
    query_order = _number(query_orders, layout.query_order)
    key_order = _number(key_orders, layout.key_order)
    tiles = Tiles(
      heads=heads,
      rows=layout.rows + query_order * num_tiles,
      cols=layout.cols + key_order * num_tiles,
      masks=masks.add(part, layout),
    )
    parts.append(tiles)

  queries = _side_by_position(query_orders, n, tile)
  keys = _side_by_position(key_orders, n, tile)
  return make_work(parts, masks, (queries, keys), len(patterns), group)


def make_shares(
  part: Pattern,
  layouts: Sequence[Layout],
  num_heads: int,
  group: int,
) -> list[Work]:
  """The work of devices, with the same masks; see `Backend.device_tables`."""
  first = layouts[0]
  queries = arranged_side(len(first.query_order), first.tile)
  keys = arranged_side(len(first.key_order), first.tile)

  # All masks are added before any work is made, so that all works have them.
  masks = Masks(first.tile)
  tiles_of_devices = []
  for layout in layouts:
    tiles = Tiles(
      heads=range(num_heads),
      rows=layout.rows,
      cols=layout.cols,
      masks=masks.add(part, layout),
    )
    tiles_of_devices.append(tiles)
  return [
    make_work([tiles], masks, (queries, keys), num_heads, group)
    for tiles in tiles_of_devices
  ]


def pad(works: Sequence[Work]) -> list[Work]:
  """The same work, in lists of the same lengths.

  A program that all devices share has tables of one shape. Added items repeat
  the last, which is the shortest: they write the same again.
  """

  def pad_table(table, *tables):
    size = max(map(len, tables))
    padding = [(0, 0)] * table.ndim
    padding[0] = 0, size - len(table)
    return np.pad(table, padding, mode="edge")

  return [jax.tree.map(pad_table, work, *works) for work in works]


def make_work(
  parts: Sequence[Tiles],
  masks: Masks,
  sides: tuple[Side, Side],
  num_heads: int,
  group: int,
) -> Work:
  """The work of parts with these masks, on queries and keys.

  Of `num_heads` query heads, `group` share a key head.
  """
  queries, keys = sides

  # Seen from the keys, rows are columns, and masks are transposed.
  by_query = [part for part in parts if len(part.rows)]
  by_key = [part._replace(rows=part.cols, cols=part.rows) for part in by_query]
  return Work(
    queries=queries.positions,
    keys=keys.positions,
    by_query=_make_lists(
      by_query,
      queries,
      masks.packed(),
      num_heads,
      group=1,
    ),
    by_key=_make_lists(
      by_key,
      keys,
      masks.packed(transposed=True),
      num_heads // group,
      group,
    ),
  )


def _make_lists(parts, side, masks, num_heads, group):
  """The lists of one side.

  Args:
    parts: `Tiles` whose rows are of this side.
    side: this side.
    masks: the masks of all parts, a row for each position of this side.
    num_heads: heads of this side.
    group: query heads of each; 1 if this side is that of queries.
  """
  num_tiles = side.num_tiles
  items: list[np.ndarray] = []
  tiles: list[np.ndarray] = []

  # Heads with the same parts list the same tiles of the other side: those are
  # written once. The key names each part, and which query head uses it.
  known: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
  empty = np.zeros((num_tiles, 4), int)
  empty[:, 0] = np.arange(num_tiles)
  known[()] = empty

  for head in range(num_heads):
    slots = _slots(parts, head, group, num_tiles) or [()]
    for slot, members in enumerate(slots):
      if members not in known:
        used = [(parts[number], member) for number, member in members]
        ranges, listed = _list_tiles(used, num_tiles)
        # first, middle and last count from the tiles that are listed already.
        ranges[:, 1:] += sum(map(len, tiles))
        known[members] = ranges
        tiles.append(listed)
      ranges = known[members]
      if slot:  # rows without tiles are written to the first slot
        ranges = ranges[ranges[:, 1] < ranges[:, 3]]

      # With columns for the head, before the others, and the slot, after them.
      items.append(np.insert(ranges, [0, 4], [head, slot], axis=1))

  # The longest first, so that short ones fill what is left of the time. Stable:
  # the same request has the same tables, and so the same program.
  all_items = np.concatenate(items)
  lengths = all_items[:, 4] - all_items[:, 2]
  all_items = all_items[np.argsort(-lengths, kind="stable")]

  # A table may not be empty: the last tile is not used.
  tiles.append(np.zeros((1, 3), int))
  all_tiles = np.concatenate(tiles)
  if group == 1:
    all_tiles = all_tiles[:, :2]
  return Lists(
    items=all_items.astype(np.int32),
    tiles=all_tiles.astype(np.int32),
    masks=masks,
    written=_written(all_items, side, num_heads),
  )


def _slots(parts, head, group, num_tiles):
  """The parts that a head has, a slot for each order of this side.

  A program holds one tile of positions: parts that cut this side differently
  need programs, and so slots, of their own.

  Returns:
    A list of slots: tuples of (number of a part, query head of the group).
  """
  by_order: dict[int, list] = collections.defaultdict(list)
  for number, part in enumerate(parts):
    order = part.rows[0] // num_tiles
    for query_head in part.heads:
      if query_head // group == head:
        member = query_head % group
        by_order[order].append((number, member))
  return [tuple(members) for members in by_order.values()]


def _written(items, side, num_heads):
  """The rows that items of each slot write: bool [slots, n, heads]."""
  heads = items[:, 0]
  slots = items[:, 5]
  positions = side.positions[items[:, 1]]

  # Padding has position -1: it marks the row after the last, which is cut off.
  written = np.zeros((slots.max() + 1, side.n + 1, num_heads), bool)
  written[slots[:, None], positions, heads[:, None]] = True
  return written[:, : side.n]


def _list_tiles(parts, num_tiles):
  """Lists the tiles of the other side that each item needs.

  Tiles are numbered on from order to order: tile t of order r has the number
  r * num_tiles + t. All these parts have the same order.

  Args:
    parts: pairs of `Tiles` and the query head of its group that uses them.
    num_tiles: tiles of one order.

  Returns:
    int [num_tiles, 4], the (tile, first, middle, last) of each item: its
    partial tiles are listed from `first` to `middle`, its full ones from
    `middle` to `last`. And int [tiles, 3], the (tile of the other side, mask,
    query head) of each listed tile.
  """
  all_tiles = []
  for part, member in parts:
    members = np.full_like(part.rows, member)
    columns = part.rows, part.cols, part.masks, members
    all_tiles.append(columns)
  rows, cols, masks, members = np.concatenate(all_tiles, axis=1)

  # By item; in it, partial tiles before full ones: each kind has a loop. Then
  # by column, so that tiles are read in the order of memory.
  order = np.lexsort((members, cols, masks < 0, rows))
  rows = rows[order]
  masks = masks[order]
  listed = np.stack(
    [
      cols[order],
      masks.clip(0),
      members[order],
    ],
    axis=1,
  )

  # Every tile of the order has an item, even if it lists nothing.
  first_of_order = rows[0] // num_tiles * num_tiles
  tiles = first_of_order + np.arange(num_tiles)
  first = np.searchsorted(rows, tiles)
  last = np.searchsorted(rows, tiles, side="right")
  partial_rows = rows[masks >= 0] - first_of_order
  middle = first + np.bincount(partial_rows, minlength=num_tiles)
  ranges = np.stack([tiles, first, middle, last], axis=1)
  return ranges, listed
