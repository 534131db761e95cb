"""Tables of kernels that copy blocks, for TPUs.

Pallas' Mosaic copies consecutive places only. So arrays are arranged in blocks,
of one tile of one head each. Each tile of an item is a step of a grid.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention.executors.items import Lists, Work
from sparse_transformer.attention.orders import STATIC, Table

# Codes of a step: the first or last of its item; its tile is partial or full,
# or there is none. The bits from `SHIFT` on are the number of its mask.
FIRST, LAST, PARTIAL, FULL, SHIFT = 1, 2, 4, 8, 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
  """The steps of a grid: int32 [steps]."""

  items: Table  # the block of the item; ascending
  others: Table  # the block of the other side
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


def to_blocks(x_BLHK: jax.Array, tile: int, num_heads: int) -> jax.Array:
  """Blocks [B, blocks, K, tile].

  x_BL1 is the same for all heads. Without K, as of x_BLH, blocks are [B,
  blocks, 1, tile].
  """
  batch, _, heads, *width = x_BLHK.shape
  x = x_BLHK.reshape(batch, -1, tile, heads, *width or (1,))
  x = jnp.broadcast_to(x, (*x.shape[:3], num_heads, x.shape[4]))
  x = x.transpose(0, 3, 1, 4, 2)
  return x.reshape(batch, -1, *x.shape[3:])


def from_blocks(blocks: jax.Array, num_heads: int, is_wide: bool) -> jax.Array:
  """Undoes `to_blocks`: [B, n, H, K], or [B, n, H] if not `is_wide`."""
  batch, _, width, tile = blocks.shape
  x = blocks.reshape(batch, num_heads, -1, width, tile)
  x = x.transpose(0, 2, 4, 1, 3)
  x = x.reshape(batch, -1, num_heads, width)
  return x if is_wide else x[..., 0]


def tables_of(
  works: Sequence[Work], group: int, most_steps: int
) -> list[BlockTables]:
  """Tables of the same shapes, for works of `items.make_work`.

  A grid has at most `most_steps` steps, before it is padded for all devices.
  """
  num_queries = len(works[0].queries)
  num_keys = len(works[0].keys)
  query_steps = [
    _steps_of(work.by_query, num_queries, num_keys, group) for work in works
  ]
  key_steps = [
    _steps_of(work.by_key, num_keys, num_queries, group) for work in works
  ]
  num_heads = works[0].by_query.written.shape[2]
  num_key_heads = works[0].by_key.written.shape[2]
  query_grids = _cut(query_steps, num_heads * num_queries, most_steps)
  key_grids = _cut(key_steps, num_key_heads * num_keys, most_steps)

  # Bits over keys, for both.
  masks = np.ascontiguousarray(np.swapaxes(works[0].by_query.masks, 1, 2))
  return [
    BlockTables(masks=masks, by_query=by_query, by_key=by_key)
    for by_query, by_key in zip(query_grids, key_grids, strict=True)
  ]


def _steps_of(
  lists: Lists, num_mine: int, num_others: int, group: int
) -> np.ndarray:
  """The items, others and codes of steps, at least one an item: [3, steps]."""
  head, tile, first, middle, last, _ = np.asarray(lists.items).T
  blocks = head * num_mine + tile

  # Lists are longest first; the items of a grid ascend. An item without tiles
  # has a step that only writes its result.
  order = np.argsort(blocks, kind="stable")
  size = last - first
  item = np.repeat(order, np.maximum(size, 1)[order])  # of each step
  is_first = np.diff(item, prepend=-1) != 0
  is_last = np.diff(item, append=-1) != 0
  starts = np.flatnonzero(is_first)
  sizes = np.diff(starts, append=len(item))
  offset = np.arange(len(item)) - np.repeat(starts, sizes)
  exists = offset < size[item]

  at = np.where(exists, first[item] + offset, 0)
  is_partial = exists & (at < middle[item])
  other, mask, *member = np.asarray(lists.others)[at].T
  if member:
    other_head = head[item] * group + member[0]
  else:
    other_head = head[item] // group
  others = _last_of(other_head * num_others + other, exists)

  codes = is_first * FIRST | is_last * LAST
  codes |= is_partial * PARTIAL | (exists & ~is_partial) * FULL
  codes |= _last_of(mask, is_partial) << SHIFT
  return np.stack([blocks[item], others, codes]).astype(np.int32)


def _last_of(x: np.ndarray, is_valid: np.ndarray) -> np.ndarray:
  """x with invalid entries replaced by the valid one before, or 0."""
  # A step that names the same block as the step before copies nothing.
  at = np.maximum.accumulate(np.where(is_valid, np.arange(len(x)), -1))
  return np.where(at < 0, 0, x[at])


def _cut(
  of_devices: Sequence[np.ndarray], num_blocks: int, most_steps: int
) -> list[tuple[Grid, ...]]:
  """The grids, cut between items, for each device."""
  blocks = np.arange(num_blocks + 1)
  # Where the steps of each block begin: [devices, blocks + 1].
  starts = np.stack([np.searchsorted(steps[0], blocks) for steps in of_devices])
  firsts = [0]  # the first block of each grid
  while (starts[:, -1] - starts[:, firsts[-1]]).max() > most_steps:
    sizes = (starts - starts[:, firsts[-1], None]).max(0)
    # The last item at which no device has too many.
    first = int(np.searchsorted(sizes, most_steps, side="right")) - 1
    if first == firsts[-1]:
      raise ValueError(f"an item has more than {most_steps} tiles")
    firsts.append(first)

  grids = []
  for first, end in itertools.pairwise([*firsts, num_blocks]):
    pieces = [
      steps[:, start[first] : start[end]]
      for steps, start in zip(of_devices, starts, strict=True)
    ]
    size = max(piece.shape[1] for piece in pieces)
    grids.append([_grid(_pad(x, size), first, end) for x in pieces])
  return [*zip(*grids, strict=True)]


def _pad(steps: np.ndarray, size: int) -> np.ndarray:
  """Adds steps that repeat the last one, but do nothing."""
  padded = np.pad(steps, ((0, 0), (0, size - steps.shape[1])), mode="edge")
  padded[2, steps.shape[1] :] &= -1 << SHIFT
  return padded


def _grid(steps: np.ndarray, first: int, end: int) -> Grid:
  """The grid of steps whose items are the blocks [first, end)."""
  items, others, codes = steps
  return Grid(
    items=items,
    others=others,
    codes=codes,
    first=first,
    num_blocks=end - first,
  )
