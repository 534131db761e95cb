"""Attention over sets of pairs in plain XLA, in tiles found at run time.

Tiles of queries are gathered by position, and each tile meets all its keys in a
single step. Shapes are known while the program is traced, because only the
positions in the tables depend on the content. Results for the same position are
added in a fixed order.

Axes: V tiles of queries, each with T places; A tiles that are processed
  together; S keys that a tile of queries meets; P places in all tiles; R places
  of one query.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_transformer.attention import contract, online_softmax
from sparse_transformer.attention.content.grouping import group_by_label
from sparse_transformer.patterns import Pattern
from sparse_transformer.patterns.content import Chosen, Near

TILE = 64  # positions
# The most scores of a step, over all heads. On CPUs, they should fit in cache.
CPU_SCORES = 75_000
SCORES = 2**25


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TileTables:
  """The tables of one set of pairs, which say what each tile contains.

  A query may be in several tiles, so the tables list R places for each query.
  The results at these places are merged by log-sum-exp.
  """

  queries: jax.Array  # int32 [B, H, V, T], positions, -1 for none
  keys: jax.Array  # int32 [B, H, P], positions of keys, in whole tiles
  # int32 [B, H, V], the key tile of each query tile, out of range for none.
  # None if query tile v meets the key tiles from v to v + span - 1.
  blocks: jax.Array | None
  # int32 [B, H, L, R], the places of each query in all tiles. V * T stands for
  # no place; it is padding or out of range.
  places: jax.Array
  span: int = dataclasses.field(default=1, metadata=contract.STATIC)
  # The number of key tiles, if `blocks` is given.
  num_blocks: int = dataclasses.field(default=0, metadata=contract.STATIC)

  @property
  def steps(self) -> type["_Steps"]:
    """The class that runs the steps of a plan with these tables."""
    return _Windows if self.blocks is None else _Blocks


# These classes are registered here, because `patterns` does not import JAX.
jax.tree_util.register_dataclass(
  Near, ["order", "as_query", "as_key"], ["window", "reach"]
)
jax.tree_util.register_dataclass(Chosen, ["blocks"], ["size"])


def lay_out(pairs: Near | Chosen, tile: int) -> TileTables:
  """Returns the tables of a set of pairs.

  `tile` is the number of positions on a side of a tile; 0 for the default.
  """
  tile = tile or TILE
  if isinstance(pairs, Near):
    n = pairs.order.shape[2]
    return _lay_out_near(pairs, min(tile, n))
  n = pairs.blocks.shape[2]
  return _lay_out_chosen(pairs, min(tile, n))


def _lay_out_near(pairs, tile):
  """Lays out tiles in the set's order, in which keys are near their queries.

  Each tile of queries meets the keys of the same tile and of the tiles before
  it that are within the set's `reach`.
  """
  batch, num_heads, n = pairs.order.shape
  num_tiles = -(-n // tile)
  span = min(1 + -(-pairs.reach // tile), num_tiles)

  # Padding comes first, because the keys of the first query tiles would begin
  # before the first position.
  behind = (span - 1) * tile
  keys = _pad_tiles(pairs.order, behind, num_tiles * tile - n, -1)
  queries = keys[..., behind:]

  at = jnp.arange(n, dtype=jnp.int32)

  # The inverse of the order is the place of each query.
  def invert(order):
    return jnp.zeros_like(at).at[order].set(at)

  places = _for_heads(invert)(pairs.order)
  return TileTables(
    queries=queries.reshape(batch, num_heads, -1, tile),
    keys=keys,
    blocks=None,
    places=places[..., None],
    span=span,
  )


def _lay_out_chosen(pairs, tile):
  """Lays out tiles of queries that chose the same block of keys.

  A query is in one tile for each block that it chose. In this tile, it meets
  all keys of the block. If few queries chose a block, the tile of the block is
  mostly padding.
  """
  batch, num_heads, n, num_choices = pairs.blocks.shape
  size = min(pairs.size, n)
  num_blocks = -(-n // size)

  # Entry e of a row is choice e % num_choices of query e // num_choices.
  blocks = jnp.where(pairs.blocks < 0, num_blocks, pairs.blocks)
  blocks = blocks.reshape(batch * num_heads, n * num_choices)
  groups = group_by_label(blocks, num_blocks, tile)
  choices = groups.entries.reshape(batch, num_heads, -1, tile)
  queries = choices // num_choices

  num_keys = num_blocks * size
  at = jnp.arange(num_keys, dtype=jnp.int32)
  keys = jnp.where(at < n, at, -1)
  return TileTables(
    queries=jnp.where(
      choices < 0,
      -1,
      queries,
    ),
    keys=jnp.broadcast_to(keys, (batch, num_heads, num_keys)),
    blocks=groups.labels.reshape(batch, num_heads, -1),
    places=groups.slots.reshape(batch, num_heads, n, num_choices),
    num_blocks=num_blocks,
  )


def plan_part(
  part: Pattern, tables_of: Mapping[Pattern, TileTables]
) -> contract.Plan:
  """Makes the plan for a part of a bound pattern.

  A part is a set of pairs that other patterns may restrict. The plan processes
  the tiles of the set, and applies the other patterns as a mask within these
  tiles.
  """

  def find(part):
    """Returns (the set, the mask that is applied within its tiles)."""
    if isinstance(part, Near | Chosen):
      return part, part.within_tiles()
    pairs, left = find(part.left)
    return pairs, dataclasses.replace(part, left=left)

  pairs, condition = find(part)
  tables = tables_of[pairs]
  return contract.Plan(
    pattern=condition,
    tile=tables.queries.shape[-1],
    tables=tables,
  )


@dataclasses.dataclass(frozen=True)
class FoundTiles:
  """A `contract.Runner` of plans whose tables are found at run time."""

  platform: str

  def forward(
    self, plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, jax.Array]:
    steps = plan.tables.steps(plan, queries, keys, self.platform)
    return online_softmax.forward(steps, queries, keys, plan.scores)

  def backward(
    self, plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, ...]:
    steps = plan.tables.steps(plan, queries, keys, self.platform)
    return online_softmax.backward(steps, queries, keys, plan.scores)


def cut(num_tiles: int, batch: Any, scores: int, limit: int) -> tuple[int, int]:
  """Divides tiles into steps of equal size. The last step may be padded.

  Args:
    num_tiles: number of tiles of a sequence.
    batch: number of sequences. A symbolic batch size, as in `jax.export`,
      counts as 1.
    scores: number of scores of a tile, in one sequence.
    limit: the maximum number of scores in a step. A step has at least one tile,
      even if a single tile exceeds the limit.

  Returns:
    (number of steps, number of tiles in a step).
  """
  if isinstance(batch, int):
    scores *= batch
  most_tiles = max(1, limit // scores)
  num_steps = -(-num_tiles // most_tiles)
  return num_steps, -(-num_tiles // num_steps)


class _Steps(online_softmax.TileLoop):
  """The loop over query tiles; a step has A of them, with all their keys.

  Arrays of keys are gathered once, at the positions `at`. Arrays of queries are
  gathered in each step, because a query may have several places.
  """

  name = "gathered"
  single = True
  # [B, H, ...], positions of keys as they are arranged, -1 for none
  at: jax.Array

  def __init__(self, plan, queries, keys, platform, num_keys):
    self.pattern = plan.pattern
    self.tables = plan.tables
    self.platform = platform
    self.length = keys.k.shape[1]
    self.group = queries.q.shape[2] // keys.k.shape[2]

    batch, num_heads, num_tiles, self.tile = self.tables.queries.shape
    scores_of_tile = self.tile * num_keys
    # number of scores per sequence and head
    self.scores = num_tiles * scores_of_tile
    self.num, self.size = cut(
      num_tiles,
      batch,
      num_heads * scores_of_tile,
      limit=CPU_SCORES if platform == "cpu" else SCORES,
    )

    # The last step is padded with tiles without queries.
    self.missing = self.num * self.size - num_tiles
    self.rows = _pad_tiles(self.tables.queries, 0, self.missing, -1)

  @abc.abstractmethod
  def take(self, i, x):
    """Takes the keys of a step's tiles from x: [B, H, A, S, ...]."""

  def arrange_keys(self, arrays):
    return _rows(self.at, arrays)

  def restore_queries(self, arrays):
    return _sum_places(self.tables.places, arrays)

  def sum_group(self, x_BLHK):
    """Sums gradients over the query heads of each KV head: [B, L, G, K]."""
    batch, n, num_heads, width = x_BLHK.shape
    num_key_heads = num_heads // self.group
    return x_BLHK.reshape(batch, n, num_key_heads, -1, width).sum(3)

  def merge(self, out_BHVTE, lse_BHVT):
    """Merges the results at the places of each query: (out_BLHE, lse_BLH)."""

    def merge_head(out_VTE, lse_VT, places_LR):
      outs = _at_places(out_VTE, places_LR, 0)
      lses = _at_places(lse_VT, places_LR, -jnp.inf)
      return online_softmax.merge(list(zip(outs, lses, strict=True)))

    merge_heads = jax.vmap(jax.vmap(merge_head, out_axes=1))
    return merge_heads(out_BHVTE, lse_BHVT, self.tables.places)

  def queries(self, i, arrays):
    return _rows(self._now(self.rows, i), arrays)

  def keys(self, i, j, arrays):
    return jax.tree.map(lambda x: self.take(i, x), arrays)

  def positions(self, i, j):
    return self._now(self.rows, i), self.take(i, self.at)

  def shape(self, q):
    batch, _, num_heads, _ = q.shape
    return batch, num_heads, self.num * self.size, self.tile

  def put(self, i, x_BHVT, new_BHAT):
    first = i * self.size
    return lax.dynamic_update_slice_in_dim(x_BHVT, new_BHAT, first, 2)

  def _now(self, x_BHV, i, more=0):
    """Returns the tiles of step i, and `more` tiles after them."""
    first = i * self.size
    return lax.dynamic_slice_in_dim(x_BHV, first, self.size + more, 2)


class _Windows(_Steps):
  """Steps in which each tile of queries meets a window of keys."""

  def __init__(self, plan, queries, keys, platform):
    self.span = plan.tables.span
    self.behind = self.span - 1  # in tiles
    num_keys = self.span * plan.tile
    super().__init__(plan, queries, keys, platform, num_keys)
    at = self.tables.keys
    batch, num_heads, _ = at.shape
    at = at.reshape(batch, num_heads, -1, self.tile)
    self.at = _pad_tiles(at, 0, self.missing, -1)

  def take(self, i, x_BHVT):
    # The windows of neighboring tiles share keys. Each key tile is read once,
    # and copied `span` times.
    tiles = self._now(x_BHVT, i, self.behind)
    windows = [tiles[:, :, c : c + self.size] for c in range(self.span)]
    return jnp.concatenate(windows, 3)

  def add(self, i, j, x_BHVT, new_BHAS):
    # This is the transpose of `take`: it adds up the gradients of a key tile
    # from all windows that contain it.
    tiles = self._now(x_BHVT, i, self.behind)
    for c, new in enumerate(jnp.split(new_BHAS, self.span, 3)):
      tiles = tiles + _pad_tiles(new, c, self.behind - c)
    return self.put(i, x_BHVT, tiles)

  def restore_keys(self, arrays):
    places = self.tables.places + self.behind * self.tile
    sums = _sum_places(places, arrays)
    return jax.tree.map(self.sum_group, sums)


class _Blocks(_Steps):
  """Steps in which each tile of queries meets one block of keys."""

  def __init__(self, plan, queries, keys, platform):
    """Splits the keys into blocks, and pads the tiles to whole steps."""
    at = plan.tables.keys
    batch, num_heads, num_keys = at.shape
    self.num_blocks = plan.tables.num_blocks
    size = num_keys // self.num_blocks
    super().__init__(plan, queries, keys, platform, size)
    # The positions of the keys of each block.
    self.at = at.reshape(batch, num_heads, self.num_blocks, size)
    # The block of each tile. Padding gets the index after the last block, which
    # `take` clips, and whose gradients `add` drops.
    self.blocks = _pad_tiles(
      self.tables.blocks,
      before=0,
      after=self.missing,
      fill=self.num_blocks,
    )

  def take(self, i, x_BHM):
    at = self._now(self.blocks, i)

    def take_head(x_M, at):
      return x_M.at[at].get(mode="clip")

    return _for_heads(take_head)(x_BHM, at)

  def add(self, i, j, x_BHM, new_BHAS):
    at = self._now(self.blocks, i)

    # A scatter on a CPU adds values for the same index one after another, in a
    # fixed order. Other platforms may use any order, unless indices are unique.
    is_unique = self.platform != "cpu"
    if is_unique:
      at, new_BHAS = self._sum_runs(at, new_BHAS)

    def add_head(x_M, at, new):
      return x_M.at[at].add(new, mode="drop", unique_indices=is_unique)

    return _for_heads(add_head)(x_BHM, at, new_BHAS)

  def _sum_runs(self, at, new_BHAS):
    """Sums the tiles that met the same block, so that indices are unique."""
    # The tiles of a block are adjacent. Sums over the last 1, 2, 4, ... tiles
    # are computed in turn, so that the last tile of a block gets the sum over
    # all. The other tiles are then dropped.
    length = 1
    while length < self.size:
      later_at = at[..., length:]
      is_same = later_at == at[..., :-length]
      is_same = is_same[..., None, None]
      earlier = new_BHAS[:, :, :-length]
      added = jnp.where(is_same, earlier, 0)
      new_BHAS = new_BHAS + _pad_tiles(added, length)
      length *= 2

    is_last = at[..., 1:] != at[..., :-1]
    is_last = _pad_tiles(
      is_last,
      before=0,
      after=1,
      fill=True,
    )

    # Indices past the end are dropped. They must differ from each other,
    # because all indices are declared to be unique.
    is_block = at < self.num_blocks
    number = jnp.arange(self.size, dtype=at.dtype)
    nowhere = self.num_blocks + number[None, None]
    at = jnp.where(is_last & is_block, at, nowhere)
    return at, new_BHAS

  def restore_keys(self, arrays):
    def restore(x_BHM):
      batch, num_heads, _, _, width = x_BHM.shape
      rows = x_BHM.reshape(batch, num_heads, -1, width)
      rows = rows[:, :, : self.length]
      return self.sum_group(rows.swapaxes(1, 2))

    return jax.tree.map(restore, arrays)


def _pad_tiles(x_BHV, before, after=0, fill=0):
  """Pads x with tiles before and after, which are filled with a number."""
  other_axes = [(0, 0)] * (x_BHV.ndim - 3)
  pads = [(0, 0), (0, 0), (before, after), *other_axes]
  return jnp.pad(x_BHV, pads, constant_values=fill)


def _for_heads(function):
  """Maps a function over sequences and heads, the first two axes of arrays."""
  return jax.vmap(jax.vmap(function))


def _rows(at, arrays):
  """Gathers rows of arrays [B, L, G, K] at positions `at`, [B, H, ...].

  The results have shape [B, H, ..., K]. Rows at position -1 are arbitrary.
  """
  num_heads = at.shape[1]

  def take(x_LK, at):
    return x_LK.at[at.clip(0)].get(mode="clip")

  take_heads = jax.vmap(jax.vmap(take, (1, 0)))

  def take_rows(x_BLG):
    x_BLH = jnp.repeat(x_BLG, num_heads // x_BLG.shape[2], axis=2)
    return take_heads(x_BLH, at)

  return jax.tree.map(take_rows, arrays)


def _sum_places(places_BHLR, arrays):
  """Sums [B, H, V, T, K] over the places of each position: [B, L, H, K]."""

  def sum_head(x_VTK, places_LR):
    rows = _at_places(x_VTK, places_LR, 0)
    return functools.reduce(jnp.add, rows)

  sum_heads = jax.vmap(jax.vmap(sum_head, out_axes=1))
  return jax.tree.map(lambda x: sum_heads(x, places_BHLR), arrays)


def _at_places(x_VT, places_LR, fill):
  """Returns R arrays; array r has the row at place r of each position.

  A position that has no place r gets `fill`.
  """
  num_places = x_VT.shape[0] * x_VT.shape[1]
  x_P = x_VT.reshape((num_places,) + x_VT.shape[2:])
  return [
    x_P.at[places_L].get(mode="fill", fill_value=fill)
    for places_L in places_LR.T
  ]
