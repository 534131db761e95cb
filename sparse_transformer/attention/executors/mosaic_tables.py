"""Tables of kernels in Pallas' Mosaic, for TPUs and GPUs: blocks, and steps.

They copy blocks of consecutive places only. So arrays are arranged in each
order that tiles are cut from, for the heads that use it, and results are put
back. The natural order needs no more than a transposition.

There is a step for each tile of an item, one item after another. On a TPU, it
is one of the grid, and what it processes is in tables in scalar memory. Each
core of a chip can have its own items. On a GPU, each program runs the steps of
one item.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import contract
from sparse_transformer.attention.executors import worklists
from sparse_transformer.attention.executors.worklists import Lists
from sparse_transformer.attention.orders import Order, make_order
from sparse_transformer.patterns import Layout, Pattern

# Codes of a step: the first or last of its item; its tile is partial or full,
# or there is none. The bits from `SHIFT` on are the number of its mask.
FIRST, LAST, PARTIAL, FULL, SHIFT = 1, 2, 4, 8, 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Group:
  """Heads that are cut in the same order."""

  order: Order  # as many places as its tiles have
  # The heads, ascending.
  heads: tuple[int, ...] = dataclasses.field(metadata=contract.STATIC)

  @property
  def num_places(self) -> int:
    """Places of all heads."""
    return len(self.heads) * len(self.order.positions)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Side:
  """The blocks of all queries, or of all keys.

  A block is one tile of one head. The blocks of a group are contiguous, and so
  are those of each head within it.
  """

  groups: tuple[Group, ...]  # a group for each order
  tile: int = dataclasses.field(metadata=contract.STATIC)  # positions in a tile

  @property
  def num_blocks(self) -> int:
    """Blocks of all groups."""
    return sum(group.num_places for group in self.groups) // self.tile

  def take(self, x_BLHK: jax.Array, rows: bool = False) -> jax.Array:
    """Blocks [B, blocks, K, tile], with finite values of x for padding.

    With `rows`, [B, blocks, tile, K]. K is 1 for x_BLH, and for x_BL1, which is
    the same for all heads.
    """
    if x_BLHK.ndim == 3 and x_BLHK.shape[2] == 1:
      num = 1 + max(head for group in self.groups for head in group.heads)
      x_BLHK = jnp.broadcast_to(x_BLHK, (*x_BLHK.shape[:2], num))
    batch, n, num_heads, *widths = x_BLHK.shape
    width = math.prod(widths)
    found = []
    for group in self.groups:
      x_BLhK = x_BLHK
      if len(group.heads) < num_heads:
        x_BLhK = jnp.stack([x_BLHK[:, :, h] for h in group.heads], 2)
      # Rows of all heads at once are long, and few.
      (x,) = group.order.arrange(x_BLhK.reshape(batch, n, -1))
      tiles = x.reshape(batch, -1, self.tile, len(group.heads), width)
      axes = (0, 3, 1, 2, 4) if rows else (0, 3, 1, 4, 2)
      blocks = tiles.transpose(axes)
      found.append(blocks.reshape(batch, -1, *blocks.shape[3:]))
    return jnp.concatenate(found, 1)

  def restore(
    self, blocks: jax.Array, chosen: tuple[int, ...], rows: bool = False
  ) -> jax.Array:
    """[B, n, H, K] from the blocks that `take` returns, in the same order.

    `chosen` is the group of each head whose blocks are its result, -1 for none.
    """
    batch, _, *shape = blocks.shape
    tile, width = shape if rows else shape[::-1]
    columns, first = {}, 0
    for number, group in enumerate(self.groups):
      count = group.num_places // tile
      if number in chosen:
        x = blocks[:, first : first + count]
        x = x.reshape(batch, len(group.heads), -1, *shape)
        x = x.transpose((0, 2, 3, 1, 4) if rows else (0, 2, 4, 1, 3))
        x = x.reshape(batch, -1, len(group.heads) * width)
        (x,) = group.order.restore(x)
        x_BLhK = x.reshape(*x.shape[:2], -1, width)
        if set(chosen) == {number} and len(group.heads) == len(chosen):
          return x_BLhK
        for i, head in enumerate(group.heads):
          columns[number, head] = x_BLhK[:, :, i]
      first += count
    nothing = jnp.zeros_like(next(iter(columns.values())))
    return jnp.stack(
      [columns.get((g, head), nothing) for head, g in enumerate(chosen)], 2
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
  """The steps of a grid: int32 [cores * steps], those of each core together."""

  items: contract.Table  # the block of the item; ascending
  others: contract.Table  # the block of the other side
  codes: contract.Table  # see `FIRST`
  # The blocks that items of these steps may have.
  first: int = dataclasses.field(metadata=contract.STATIC)
  num_blocks: int = dataclasses.field(metadata=contract.STATIC)
  cores: int = dataclasses.field(metadata=contract.STATIC)

  @property
  def per_core(self) -> int:
    """Steps of each core."""
    return len(self.items) // self.cores

  def place(self, program: Any, step: Any) -> Any:
    """The place in the tables of a step of a program.

    There is a program for each core and sequence, those of a sequence together.
    """
    return program % self.cores * self.per_core + step

  def ranges(self) -> contract.Table:
    """The steps of each item of one core, those with the most first.

    int32 [items, 4]: its block, its first step, its first one with a full tile,
    and the one after the last. No range has the steps that do nothing.
    """
    tables = self.items, self.codes
    is_known = all(isinstance(table, np.ndarray) for table in tables)
    xp: Any = np if is_known else jnp
    blocks = xp.arange(self.first, self.first + self.num_blocks)

    def count(kind):
      """The steps of a kind before each place."""
      is_kind = self.codes & kind != 0
      return xp.concatenate([xp.zeros(1, int), xp.cumsum(is_kind)])

    first, end = (
      xp.searchsorted(self.items, blocks, side=side)
      for side in ("left", "right")
    )
    partial, full = (
      count(kind)[end] - count(kind)[first] for kind in (PARTIAL, FULL)
    )
    middle = first + partial
    found = xp.stack([blocks, first, middle, middle + full], 1)
    longest_first = xp.argsort(-(partial + full), stable=True)
    return found[longest_first].astype(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
  """The work of one kernel."""

  # The steps of one grid; of several, if there are too many for one.
  steps: tuple[Steps, ...]
  written: contract.Table  # see `worklists.Lists`
  # For each slot, the group of each head, -1 for none.
  groups: tuple[tuple[int, ...], ...] = dataclasses.field(
    metadata=contract.STATIC
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
  """The work of all kernels."""

  # The blocks of both sides.
  queries: Side
  keys: Side
  # int32 [masks, tile // 32, tile], the pairs of partial tiles: a column for
  # each query, a bit for each key.
  masks: contract.Table
  by_query: Launch  # its items are tiles of queries
  by_key: Launch  # its items are tiles of keys


class Limits(NamedTuple):
  """How the steps of a launch are cut into grids."""

  # The most in one grid, before all its cores get equally many.
  steps: int
  cores: int = 1  # that share a sequence, 1 or 2


@functools.lru_cache(maxsize=64)
def make_tables(
  patterns: tuple[Pattern, ...],
  n: int,
  tile: int,
  limits: Limits,
  group: int = 1,
) -> Tables:
  """The work of attention on n positions, with one pattern per query head.

  A tile has a multiple of 32 positions on a side, and a key head `group` query
  heads.
  """
  work = worklists.make_work(patterns, n, tile, group=group)
  lists = work.by_query, work.by_key
  of_queries, of_keys = np.asarray(work.queries), np.asarray(work.keys)
  queries = _number(of_queries, n, _uses(*lists, len(of_queries), group))
  keys = _number(of_keys, n, _uses(*lists[::-1], len(of_keys), group))
  (tables,) = _tables_of([work], queries, keys, limits, group)
  return tables


def make_shares(
  part: Pattern,
  layouts: Sequence[Layout],
  num_heads: int,
  group: int,
  limits: Limits,
) -> list[Tables]:
  """See `contract.Executor.shares`."""
  works = worklists.make_shares(part, layouts, num_heads, group)
  queries, keys = (
    _number(tiles, tiles.size, np.ones((num, len(tiles)), bool))
    for num, tiles in (
      (num_heads, np.asarray(works[0].queries)),
      (num_heads // group, np.asarray(works[0].keys)),
    )
  )
  return _tables_of(works, queries, keys, limits, group)


def _tables_of(works, queries, keys, limits, group):
  """Tables of the same shapes, for works with the same blocks and masks."""
  of_queries, of_keys = [w.by_query for w in works], [w.by_key for w in works]
  by_query = _make_launches(of_queries, queries, keys, limits, group)
  by_key = _make_launches(of_keys, keys, queries, limits, group)
  # Bits over keys, for both launches.
  masks = np.ascontiguousarray(np.swapaxes(works[0].by_query.masks, 1, 2))
  return [
    Tables(queries.side, keys.side, masks, *launches)
    for launches in zip(by_query, by_key, strict=True)
  ]


def _spread(lists: Lists) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(item, place of its tile in `others`, whether there is one) of each step.

  An item without tiles also has a step.
  """
  items = np.asarray(lists.items)
  size = items[:, 4] - items[:, 2]
  count = np.maximum(size, 1)
  item = np.repeat(np.arange(len(items)), count)
  offset = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
  exists = offset < size[item]
  return item, np.where(exists, items[item, 2] + offset, 0), exists


def _other_heads(lists: Lists, item: Any, at: Any, group: int) -> np.ndarray:
  """The head of the other side of each step, see `_spread`."""
  heads, others = np.asarray(lists.items)[item, 0], np.asarray(lists.others)
  if others.shape[1] == 2:
    return heads // group
  return heads * group + others[at, 2]


def _uses(mine: Lists, theirs: Lists, num_tiles: int, group: int) -> np.ndarray:
  """The tiles of the side of `mine` that heads need: bool [heads, tiles]."""
  uses = np.zeros((mine.written.shape[2], num_tiles), bool)
  uses[mine.items[:, 0], mine.items[:, 1]] = True
  item, at, exists = _spread(theirs)
  heads = _other_heads(theirs, item, at, group)
  uses[heads[exists], theirs.others[at, 0][exists]] = True
  return uses


@dataclasses.dataclass(frozen=True)
class _Numbered:
  """A side, with the numbers of tiles of heads."""

  side: Side
  blocks: np.ndarray  # int [heads, tiles], the block of each, if it is used
  groups: np.ndarray  # int [tiles], the group of each tile, if any head uses it


def _number(positions: np.ndarray, n: int, uses: np.ndarray) -> _Numbered:
  """Makes the blocks of a side, as `_uses` says."""
  tile = positions.shape[1]
  per_order = -(-n // tile)
  blocks, groups = np.zeros(uses.shape, int), np.zeros(len(positions), int)
  found: list[Group] = []
  first = 0
  for start in range(0, len(positions), per_order):
    of_order = slice(start, start + per_order)
    heads, tiles = np.nonzero(uses[:, of_order])
    if not len(heads):
      continue
    distinct, count = np.unique(heads), tiles.max() + 1
    groups[of_order] = len(found)
    order = make_order(positions[of_order].ravel()[:n], count * tile)
    found.append(Group(order, tuple(distinct.tolist())))
    starts = first + np.arange(len(distinct))[:, None] * count
    blocks[distinct, of_order] = starts + np.arange(per_order)
    first += len(distinct) * count
  return _Numbered(Side(tuple(found), tile), blocks, groups)


def _make_launches(
  lists: Sequence[Lists],
  mine: _Numbered,
  others: _Numbered,
  limits: Limits,
  group: int,
) -> list[Launch]:
  """The work of one kernel, whose items are tiles of `mine`, by each list."""
  steps = [_steps_of(x, mine, others, group) for x in lists]
  cut = _cut(steps, mine.side.num_blocks, limits)
  launches = []
  for x, pieces in zip(lists, cut, strict=True):
    head, tile, _, _, _, slot = np.asarray(x.items).T
    groups = np.full((len(x.written), x.written.shape[2]), -1)
    groups[slot, head] = mine.groups[tile]
    chosen = tuple(map(tuple, groups.tolist()))
    launches.append(Launch(pieces, x.written, chosen))
  return launches


def _steps_of(
  lists: Lists, mine: _Numbered, others: _Numbered, group: int
) -> np.ndarray:
  """The items, others and codes of all steps: int32 [3, steps]."""
  head, tile, _, middle, _, _ = np.asarray(lists.items).T
  item, at, exists = _spread(lists)
  # Lists are longest first, for machines that run several items at a time.
  order = np.argsort(mine.blocks[head, tile][item], kind="stable")
  item, at, exists = item[order], at[order], exists[order]
  is_partial = exists & (at < middle[item])
  changes = np.diff(item, prepend=-1, append=-1) != 0
  codes = changes[:-1] * FIRST | changes[1:] * LAST
  codes |= is_partial * PARTIAL | (exists & ~is_partial) * FULL
  other, mask = np.asarray(lists.others)[at, :2].T
  heads = _other_heads(lists, item, at, group)
  other = _last_of(others.blocks[heads, other], exists)
  codes |= _last_of(mask, is_partial) << SHIFT
  number = mine.blocks[head[item], tile[item]]
  return np.stack([number, other, codes]).astype(np.int32)


def _last_of(x: np.ndarray, is_valid: np.ndarray) -> np.ndarray:
  """x with invalid entries replaced by the valid one before, or 0."""
  # A step that names the same block as the step before copies nothing.
  at = np.maximum.accumulate(np.where(is_valid, np.arange(len(x)), -1))
  return np.where(at < 0, 0, x[at])


def _cut(
  all_steps: Sequence[np.ndarray], num_blocks: int, limits: Limits
) -> list[tuple[Steps, ...]]:
  """`Steps` within limits, cut between items, for each device."""
  blocks = np.arange(num_blocks + 1)
  starts = np.stack([np.searchsorted(x[0], blocks) for x in all_steps])
  firsts = [0]
  while (starts[:, -1] - starts[:, firsts[-1]]).max() > limits.steps:
    sizes = (starts - starts[:, firsts[-1], None]).max(0)
    # The last item at which no device has too many.
    first = int(np.searchsorted(sizes, limits.steps, side="right")) - 1
    if first == firsts[-1]:
      raise ValueError(f"an item has more than {limits.steps} tiles")
    firsts.append(first)
  firsts.append(num_blocks)
  pieces = [
    np.split(steps, cuts, axis=1)
    for steps, cuts in zip(all_steps, starts[:, firsts[1:-1]], strict=True)
  ]
  counts = np.diff(firsts).tolist()
  launches = [
    _divide(of_devices, limits.cores, first, count)
    for *of_devices, first, count in zip(
      *pieces, firsts[:-1], counts, strict=True
    )
  ]
  return [*zip(*launches, strict=True)]


def _divide(
  of_devices: Sequence[np.ndarray], cores: int, first: int, num_blocks: int
) -> list[Steps]:
  """The `Steps` of each device, divided between its cores.

  All cores have equally many: some get steps that do nothing. Two cores must
  not write the same block, so if a device has one item, one core has all steps.
  """
  starts = [np.flatnonzero(np.diff(x[0], prepend=-1))[1:] for x in of_devices]
  if not all(map(len, starts)):
    cores = 1
  divided = [[steps] for steps in of_devices]
  if cores > 1:
    divided = [
      np.split(steps, [of[abs(2 * of - steps.shape[1]).argmin()]], axis=1)
      for steps, of in zip(of_devices, starts, strict=True)
    ]
  size = max(part.shape[1] for parts in divided for part in parts)
  found = []
  for parts in divided:
    padded = [_pad(part, size) for part in parts]
    items, others, codes = np.concatenate(padded, axis=1)
    found.append(Steps(items, others, codes, first, num_blocks, cores))
  return found


def _pad(steps: np.ndarray, size: int) -> np.ndarray:
  """As many steps: more of them repeat the last, but do nothing."""
  padded = np.pad(steps, ((0, 0), (0, size - steps.shape[1])), mode="edge")
  padded[2, steps.shape[1] :] &= -1 << SHIFT
  return padded
