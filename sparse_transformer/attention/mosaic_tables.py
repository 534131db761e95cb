"""Tables of the kernels for TPUs: blocks, steps, and where results go.

A TPU copies blocks of consecutive rows only. So the tiles that work lists name
are taken from the arrays before a launch, and results are put in place after
it. Tiles in the natural order need no more than a transposition.

The grid has a step for each tile of an item, one item after another. What a
step processes is in tables in scalar memory.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import worklists
from sparse_transformer.attention.contract import Table
from sparse_transformer.attention.worklists import Lists, Work
from sparse_transformer.patterns import Pattern

# Codes of a step: the first or last of its item; its tile is partial or full,
# or there is none. The bits from `SHIFT` on are the number of its mask.
FIRST, LAST, PARTIAL, FULL, SHIFT = 1, 2, 4, 8, 4


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["positions", "heads"],
  meta_fields=["is_natural"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
  """The tiles of one side that a launch reads, each of one head.

  Attributes:
    positions: int32 [blocks, tile], any position for padding.
    heads: int32 [blocks].
    is_natural: whether all tiles of all heads, in the natural order, precede
      those.
  """

  positions: Table
  heads: Table
  is_natural: bool

  def take(self, x_BLH: jax.Array) -> jax.Array:
    """[B, blocks, tile, K] of [B, L, H, K]; [B, blocks, 1, tile] of [B, L, H].

    Rows of padding hold some finite values of x, or 0.
    """
    is_row = x_BLH.ndim == 3
    x_BLHK = x_BLH[..., None] if is_row else x_BLH
    found = []
    if self.is_natural:
      found.append(self._split(x_BLHK))
    if len(self.heads):
      heads = jnp.asarray(self.heads)[:, None]
      found.append(x_BLHK[:, jnp.asarray(self.positions), heads])
    blocks = found[0] if len(found) == 1 else jnp.concatenate(found, 1)
    return blocks.swapaxes(2, 3) if is_row else blocks

  def _split(self, x_BLHK):
    batch, n, num_heads, width = x_BLHK.shape
    tile = self.positions.shape[1]
    x_BLHK = jnp.pad(x_BLHK, ((0, 0), (0, -n % tile), (0, 0), (0, 0)))
    x_BHLK = x_BLHK.swapaxes(1, 2)
    return x_BHLK.reshape(batch, -1, tile, width)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["items", "others", "codes"],
  meta_fields=["first", "num_items"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
  """The steps of a grid.

  Attributes:
    items: int32 [steps], the item, which is the number of its block, too.
    others: int32 [steps], the number of the other side's block.
    codes: int32 [steps], see `FIRST`.
    first, num_items: the items of these steps.
  """

  items: Table
  others: Table
  codes: Table
  first: int
  num_items: int


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["mine", "others", "steps", "rows", "written"],
  meta_fields=["tile"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
  """The work of one kernel.

  Attributes:
    mine: a block for each item.
    others: the blocks of the other side.
    steps: the steps of one grid; of several, if there are too many for one.
    rows: for each slot int32 [n, heads], which row of all blocks of results is
      that of a position; None if its blocks are those of all heads in the
      natural order, and come first.
    written: see `worklists.Lists`.
    tile: positions in a tile.
  """

  mine: Blocks
  others: Blocks
  steps: tuple[Steps, ...]
  rows: tuple[Table | None, ...]
  written: Table
  tile: int

  def restore(self, blocks: jax.Array) -> jax.Array:
    """[slots, B, n, H, K] from [B, items, tile, K]."""
    batch, _, tile, width = blocks.shape
    rows = blocks.reshape(batch, -1, width)
    n, num_heads = self.written.shape[1:]
    slots = []
    for where in self.rows:
      if where is None:
        size = -(-n // tile) * tile
        x_BHLK = rows[:, : size * num_heads].reshape(batch, -1, size, width)
        slots.append(x_BHLK[:, :, :n].swapaxes(1, 2))
      else:
        slots.append(rows[:, jnp.asarray(where)])
    return jnp.stack(slots)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["masks", "by_query", "by_key"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
  """The work of all kernels.

  Attributes:
    masks: int32 [masks, tile // 32, tile], the pairs of partial tiles: a column
      for each query, a bit for each key.
    by_query: its items are tiles of queries.
    by_key: its items are tiles of keys.
  """

  masks: Table
  by_query: Launch
  by_key: Launch


@functools.lru_cache(maxsize=64)
def make_tables(
  patterns: tuple[Pattern, ...], n: int, tile: int, most_steps: int
) -> Tables:
  """The work of attention with one pattern per head.

  Args:
    patterns: one per head.
    n: number of positions.
    tile: positions on a side of a tile, a multiple of 32.
    most_steps: the most steps of one grid.
  """
  work = worklists.make_work(patterns, n, tile)
  # Bits over keys, for both launches.
  masks = np.ascontiguousarray(np.asarray(work.by_query.masks).swapaxes(1, 2))
  make = functools.partial(_make_launch, n=n, most_steps=most_steps)
  return Tables(
    masks,
    make(work.by_query, work.queries, work.keys),
    make(work.by_key, work.keys, work.queries),
  )


def _make_launch(lists: Lists, mine, others, *, n, most_steps):
  items = np.asarray(lists.items)
  head, tile, slot = items[:, 0], items[:, 1], items[:, 5]
  items = items[np.lexsort((tile, head, slot))]
  head, tile, slot = items[:, 0], items[:, 1], items[:, 5]
  num_heads = lists.written.shape[2]
  natural = _natural_tiles(mine, n)
  # The items of the first slot come first, and are all tiles of all heads.
  in_first = tile[slot == 0].reshape(num_heads, -1)
  is_natural = bool((natural[in_first] == np.arange(in_first.shape[1])).all())
  rest = items[in_first.size if is_natural else 0 :]
  blocks = Blocks(mine[rest[:, 1]].clip(0), rest[:, 0], is_natural)
  other_blocks, steps = _steps(items, lists, others, n, num_heads)
  rows = _rows(items, mine, n, num_heads, lists.num_slots)
  return Launch(
    blocks,
    other_blocks,
    _split(steps, most_steps),
    (None if is_natural else rows[0], *rows[1:]),
    lists.written,
    mine.shape[1],
  )


def _natural_tiles(positions, n):
  """Which tile of the natural order each tile is, -1 if it is none of them."""
  tile = positions.shape[1]
  number = positions[:, 0] // tile
  expected = number[:, None] * tile + np.arange(tile)
  expected[expected >= n] = -1
  return np.where((positions == expected).all(1), number, -1)


def _steps(items, lists, positions, n, num_heads):
  """(blocks of the other side, int32 [3, steps]: items, others, codes)."""
  size = items[:, 4] - items[:, 2]
  count = np.maximum(size, 1)  # an item without tiles has a step, too
  item = np.repeat(np.arange(len(items)), count)
  place = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
  at = items[item, 2] + place
  exists, is_partial = place < size[item], at < items[item, 3]
  tile, mask = np.asarray(lists.others)[np.where(exists, at, 0)].T
  codes = (
    (place == 0) * FIRST
    | (place == count[item] - 1) * LAST
    | (exists & is_partial) * PARTIAL
    | (exists & ~is_partial) * FULL
  )
  # A step without a mask names that of the step before, to copy nothing.
  has_mask = codes & PARTIAL != 0
  latest = np.maximum.accumulate(np.where(has_mask, np.arange(len(item)), 0))
  mask = np.where(has_mask[latest], mask[latest], 0)
  blocks, others = _blocks(tile, items[item, 0], positions, n, num_heads)
  codes |= mask.astype(np.int64) << SHIFT
  return blocks, np.stack([item, others, codes]).astype(np.int32)


def _blocks(tile, head, positions, n, num_heads):
  """(the distinct tiles of heads, the number of each).

  Those in the natural order are taken together with all others of the kind.
  """
  natural = _natural_tiles(positions, n)[tile]
  is_natural = natural >= 0
  distinct, number = np.unique(
    np.stack([head, tile])[:, ~is_natural], axis=1, return_inverse=True
  )
  per_head = -(-n // positions.shape[1])
  numbers = head * per_head + natural
  numbers[~is_natural] = number.ravel() + is_natural.any() * num_heads * per_head
  heads, tiles = distinct
  blocks = Blocks(
    positions[tiles].clip(0), heads.astype(np.int32), bool(is_natural.any())
  )
  return blocks, numbers


def _rows(items, positions, n, num_heads, num_slots):
  """Where results are, int32 [slots, n, heads]; 0 where they are not."""
  tile = positions.shape[1]
  rows = np.zeros((num_slots, n + 1, num_heads), np.int32)
  rows[items[:, 5, None], positions[items[:, 1]], items[:, 0, None]] = (
    np.arange(len(items) * tile).reshape(-1, tile)
  )
  return rows[:, :n]


def _split(steps, most_steps):
  """`Steps` of at most so many, cut between items."""
  pieces, start, items = [], 0, steps[0]
  while start < len(items):
    stop = min(start + most_steps, len(items))
    if stop < len(items):
      # Back to the start of an item, unless it is longer than a piece.
      stop = int(np.searchsorted(items, items[stop]))
    if stop <= start:
      raise ValueError(f"an item has more than {most_steps} tiles")
    piece = steps[:, start:stop]
    first, last = int(items[start]), int(items[stop - 1])
    pieces.append(Steps(*piece, first, last + 1 - first))
    start = stop
  return tuple(pieces)
