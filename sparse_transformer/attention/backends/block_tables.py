"""Tables for TPU kernels, which copy blocks.

Pallas Mosaic can copy only consecutive memory. Arrays are therefore arranged in
blocks: a block is one tile of one head. Tables list blocks rather than
positions. A grid has one step for each tile that a work item lists (see
`items`).
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

# Bits of the code of a step. They say whether the step is the first or the last
# of its item, and whether its tile is partial or full; neither is set if the
# step has no tile. The bits from `SHIFT` on are the index of its mask.
FIRST, LAST, PARTIAL, FULL, SHIFT = 1, 2, 4, 8, 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
  """The steps of a grid, as int32 [steps] tables in scalar memory."""

  rows: Table  # the block of each step's item, ascending
  columns: Table  # the block of each step's other side
  codes: Table  # the code of each step, see `FIRST`
  # The range of the items' blocks, from `first` on.
  first: int = dataclasses.field(metadata=STATIC)
  num_blocks: int = dataclasses.field(metadata=STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockTables:
  """The tables of all kernels."""

  # int32 [masks, tile // 32, tile], the pairs of partial tiles, with a column
  # for each query and a bit for each key.
  masks: Table
  # The steps are divided into several grids if there are too many for one.
  by_query: tuple[Grid, ...]  # grids whose items are blocks of queries
  by_key: tuple[Grid, ...]  # grids whose items are blocks of keys


def to_blocks(
  x_BLHK: jax.Array,
  tile: int,
  num_heads: int,
) -> jax.Array:
  """Arranges an array in blocks, [B, blocks, K, tile].

  The blocks of a head are consecutive. Positions are on the last axis, which is
  the axis of lanes.

  Args:
    x_BLHK: an array [B, L, H, K], sorted into tiles, where L is a multiple of
      `tile`; or [B, L, H], whose blocks are [B, blocks, 1, tile]. If it has a
      single head, all heads get the same blocks.
    tile: number of positions in a block.
    num_heads: number of heads that get blocks.
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
    blocks: [B, H * tiles, K, tile], where the tiles of each head are
      consecutive.
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
  """Makes tables with equal shapes, from the results of `items.make_work`.

  Args:
    works: the work of each device, or of a single device.
    group: number of query heads that share a KV head.
    most_steps: the maximum number of steps of a grid, before grids are padded
      to equal lengths on all devices.

  Raises:
    ValueError: a single item has more tiles than `most_steps`.
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

  # Bits are packed over keys for both grids, because scores are [keys, queries]
  # in all kernels.
  masks = np.ascontiguousarray(works[0].by_query.masks.swapaxes(1, 2))
  return [
    BlockTables(masks=masks, by_query=by_query, by_key=by_key)
    for by_query, by_key in zip(query_grids, key_grids, strict=True)
  ]


def _make_grids(lists_of_devices, num_rows, num_columns, group, most_steps):
  """Makes the grids of all devices for one side, queries or keys.

  `num_rows` and `num_columns` are the numbers of tiles on this side and on the
  other side. `group` query heads share a KV head.
  """
  steps_of_devices = [
    _list_steps(lists, num_rows, num_columns, group)
    for lists in lists_of_devices
  ]
  num_heads = lists_of_devices[0].written.shape[2]
  num_blocks = num_heads * num_rows

  # The first step of each block: [devices, blocks + 1].
  blocks = np.arange(num_blocks + 1)
  starts = np.stack(
    [np.searchsorted(steps[0], blocks) for steps in steps_of_devices]
  )

  # Grids are cut at the same blocks on all devices, because all run the same
  # grids.
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
  """Lists all steps, before they are cut into grids.

  Returns:
    int32 [3, steps], the rows, columns and codes of a `Grid`. Each item has at
    least one step, so that its result is written.
  """
  head, tile, first, middle, last, _ = lists.items.T
  blocks = head * num_rows + tile

  # The lists begin with the longest items, but the items of a grid must ascend.
  # An item without tiles gets a step that only writes its result.
  order = np.argsort(blocks, kind="stable")
  size = last - first
  item = np.repeat(order, np.maximum(size, 1)[order])  # for each step
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

  # Find the block of the other side, from its head and its tile.
  listed = lists.tiles[at]
  if listed.shape[1] == 3:  # items are keys with several query heads
    column_head = head[item] * group + listed[:, 2]
  else:
    column_head = head[item] // group
  column = column_head * num_columns + listed[:, 0]
  columns = _last_valid(column, exists)
  masks = _last_valid(listed[:, 1], is_partial)

  # A step without a mask keeps the mask index of the step before it.
  codes = masks << SHIFT
  codes |= is_first * FIRST
  codes |= is_last * LAST
  codes |= is_partial * PARTIAL
  codes |= is_full * FULL
  return np.stack([blocks[item], columns, codes]).astype(np.int32)


def _last_valid(x, is_valid):
  """Replaces each invalid entry by the last valid one before it, or 0."""
  # A step with the same block as the step before it copies nothing.
  at = np.where(is_valid, np.arange(len(x)), -1)
  at = np.maximum.accumulate(at)
  return np.where(at < 0, 0, x[at])


def _cut(starts, most_steps):
  """Returns the first block of each grid, followed by the number of blocks.

  Grids are cut between items. `starts` is the first step of each block,
  [devices, blocks + 1].
  """
  num_blocks = starts.shape[1] - 1
  cuts = [0]
  while True:
    # Find the last cut for which no device has too many steps.
    sizes = (starts - starts[:, cuts[-1:]]).max(0)
    cut = int(np.searchsorted(sizes, most_steps, side="right")) - 1

    # If not even one item fits, no cut is possible.
    if cut == cuts[-1]:
      raise ValueError(f"an item has more than {most_steps} tiles")
    cuts.append(cut)
    if cut == num_blocks:
      return cuts


def _pad(steps, size):
  """Pads steps with copies of the last step, which do nothing.

  The added steps have the block and mask indices of the last step, so that
  Pallas copies nothing. Their flags are cleared, so that the kernel computes
  nothing.
  """
  num_steps = steps.shape[1]
  padded = np.pad(steps, ((0, 0), (0, size - num_steps)), mode="edge")
  padded[2, num_steps:] &= -1 << SHIFT
  return padded
