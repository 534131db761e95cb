"""Tables of kernels that copy blocks, for TPUs.

Pallas' Mosaic copies consecutive places only. So arrays are arranged in blocks,
of one tile of one head each, and tables name blocks rather than positions. Each
tile of an item is a step of a grid.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention.backends.items import Work
from sparse_transformer.attention.orders import STATIC, Table

# Codes of a step: the first or last of its item; its tile is partial or full,
# or there is none. The bits from `SHIFT` on are the number of its mask.
FIRST, LAST, PARTIAL, FULL, SHIFT = 1, 2, 4, 8, 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
  """The steps of a grid: tables of int32 [steps], which scalar memory holds."""

  rows: Table  # the block of the item; ascending
  columns: Table  # the block of the other side
  codes: Table  # see `FIRST`
  # The blocks that items of these steps may have.
  first: int = dataclasses.field(metadata=STATIC)
  num_blocks: int = dataclasses.field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockTables:
  """The work of all kernels."""

  # int32 [masks, tile // 32, tile], the pairs of partial tiles: a column for
  # each query, a bit for each key.
  masks: Table
  # The steps of one grid; of several, if there are too many for one.
  by_query: tuple[Grid, ...]  # their items are blocks of queries
  by_key: tuple[Grid, ...]  # their items are blocks of keys


def to_blocks(
  x_BLHK: jax.Array,
  tile: int,
  num_heads: int,
) -> jax.Array:
  """Arranges an array in blocks, [B, blocks, K, tile].

  The blocks of a head follow each other. Positions are the last axis, of lanes.

  Args:
    x_BLHK: an array [B, L, H, K] in the order of tiles, L a multiple of `tile`;
      or [B, L, H], whose blocks are [B, blocks, 1, tile]. With a single head,
      it is the same for all.
    tile: positions of a block.
    num_heads: heads that get blocks.
  """
  batch, length, heads = x_BLHK.shape[:3]
  width = 1 if x_BLHK.ndim == 3 else x_BLHK.shape[3]
  num_tiles = length // tile

  x = x_BLHK.reshape(batch, num_tiles, tile, heads, width)
  x = jnp.broadcast_to(x, (batch, num_tiles, tile, num_heads, width))
  x = x.transpose(0, 3, 1, 4, 2)
  return x.reshape(batch, -1, width, tile)


def from_blocks(
  blocks: jax.Array,
  num_heads: int,
  is_wide: bool,
) -> jax.Array:
  """Undoes `to_blocks`.

  Args:
    blocks: [B, H * tiles, K, tile], all tiles of a head before the next head's.
    num_heads: H.
    is_wide: whether the result has the axis K.

  Returns:
    [B, n, H, K], or [B, n, H] if not `is_wide`.
  """
  batch, _, width, tile = blocks.shape
  x = blocks.reshape(batch, num_heads, -1, width, tile)
  x = x.transpose(0, 2, 4, 1, 3)
  x = x.reshape(batch, -1, num_heads, width)
  return x if is_wide else x[..., 0]


def tables_of(
  works: Sequence[Work],
  group: int,
  most_steps: int,
) -> list[BlockTables]:
  """Tables of the same shapes, for works of `items.make_work`.

  Args:
    works: that of each device, or of one.
    group: query heads that share a key head.
    most_steps: the most steps of a grid, before it is padded for all devices.

  Raises:
    ValueError: a single item has more tiles than that.
  """
  num_queries = len(works[0].queries)
  num_keys = len(works[0].keys)
  make_grids = functools.partial(
    _make_grids, group=group, most_steps=most_steps
  )
  query_lists = [work.by_query for work in works]
  query_grids = make_grids(query_lists, num_queries, num_keys)
  key_lists = [work.by_key for work in works]
  key_grids = make_grids(key_lists, num_keys, num_queries)

  # Bits over keys, for both: the scores of all kernels are [keys, queries].
  masks = np.ascontiguousarray(works[0].by_query.masks.swapaxes(1, 2))
  return [
    BlockTables(masks=masks, by_query=by_query, by_key=by_key)
    for by_query, by_key in zip(query_grids, key_grids, strict=True)
  ]


def _make_grids(lists_of_devices, num_rows, num_columns, group, most_steps):
  """The grids of each device, from its lists of one side.

  `num_rows` are tiles of this side, `num_columns` of the other; `group` query
  heads share a key head.
  """
  steps_of_devices = [
    _list_steps(lists, num_rows, num_columns, group)
    for lists in lists_of_devices
  ]
  num_heads = lists_of_devices[0].written.shape[2]
  num_blocks = num_heads * num_rows

  # Where the steps of each block begin: [devices, blocks + 1].
  blocks = np.arange(num_blocks + 1)
  starts = np.stack(
    [np.searchsorted(steps[0], blocks) for steps in steps_of_devices]
  )

  # Cuts are at the same blocks on all devices, which run the same grids.
  grids_of_devices: list[tuple[Grid, ...]] = [() for _ in steps_of_devices]
  for first, end in itertools.pairwise(_cut(starts, most_steps)):
    size = (starts[:, end] - starts[:, first]).max()
    for device, steps in enumerate(steps_of_devices):
      start, stop = starts[device, [first, end]]
      rows, columns, codes = _pad(steps[:, start:stop], size)
      grid = Grid(
        rows=rows,
        columns=columns,
        codes=codes,
        first=first,
        num_blocks=end - first,
      )
      grids_of_devices[device] += (grid,)
  return grids_of_devices


def _list_steps(lists, num_rows, num_columns, group):
  """The steps of a grid that is not cut yet, from the lists of one side.

  Returns:
    int32 [3, steps], the rows, columns and codes of `Grid`. Each item has at
    least one step, so that its result is written.
  """
  head, tile, first, middle, last, _ = lists.items.T
  blocks = head * num_rows + tile

  # Lists are longest first; the items of a grid ascend. An item without tiles
  # has a step that only writes its result.
  order = np.argsort(blocks, kind="stable")
  size = last - first
  item = np.repeat(order, np.maximum(size, 1)[order])  # of each step
  is_first = np.diff(item, prepend=-1) != 0
  is_last = np.diff(item, append=-1) != 0
  starts = np.flatnonzero(is_first)
  offset = np.arange(len(item)) - starts[np.cumsum(is_first) - 1]
  exists = offset < size[item]

  # The entry of the lists that each step processes.
  at = np.where(exists, first[item] + offset, 0)

  # An item lists its partial tiles first.
  is_partial = exists & (at < middle[item])
  is_full = exists & ~is_partial

  # The block of the other side: its head, and its tile.
  listed = lists.tiles[at]
  if listed.shape[1] == 3:  # keys with several query heads
    column_head = head[item] * group + listed[:, 2]
  else:
    column_head = head[item] // group
  column = column_head * num_columns + listed[:, 0]
  columns = _last_valid(column, exists)
  masks = _last_valid(listed[:, 1], is_partial)

  # A step that has no mask keeps the number of the one before.
  codes = masks << SHIFT
  codes |= is_first * FIRST
  codes |= is_last * LAST
  codes |= is_partial * PARTIAL
  codes |= is_full * FULL
  return np.stack([blocks[item], columns, codes]).astype(np.int32)


def _last_valid(x, is_valid):
  """x with invalid entries replaced by the valid one before, or 0."""
  # A step that names the same block as the step before copies nothing.
  at = np.where(is_valid, np.arange(len(x)), -1)
  at = np.maximum.accumulate(at)
  return np.where(at < 0, 0, x[at])


def _cut(starts, most_steps):
  """The first block of each grid, and the end: cuts between items.

  `starts` are where the steps of each block begin: [devices, blocks + 1].
  """
  num_blocks = starts.shape[1] - 1
  cuts = [0]
  while True:
    # The last item at which no device has too many.
    sizes = (starts - starts[:, cuts[-1:]]).max(0)
    cut = int(np.searchsorted(sizes, most_steps, side="right")) - 1

    # Not even one more item fits.
    if cut == cuts[-1]:
      raise ValueError(f"an item has more than {most_steps} tiles")
    cuts.append(cut)
    if cut == num_blocks:
      return cuts


def _pad(steps, size):
  """Adds steps that repeat the last one, but do nothing.

  They keep its blocks, so that nothing is copied, and its mask, but no flag.
  """
  num_steps = steps.shape[1]
  padded = np.pad(steps, ((0, 0), (0, size - num_steps)), mode="edge")
  padded[2, num_steps:] &= -1 << SHIFT
  return padded
