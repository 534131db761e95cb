"""Work items of the fused kernels, for all heads and parts together.

An item is one tile of one head: a tile of queries in the forward pass and for
dq, or a tile of keys for dk and dv. Each item lists the tiles of the other side
that it meets. A tile of keys lists tiles of all query heads that share its KV
head. Parts whose tiles are cut from the same order share items. Parts with
different orders write their results to different slots, which are then
combined.

All tables are computed by NumPy on the host. They are constants of the compiled
program. If positions are split over devices, they are arguments of the program
instead.
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
  """The work items of one kernel: tiles of queries, or tiles of keys.

  "This side" is the side of the items: queries in the forward pass and for dq,
  keys for dk and dv.
  """

  # int32 [items, 6]: head, tile, first, middle, last, slot. Items with the most
  # tiles come first. An item processes `tiles[first:last]`, which are full from
  # `middle` on.
  items: Table
  # int32 [tiles, 2 or 3]: tile of the other side, index of its mask and, if
  # items are keys with several query heads, index of the query head.
  tiles: Table
  # int32 [masks, tile, ceil(tile / 32)], the pairs of partial tiles, with a row
  # for each position of this side and a bit for each position of the other.
  masks: Table
  # bool [slots, n, heads], the rows that are written to each slot. All rows are
  # written to the first slot.
  written: Table


class Work(NamedTuple):
  """The work of all kernels."""

  # int32 [tiles, tile], the positions in each tile, -1 for padding. If there
  # are several orders, the tiles of one come after the tiles of another.
  queries: Table
  keys: Table
  by_query: Lists  # lists whose items are tiles of queries
  by_key: Lists  # lists whose items are tiles of keys


class Tiles(NamedTuple):
  """The tiles of one part, seen from one side."""

  heads: Sequence[int]  # the query heads that use the part
  rows: np.ndarray  # int [tiles], the tiles of this side
  cols: np.ndarray  # int [tiles], the tiles of the other side
  masks: np.ndarray  # the index of each tile's mask, -1 for a full tile


class Masks:
  """The distinct masks of tiles, indexed in the order in which they are added.

  Patterns are regular, so most partial tiles of all heads and parts share a few
  masks. Each mask is stored only once.

  Args:
    tile: positions on a side of a tile.
  """

  def __init__(self, tile: int):
    self.tile = tile
    self._numbers: dict[bytes, int] = {}

  def add(self, part: Pattern, layout: Layout) -> np.ndarray:
    """Adds the masks of a part's partial tiles.

    Args:
      part: the part, whose `mask` defines the pairs of a tile.
      layout: the tiles of the part.

    Returns:
      int [tiles], the index of each tile's mask, -1 for a full tile.
    """
    numbers = np.full(len(layout.rows), -1)

    # Tiles that are cut at the end of the sequence may be full in the layout,
    # but need a mask here.
    partial = np.flatnonzero(layout.pairs < self.tile**2)
    batches = pairs_of_tiles(
      part,
      (layout.query_order, layout.key_order),
      self.tile,
      layout.rows[partial],
      layout.cols[partial],
    )

    # Masks are made in batches, because the masks of a long sequence would not
    # fit in memory at once.
    for batch, pairs in batches:
      packed = np.packbits(pairs, axis=-1, bitorder="little")
      numbers[partial[batch]] = [
        self._numbers.setdefault(mask.tobytes(), len(self._numbers))
        for mask in packed
      ]
    return numbers

  def packed(self, transposed: bool = False) -> np.ndarray:
    """Packs all masks into words; bit i of word w is position 32 w + i.

    Args:
      transposed: whether rows are keys instead of queries.

    Returns:
      int32 [masks, tile, ceil(tile / 32)].
    """
    num_bytes = -(-self.tile // 8)

    # Tables must not be empty, so an unused mask is added if there is none.
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

    # Bytes and bits are both little-endian, because `unpack` counts bits from
    # the lowest.
    to_words = (0, 0), (0, 0), (0, -num_bytes % 4)
    packed = np.pad(packed, to_words)
    packed = np.ascontiguousarray(packed)
    return packed.view("<i4").astype(np.int32)


class Side(NamedTuple):
  """The tiles of all queries, or the tiles of all keys."""

  positions: np.ndarray  # int32 [tiles, tile], see `Work`
  n: int  # number of positions in each order

  @property
  def num_tiles(self) -> int:
    """The number of tiles of one order."""
    return -(-self.n // self.positions.shape[1])


def arranged_side(size: int, tile: int) -> Side:
  """Returns a side for arrays that are already sorted into whole tiles."""
  positions = np.arange(size, dtype=np.int32)
  return Side(positions.reshape(-1, tile), size)


def _side_by_position(orders, n, tile):
  """Returns a side for arrays in natural order, with tiles of each order."""
  positions = np.stack(list(orders.values()) or [np.arange(n)])
  to_tiles = (0, 0), (0, -n % tile)
  positions = np.pad(positions, to_tiles, constant_values=-1)
  positions = positions.reshape(-1, tile)
  return Side(positions.astype(np.int32), n)


def _number(orders, order):
  """Returns the index of `order` in `orders`, adding the order if it is new."""
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
  """Lists the work items of heads whose arrays are in their natural order.

  Args:
    patterns: one for each query head.
    n: positions of a sequence.
    tile: positions on a side of a tile.
    group: number of query heads that share a KV head.
  """
  query_orders: dict[bytes, np.ndarray] = {}
  key_orders: dict[bytes, np.ndarray] = {}
  masks = Masks(tile)
  num_tiles = -(-n // tile)  # of one order

  # Tile indices of the second order follow those of the first order, and so on.
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
  """Distributes the work over devices, for `Backend.device_tables`."""
  first = layouts[0]
  queries = arranged_side(len(first.query_order), first.tile)
  keys = arranged_side(len(first.key_order), first.tile)

  # All masks are added before any work is made, so that all devices have the
  # same masks.
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
  """Pads the lists of all works to equal lengths.

  All devices run the same program, whose tables need equal shapes. Added items
  repeat the last item, which is the shortest, and write the same results again.
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
  """Lists all work items of these parts: tiles of queries and tiles of keys.

  There are `num_heads` query heads; each KV head serves `group` of them.
  """
  queries, keys = sides

  # For the side of keys, rows and columns are exchanged, and masks are
  # transposed.
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
  """Makes the `Lists` whose items are the tiles of one side.

  Args:
    parts: `Tiles` whose rows are tiles of this side.
    side: this side.
    masks: the masks of all parts, with a row for each position of this side.
    num_heads: number of heads on this side.
    group: number of query heads per head of this side; 1 if this side is the
      queries.
  """
  num_tiles = side.num_tiles
  items: list[np.ndarray] = []
  tiles: list[np.ndarray] = []

  # Heads with the same parts share the list of tiles of the other side. The key
  # of this cache identifies each part and the query head that uses it.
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
        # first, middle and last are offset by the number of tiles listed so
        # far.
        ranges[:, 1:] += sum(map(len, tiles))
        known[members] = ranges
        tiles.append(listed)
      ranges = known[members]
      if slot:  # only the first slot has items without tiles
        ranges = ranges[ranges[:, 1] < ranges[:, 3]]

      # Insert the head before the other columns, and the slot after them.
      items.append(np.insert(ranges, [0, 4], [head, slot], axis=1))

  # The longest items come first, so that short ones fill the remaining time of
  # processors. The sort is stable, so that equal requests have equal tables,
  # and therefore the same program.
  all_items = np.concatenate(items)
  lengths = all_items[:, 4] - all_items[:, 2]
  all_items = all_items[np.argsort(-lengths, kind="stable")]

  # A table must not be empty, so an unused tile is added at the end.
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
  """Divides the parts of a head into slots, one for each order of this side.

  A program processes a single tile of this side. Parts that cut this side in a
  different order therefore need separate programs, and separate slots.

  Returns:
    A list of slots, each a tuple of (index of a part, query head in the group).
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
  """Returns the rows that the items of each slot write.

  The result is bool [slots, n, heads].
  """
  heads = items[:, 0]
  slots = items[:, 5]
  positions = side.positions[items[:, 1]]

  # Padding has position -1, which marks an extra last row that is cut off.
  written = np.zeros((slots.max() + 1, side.n + 1, num_heads), bool)
  written[slots[:, None], positions, heads[:, None]] = True
  return written[:, : side.n]


def _list_tiles(parts, num_tiles):
  """Lists the tiles of the other side that each item needs.

  Tile t of order r has index r * num_tiles + t. All given parts have the same
  order.

  Args:
    parts: pairs of `Tiles` and the query head in the group that uses them.
    num_tiles: tiles of one order.

  Returns:
    Two arrays. The first, int [num_tiles, 4], contains (tile, first, middle,
    last) for each item. Rows `first` to `middle` of the second array are the
    item's partial tiles, and rows `middle` to `last` its full tiles. The second
    array, int [tiles, 3], contains (tile of the other side, mask, query head)
    for each listed tile.
  """
  all_tiles = []
  for part, member in parts:
    members = np.full_like(part.rows, member)
    columns = part.rows, part.cols, part.masks, members
    all_tiles.append(columns)
  rows, cols, masks, members = np.concatenate(all_tiles, axis=1)

  # Tiles are sorted by item. Within an item, partial tiles come before full
  # ones, because each kind has its own loop. They are then sorted by column, so
  # that they are read in the order of memory.
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

  # Every tile of the order has an item, even if the item lists no tiles.
  first_of_order = rows[0] // num_tiles * num_tiles
  tiles = first_of_order + np.arange(num_tiles)
  first = np.searchsorted(rows, tiles)
  last = np.searchsorted(rows, tiles, side="right")
  partial_rows = rows[masks >= 0] - first_of_order
  middle = first + np.bincount(partial_rows, minlength=num_tiles)
  ranges = np.stack([tiles, first, middle, last], axis=1)
  return ranges, listed
