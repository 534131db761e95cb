"""Work lists: what a fused kernel does, for all heads and parts together.

A kernel runs once for each item of a list. An item is one tile of one head, or
a few consecutive ones: of queries in the forward pass and for dq, of keys for
dk and dv. It lists the tiles of the other side that hold pairs with it, the
partial ones before the full ones; for keys, those of all query heads that share
the key head. Kernels read and write rows by position, so that nothing is
permuted outside them, and take the pairs of partial tiles from bits, so that
they know nothing of patterns.

Parts of a head whose tiles are cut in the same order share an item. The others
write to different slots. Kernels, or else `Fused`, the base of executors with
kernels, combine the results.
"""

import abc
import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import contract, online_softmax
from sparse_transformer.attention.heads import heads_of_parts
from sparse_transformer.patterns import Layout, Pattern
from sparse_transformer.patterns.layout import pairs_of_tiles

ITEM = "head", "tile", "first", "middle", "last", "slot"  # columns of items


class Lists(NamedTuple):
  """The work of one kernel."""

  # int32 [items, 6], see `ITEM`; those with the most tiles come first. An item
  # processes `others[first:last]`, of which those from `middle` on are full.
  items: contract.Table
  # int32 [tiles, 2 or 3]: tile of the other side, its mask and, for keys with
  # several query heads, which of them.
  others: contract.Table
  # int32 [masks, rows of an item, ceil(tile / 32)], the pairs of partial tiles:
  # a row for each position of this side, a bit for each of the other.
  masks: contract.Table
  # bool [slots, n, heads], the rows that each slot holds; the first, all.
  written: contract.Table


class Work(NamedTuple):
  """The work of all kernels."""

  # int32 [tiles, tile], the positions in each tile, -1 for padding. The tiles
  # of several orders follow each other.
  queries: contract.Table
  keys: contract.Table
  by_query: Lists  # an item for each tile of queries
  by_key: Lists  # an item for each tile of keys


@dataclasses.dataclass(frozen=True)
class Fused(contract.Executor):
  """Runs all heads and parts together, in three kernels.

  There is one plan for all heads. Its tables have `by_query.written` and
  `by_key.written`, see `Lists`.
  """

  interpret: bool = False  # whether to interpret the kernels, on any platform

  @abc.abstractmethod
  def kernels(self) -> Any:
    """The module with the kernels, imported only where they run.

    Its functions `forward` and `backward` return the results of each slot.
    """

  def forward(
    self, plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, jax.Array]:
    tables = plan.tables
    out, lse = self.kernels().forward(plan, queries, keys, self.interpret)
    out = _written(0, out, tables.by_query)
    lse = _written(-jnp.inf, lse, tables.by_query)
    return online_softmax.merge(*((out[i], lse[i]) for i in range(len(out))))

  def backward(
    self, plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, ...]:
    tables = plan.tables
    grads = self.kernels().backward(plan, queries, keys, self.interpret)
    lists = tables.by_query, tables.by_key, tables.by_key
    return tuple(_written(0, *x).sum(0) for x in zip(grads, lists, strict=True))


def _written(fill, x_SBLH, lists):
  """The rows that a kernel wrote, and `fill` where it left them unspecified."""
  if len(x_SBLH) == 1:  # the first slot holds all rows
    return x_SBLH
  written = jnp.asarray(lists.written)[:, None]
  trailing = (1,) * (x_SBLH.ndim - written.ndim)
  return jnp.where(written.reshape(*written.shape, *trailing), x_SBLH, fill)


def check_tile(tile: int, n: int) -> int:
  """The tile for n positions; a ValueError if kernels cannot run it."""
  if tile % 32 or tile & (tile - 1):
    raise ValueError(
      f"tile={tile} must be a power of two of at least 32 for a fused"
      " kernel, or 0 to choose one"
    )
  return min(tile, max(32, 1 << (n - 1).bit_length()))


@functools.lru_cache(maxsize=64)
def make_work(
  patterns: tuple[Pattern, ...],
  n: int,
  tile: int,
  longest: int = 0,
  group: int = 1,
  height: int = 1,
) -> Work:
  """The work of heads, `group` of which share a key head.

  Items of keys are split if longer than `longest` > 0. An item processes
  `height` consecutive tiles of this side, which count as one in its lists.
  """
  num_heads = len(patterns)
  queries, keys = _Orders(n, tile, height), _Orders(n, tile, height)
  masks = Masks(tile)
  parts = []
  for part, chosen in heads_of_parts(patterns, n):
    heads = tuple(range(num_heads)) if chosen is None else chosen
    layout = part.layout(n, tile)
    rows = queries.place(layout.query_order) + layout.rows
    cols = keys.place(layout.key_order) + layout.cols
    parts.append(_Part(heads, rows, cols, masks.add(part, layout)))
  tiles = queries.tiles(), keys.tiles()
  return _work(parts, masks, tiles, (num_heads, group), (n, n), longest, height)


def make_shares(
  part: Pattern, layouts: Sequence[Layout], num_heads: int, group: int = 1
) -> list[Work]:
  """The work of devices, see `contract.Executor.shares`; of the same masks.

  Rows are read and written by place, not by position.
  """
  first, masks = layouts[0], Masks(layouts[0].tile)
  sizes = len(first.query_order), len(first.key_order)
  tiles = [np.arange(x, dtype=np.int32).reshape(-1, first.tile) for x in sizes]
  heads = tuple(range(num_heads))
  parts = [_Part(heads, x.rows, x.cols, masks.add(part, x)) for x in layouts]
  return [
    _work([x] if len(x.rows) else [], masks, tiles, (num_heads, group), sizes)
    for x in parts
  ]


def _work(parts, masks, tiles, heads, sizes, longest=0, height=1):
  """The work of parts; tiles and sizes are those of queries and of keys."""
  turned = [dataclasses.replace(p, rows=p.cols, cols=p.rows) for p in parts]
  by_side, (num_heads, group) = [], heads
  for chosen, tiles_of_side, n, turn, *split in (
    (parts, tiles[0], sizes[0], False),
    (turned, tiles[1], sizes[1], True, group, longest),
  ):
    joined, bits = _join(chosen, masks.packed(turn), height)
    positions = tiles_of_side.reshape(-1, bits.shape[1])
    by_side.append(_make_lists(joined, positions, n, bits, num_heads, *split))
  return Work(*tiles, *by_side)


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

  def __init__(self, n: int, tile: int, height: int):
    """Each order has a multiple of `height` tiles."""
    self._n, self._tile = n, tile
    self._padding = -n % (tile * height)
    self._orders: list[np.ndarray] = []

  def place(self, order: np.ndarray) -> int:
    """The index of the first tile of an order, which is added if it is new."""
    same = [np.array_equal(order, other) for other in self._orders]
    if not any(same):
      self._orders.append(order)
      same.append(True)
    return same.index(True) * ((self._n + self._padding) // self._tile)

  def tiles(self) -> np.ndarray:
    """The positions in each tile, -1 for padding: int32 [tiles, tile]."""
    orders = np.stack(self._orders or [np.arange(self._n)])
    padding = (0, 0), (0, self._padding)
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
class _Part:
  """The tiles of one part, seen from one side."""

  heads: tuple[int, ...]  # the query heads that use the part
  # int [tiles], the tiles of this side and of the other.
  rows: np.ndarray
  cols: np.ndarray
  # int [tiles], the number of each tile's mask, -1 for a full tile.
  masks: np.ndarray


def _join(parts, bits, height):
  """Parts whose tiles have `height` times as many rows, and their masks."""
  if height == 1:
    return parts, bits
  absent, full = np.zeros_like(bits[:1]), np.full_like(bits[:1], -1)
  bits = np.concatenate([bits, absent, full])  # numbers -2 and -1
  known = {(-1,) * height: -1, (-2,) * height: 0}
  joined = []
  for part in parts:
    rows, place = np.divmod(part.rows, height)
    width = part.cols.max(initial=0) + 1
    tiles, at = np.unique(rows * width + part.cols, return_inverse=True)
    numbers = np.full((len(tiles), height), -2)
    numbers[at, place] = part.masks
    kinds, kind = np.unique(numbers, axis=0, return_inverse=True)
    masks = np.array(
      [known.setdefault(x, len(known) - 1) for x in map(tuple, kinds.tolist())]
    )
    rows, cols = np.divmod(tiles, width)
    part = dataclasses.replace(
      part, rows=rows, cols=cols, masks=masks[kind.ravel()]
    )
    joined.append(part)
  chosen = np.array([*known])[1:]
  return joined, bits[chosen].reshape(len(chosen), -1, bits.shape[2])


def _make_lists(parts, positions, n, masks, num_heads, group=1, longest=0):
  num_heads //= group
  num_tiles = -(-n // positions.shape[1])  # of one order
  others: list[np.ndarray] = []
  # Items by parts, each with one of the query heads that use it.
  known: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
  items = []
  for head in range(num_heads):
    slot = 0
    by_order: dict[int, list] = collections.defaultdict(list)
    for i, part in enumerate(parts):
      if chosen := [(i, h % group) for h in part.heads if h // group == head]:
        by_order[part.rows[0] // num_tiles] += chosen
    for numbers in map(tuple, by_order.values()):
      if numbers not in known:
        count = sum(map(len, others))
        chosen = [(parts[i], member) for i, member in numbers]
        found, tiles = _items(chosen, num_tiles, longest)
        known[numbers] = found + [0, count, count, count, 0]
        others.append(tiles[:, : 3 if group > 1 else 2])
      new = known[numbers] + [0, 0, 0, 0, slot]
      if slot:  # rows without tiles are written to the first slot
        new = new[new[:, 1] < new[:, 3]]
      items.append(np.insert(new, 0, head, axis=1))
      slot = new[:, 4].max(initial=slot) + 1
    if not slot:  # a head without pairs
      tiles = np.arange(num_tiles)[:, None]
      items.append(tiles * [0, 1, 0, 0, 0, 0] + [head, 0, 0, 0, 0, 0])
  all_items = np.concatenate(items).astype(np.int32)
  lengths = all_items[:, 4] - all_items[:, 2]
  all_items = all_items[np.argsort(-lengths, kind="stable")]
  num_slots = int(all_items[:, 5].max()) + 1
  written = np.zeros((num_slots, n + 1, num_heads), bool)
  heads, tiles, slots = all_items[:, 0], all_items[:, 1], all_items[:, 5]
  written[slots[:, None], positions[tiles], heads[:, None]] = True
  return Lists(
    all_items,
    np.concatenate([*others, np.zeros((1, 2 + (group > 1)))]).astype(np.int32),
    masks,
    written[:, :n],
  )


def _items(parts, num_tiles, longest):
  """(items without their head, others) of parts that are cut in one order."""
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
  # Long rows are split into pieces of about the same length.
  size = last - first
  pieces = np.maximum(1, -(-size // longest)) if longest else np.ones_like(size)
  row = np.repeat(np.arange(num_tiles), pieces)
  piece = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
  begin = first[row] + size[row] * piece // pieces[row]
  end = first[row] + size[row] * (piece + 1) // pieces[row]
  items = np.stack(
    [tiles[row], begin, middle[row].clip(begin, end), end, piece], axis=1
  )
  return items, np.stack([cols, masks.clip(0), members[order]], axis=1)
