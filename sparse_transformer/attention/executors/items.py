"""Items: what the fused kernels do, for all heads and parts together.

A kernel runs once for each item. An item is one tile of one head: of queries in
the forward pass and for dq, of keys for dk and dv. It lists the tiles of the
other side that hold pairs with it, the partial ones before the full ones; for
keys, those of all query heads that share the key head. The pairs of partial
tiles are bits, so that kernels know nothing of patterns.

Parts of a head whose tiles are cut in the same order share an item. The others
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
  # tiles come first. An item processes `others[first:last]`, of which those
  # from `middle` on are full.
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


# A part, its heads, and its tiles on each device.
Part = tuple[Pattern, tuple[int, ...], Sequence[Layout]]


@functools.lru_cache(maxsize=64)
def make_work(
  patterns: tuple[Pattern, ...], n: int, tile: int, group: int = 1
) -> Work:
  """The work of heads, `group` of which share a key head, by position."""
  queries, keys, masks = _Orders(n, tile), _Orders(n, tile), Masks(tile)
  parts = []
  for part, chosen in heads_of_parts(patterns, n):
    heads = tuple(range(len(patterns))) if chosen is None else chosen
    layout = part.layout(n, tile)
    rows = queries.place(layout.query_order) + layout.rows
    cols = keys.place(layout.key_order) + layout.cols
    parts.append(_Tiles(heads, rows, cols, masks.add(part, layout)))
  sides = _Side(queries.tiles(), n), _Side(keys.tiles(), n)
  return _work(parts, masks, sides, len(patterns), group)


def work_by_place(
  parts: Sequence[Part], sizes: tuple[int, int], num_heads: int, group: int = 1
) -> list[Work]:
  """The work of devices, on arrays that are in the orders of their layouts.

  All parts have the same orders. The works have the same masks.

  Args:
    parts: at least one; their layouts are of the same devices.
    sizes: the places of queries and of keys, in whole tiles.
    num_heads: query heads, `group` of which share a key head.
  """
  tile = parts[0][2][0].tile
  masks, of_devices = Masks(tile), zip(*(x for *_, x in parts), strict=True)
  found = [
    [
      _Tiles(heads, layout.rows, layout.cols, masks.add(part, layout))
      for (part, heads, _), layout in zip(parts, layouts, strict=True)
      if len(layout.rows)
    ]
    for layouts in of_devices
  ]
  queries, keys = (
    _Side(np.arange(x, dtype=np.int32).reshape(-1, tile), x) for x in sizes
  )
  return [_work(x, masks, (queries, keys), num_heads, group) for x in found]


def make_shares(
  part: Pattern, layouts: Sequence[Layout], num_heads: int, group: int = 1
) -> list[Work]:
  """The work of devices, see `contract.Executor.shares`."""
  sizes = len(layouts[0].query_order), len(layouts[0].key_order)
  parts = [(part, tuple(range(num_heads)), layouts)]
  return work_by_place(parts, sizes, num_heads, group)


def pad(works: Sequence[Work]) -> list[Work]:
  """The same work, in lists of the same lengths.

  More items repeat the last, which is the shortest: they write the same again.
  """
  sizes = jax.tree.map(lambda *tables: max(map(len, tables)), *works)

  def to_size(table, size):
    more = [(0, size - len(table)), *[(0, 0)] * (table.ndim - 1)]
    # A device without pairs has no tiles of the other side.
    return np.pad(table, more, mode="edge" if len(table) else "constant")

  return [jax.tree.map(to_size, work, sizes) for work in works]


class _Orders:
  """Distinct orders of positions, cut into tiles."""

  def __init__(self, n: int, tile: int):
    self._n, self._tile = n, tile
    self._orders: list[np.ndarray] = []

  def place(self, order: np.ndarray) -> int:
    """The index of the first tile of an order, which is added if it is new."""
    same = [np.array_equal(order, other) for other in self._orders]
    if not any(same):
      self._orders.append(order)
      same.append(True)
    return same.index(True) * -(-self._n // self._tile)

  def tiles(self) -> np.ndarray:
    """The positions in each tile, -1 for padding: int32 [tiles, tile]."""
    orders = np.stack(self._orders or [np.arange(self._n)])
    padding = (0, 0), (0, -self._n % self._tile)
    padded = np.pad(orders, padding, constant_values=-1)
    return padded.reshape(-1, self._tile).astype(np.int32)


class Masks:
  """Distinct masks of tiles."""

  def __init__(self, tile: int):
    self._tile = tile
    self._numbers: dict[bytes, int] = {}

  def add(self, part: Pattern, layout: Layout) -> np.ndarray:
    """The number of the mask of each tile, -1 for a full one: int [tiles]."""
    numbers = np.full(len(layout.rows), -1)
    # The layout calls tiles that the end of the sequence cuts full as well.
    partial = np.flatnonzero(layout.pairs < self._tile**2)
    places = layout.query_order, layout.key_order
    rows, cols = layout.rows[partial], layout.cols[partial]
    for here, pairs in pairs_of_tiles(part, places, self._tile, rows, cols):
      numbers[partial[here]] = [
        self._numbers.setdefault(bits.tobytes(), len(self._numbers))
        for bits in np.packbits(pairs, axis=-1, bitorder="little")
      ]
    return numbers

  def packed(self, turned: bool = False) -> np.ndarray:
    """All masks, int32 [masks, tile, words]; `turned`: a row per key."""
    num_bytes = -(-self._tile // 8)
    content = b"".join(self._numbers) or bytes(self._tile * num_bytes)
    shape = -1, self._tile, num_bytes
    bits = np.frombuffer(content, np.uint8).reshape(shape)
    if turned:
      pairs = np.unpackbits(bits, -1, self._tile, bitorder="little")
      bits = np.packbits(pairs.swapaxes(1, 2), axis=-1, bitorder="little")
    words = np.pad(bits, ((0, 0), (0, 0), (0, -num_bytes % 4)))
    return np.ascontiguousarray(words).view("<i4").astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class _Tiles:
  """The tiles of one part, seen from one side."""

  heads: tuple[int, ...]  # the query heads that use the part
  rows: np.ndarray  # int [tiles], the tiles of this side
  cols: np.ndarray  # and of the other
  masks: np.ndarray  # the number of each tile's mask, -1 for a full tile

  def turned(self) -> "_Tiles":
    """The same, seen from the other side."""
    return dataclasses.replace(self, rows=self.cols, cols=self.rows)


class _Side(NamedTuple):
  """All queries, or all keys."""

  positions: np.ndarray  # int32 [tiles, tile], see `Work`
  n: int  # positions, all of which each order has

  @property
  def num_tiles(self) -> int:
    """Tiles of one order."""
    return -(-self.n // self.positions.shape[1])


def _work(parts, masks, sides, num_heads, group):
  queries, keys = sides
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
  rows, cols, masks, members = np.concatenate(
    [
      (x.rows, x.cols, x.masks, np.full_like(x.rows, member))
      for x, member in parts
    ],
    axis=1,
  )
  order = np.lexsort((members, cols, masks < 0, rows))
  rows, cols, masks = rows[order], cols[order], masks[order]
  start = rows[0] // num_tiles * num_tiles
  tiles = np.arange(start, start + num_tiles)
  first = np.searchsorted(rows, tiles)
  last = np.searchsorted(rows, tiles, side="right")
  middle = first + np.bincount(rows[masks >= 0] - start, minlength=num_tiles)
  items = np.stack([tiles, first, middle, last], axis=1)
  return items, np.stack([cols, masks.clip(0), members[order]], axis=1)


def check_tile(tile: int, n: int) -> int:
  """The tile for n positions; a ValueError if kernels cannot run it."""
  if tile % 32 or tile & (tile - 1):
    raise ValueError(
      f"tile={tile} must be a power of two of at least 32 for a fused"
      " kernel, or 0 to choose one"
    )
  return min(tile, max(32, 1 << (n - 1).bit_length()))
