"""Runs sets of pairs whose tiles are found at run time, in plain XLA.

Tiles of queries are gathered by position, each with all its keys in one step.
What goes to the same place is added in a fixed order.

Axes: V tiles of queries, of T places; A tiles processed together; S keys of a
tile; P places of all tiles; R places of a query.
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
from sparse_transformer.attention.content.grouping import group
from sparse_transformer.patterns import Pattern
from sparse_transformer.patterns.content import Chosen, Near

TILE = 64  # positions
# Scores of a step, over all heads: on CPUs, they should stay in cache.
CPU_SCORES, SCORES = 75_000, 2**25


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TileTables:
  """The tables of one set."""

  queries: jax.Array  # int32 [B, H, V, T], positions, -1 for none
  keys: jax.Array  # int32 [B, H, P], the same of keys, in whole tiles
  # int32 [B, H, V], the tile of keys of each tile of queries, out of range for
  # none; None where tile v has those from v to v + span - 1.
  blocks: jax.Array | None
  # int32 [B, H, L, R], the places of each query, V * T for none, which is
  # padding or out of range.
  places: jax.Array
  span: int = dataclasses.field(default=1, metadata=contract.STATIC)
  # Tiles of keys, if `blocks` are given.
  num_blocks: int = dataclasses.field(default=0, metadata=contract.STATIC)

  @property
  def steps(self) -> type["_Steps"]:
    """The class of the steps of a plan with these tables."""
    return _Windows if self.blocks is None else _Blocks


# Here, since patterns load no JAX.
jax.tree_util.register_dataclass(
  Near, ["order", "as_query", "as_key"], ["window", "reach"]
)
jax.tree_util.register_dataclass(Chosen, ["blocks"], ["size"])


def lay_out(pairs: Near | Chosen, tile: int) -> TileTables:
  """The tables of a set; `tile` positions on a side, 0 for the default."""
  if isinstance(pairs, Near):
    return _lay_out_near(pairs, min(tile or TILE, pairs.order.shape[2]))
  return _lay_out_chosen(pairs, min(tile or TILE, pairs.blocks.shape[2]))


def _lay_out_near(pairs, tile):
  b, h, n = pairs.order.shape
  span = min(1 + -(-pairs.reach // tile), -(-n // tile))
  behind = (span - 1) * tile
  keys = _pad_tiles(pairs.order, behind, -n % tile, -1)
  at = jnp.arange(n, dtype=jnp.int32)
  invert = lambda order: jnp.zeros_like(at).at[order].set(at)
  places = _of_heads(invert, pairs.order)
  queries = keys[..., behind:].reshape(b, h, -1, tile)
  return TileTables(queries, keys, None, places[..., None], span)


def _lay_out_chosen(pairs, tile):
  b, h, n, num = pairs.blocks.shape
  size = min(pairs.size, n)
  num_blocks = -(-n // size)
  labels = jnp.where(pairs.blocks < 0, num_blocks, pairs.blocks)
  groups = group(labels.reshape(b * h, n * num), num_blocks, tile)
  entries = groups.entries.reshape(b, h, -1, tile)
  at = jnp.arange(num_blocks * size, dtype=jnp.int32)
  return TileTables(
    jnp.where(entries < 0, -1, entries // num),
    jnp.broadcast_to(jnp.where(at < n, at, -1), (b, h, len(at))),
    groups.labels.reshape(b, h, -1),
    groups.slots.reshape(b, h, n, num),
    num_blocks=num_blocks,
  )


def plan_part(
  part: Pattern, known: Mapping[Pattern, TileTables]
) -> contract.Plan:
  """The plan of a bound part, with the `known` tables of its set."""

  def find(part):
    """(the set, the mask applied within its tiles)."""
    if isinstance(part, Near | Chosen):
      return part, part.within_tiles()
    pairs, left = find(part.left)
    return pairs, dataclasses.replace(part, left=left)

  pairs, condition = find(part)
  tables = known[pairs]
  return contract.Plan(condition, tables.queries.shape[-1], tables)


@dataclasses.dataclass(frozen=True)
class FoundTiles:
  """Runs plans whose tables are found at run time, here or in `spans`."""

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
  """(steps, tiles of a step) for at most `limit` scores in a step.

  `scores` are those of a tile in one of `batch` sequences. A symbolic number
  of sequences, as `jax.export` may have, counts as 1.
  """
  if isinstance(batch, int):
    scores *= batch
  num = -(-num_tiles // max(1, limit // scores))
  return num, -(-num_tiles // num)


class _Steps(online_softmax.TileLoop):
  """Tables, cut into steps of A tiles of queries each, with all their keys."""

  name, single = "gathered", True
  at: jax.Array  # [B, H, ...], positions in the order of keys, -1 for none

  def __init__(self, plan, queries, keys, platform, num_keys):
    self.pattern = plan.pattern
    self.tables = plan.tables
    self.platform = platform
    self.length = keys.k.shape[1]
    self.group = queries.q.shape[2] // keys.k.shape[2]
    b, h, num_tiles, self.tile = self.tables.queries.shape
    of_tile = self.tile * num_keys
    self.scores = num_tiles * of_tile  # per sequence and head
    limit = CPU_SCORES if platform == "cpu" else SCORES
    self.num, self.size = cut(num_tiles, b, h * of_tile, limit)
    self.missing = self.num * self.size - num_tiles
    self.rows = _pad_tiles(self.tables.queries, 0, self.missing, -1)

  @abc.abstractmethod
  def take(self, i, x):
    """x, in the order of keys, for the tiles of a step: [B, H, A, S, ...]."""

  def arrange_keys(self, *arrays):
    return _rows(self.at, *arrays)

  def restore_queries(self, *arrays):
    return _sum(self.tables.places, *arrays)

  def of_group(self, x_BLHK):
    """Gradients of key heads [B, L, G, K], from each query head's."""
    b, n, h, width = x_BLHK.shape
    num_key_heads = h // self.group
    return x_BLHK.reshape(b, n, num_key_heads, -1, width).sum(3)

  def merge(self, out_BHVTE, lse_BHVT):
    """(out_BLHE, lse_BLH): the results at the places of each query, merged."""

    def of_head(out_VTE, lse_VT, places_LR):
      outs = _at_places(out_VTE, places_LR, 0)
      lses = _at_places(lse_VT, places_LR, -jnp.inf)
      return online_softmax.merge(*zip(outs, lses, strict=True))

    of_heads = jax.vmap(jax.vmap(of_head, out_axes=1))
    return of_heads(out_BHVTE, lse_BHVT, self.tables.places)

  def queries(self, i, *arrays):
    return _rows(self._now(self.rows, i), *arrays)

  def keys(self, i, j, *arrays):
    return tuple(self.take(i, x) for x in arrays)

  def pairs(self, i, j):
    q_at, k_at = self._now(self.rows, i), self.take(i, self.at)
    return online_softmax.pairs(self.pattern, q_at, k_at), None

  def shape(self, q):
    b, _, h, _ = q.shape
    return b, h, self.num * self.size, self.tile

  def put(self, i, x_BHVT, new_BHAT):
    return lax.dynamic_update_slice_in_dim(x_BHVT, new_BHAT, i * self.size, 2)

  def _now(self, x_BHV, i, more=0):
    """The tiles of a step, and `more` after them."""
    return lax.dynamic_slice_in_dim(x_BHV, i * self.size, self.size + more, 2)


class _Windows(_Steps):
  """Steps in which each tile of queries has the keys of a window."""

  def __init__(self, plan, queries, keys, platform):
    num_keys = plan.tables.span * plan.tile
    super().__init__(plan, queries, keys, platform, num_keys)
    b, h, _ = self.tables.keys.shape
    tiles = self.tables.keys.reshape(b, h, -1, self.tile)
    self.at = _pad_tiles(tiles, 0, self.missing, -1)
    self.behind = self.tables.span - 1  # tiles

  def take(self, i, x_BHVT):
    tiles = self._now(x_BHVT, i, self.behind)
    windows = [tiles[:, :, c : c + self.size] for c in range(self.tables.span)]
    return jnp.concatenate(windows, 3)

  def add(self, i, j, x_BHVT, new_BHAS):
    tiles = self._now(x_BHVT, i, self.behind)
    for c, new in enumerate(jnp.split(new_BHAS, self.tables.span, 3)):
      tiles = tiles + _pad_tiles(new, c, self.behind - c)
    return self.put(i, x_BHVT, tiles)

  def restore_keys(self, *arrays):
    places = self.tables.places + self.behind * self.tile
    return tuple(map(self.of_group, _sum(places, *arrays)))


class _Blocks(_Steps):
  """Steps in which each tile of queries has one block of keys."""

  def __init__(self, plan, queries, keys, platform):
    (b, h, num), num_blocks = plan.tables.keys.shape, plan.tables.num_blocks
    super().__init__(plan, queries, keys, platform, num // num_blocks)
    self.blocks = _pad_tiles(self.tables.blocks, 0, self.missing, num_blocks)
    self.at = self.tables.keys.reshape(b, h, num_blocks, -1)

  def take(self, i, x_BHM):
    at = self._now(self.blocks, i)
    return _of_heads(lambda x_M, at: x_M.at[at].get(mode="clip"), x_BHM, at)

  def add(self, i, j, x_BHM, new_BHAS):
    # A CPU adds values for the same place one after another.
    at, is_unique = self._now(self.blocks, i), self.platform != "cpu"
    if is_unique:
      at, new_BHAS = self._sum_runs(at, new_BHAS)

    def of_head(x_M, at, new):
      return x_M.at[at].add(new, mode="drop", unique_indices=is_unique)

    return _of_heads(of_head, x_BHM, at, new_BHAS)

  def _sum_runs(self, at, new_BHAS):
    """Each block once, with the sum over all its tiles in a step."""
    # The tiles of a block are neighbors. Sums of the last 1, 2, 4, ... tiles
    # end up at the last one, and all others nowhere.
    length = 1
    while length < self.size:
      same = at[..., length:] == at[..., :-length]
      before = jnp.where(same[..., None, None], new_BHAS[:, :, :-length], 0)
      new_BHAS = new_BHAS + _pad_tiles(before, length)
      length *= 2
    is_last = _pad_tiles(at[..., 1:] != at[..., :-1], 0, 1, True)
    is_block = is_last & (at < self.tables.num_blocks)
    nowhere = self.tables.num_blocks + jnp.arange(self.size, dtype=at.dtype)
    return jnp.where(is_block, at, nowhere[None, None]), new_BHAS

  def restore_keys(self, *arrays):
    rows = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in arrays)
    held = (x[:, :, : self.length].swapaxes(1, 2) for x in rows)
    return tuple(map(self.of_group, held))


def _pad_tiles(x_BHV, before, after=0, fill=0):
  pads = [(0, 0), (0, 0), (before, after), *[(0, 0)] * (x_BHV.ndim - 3)]
  return jnp.pad(x_BHV, pads, constant_values=fill)


def _of_heads(function, *arrays):
  """function(*arrays) for each sequence and head, their first two axes."""
  return jax.vmap(jax.vmap(function))(*arrays)


def _rows(at, *arrays):
  """Rows [B, H, ..., K] of [B, L, G, K] at [B, H, ...], arbitrary for -1."""
  take = lambda x_L, at: x_L.at[at.clip(0)].get(mode="clip")

  def of_array(x_BLG):
    x_BLH = jnp.repeat(x_BLG, at.shape[1] // x_BLG.shape[2], axis=2)
    return jax.vmap(jax.vmap(take, (1, 0)))(x_BLH, at)

  return tuple(map(of_array, arrays))


def _sum(places_BHLR, *arrays):
  """[B, L, H, K]: sums of [B, H, V, T, K] over the places of each position."""

  def of_head(x_VTK, places_LR):
    return functools.reduce(jnp.add, _at_places(x_VTK, places_LR, 0))

  of_heads = jax.vmap(jax.vmap(of_head, out_axes=1))
  return tuple(of_heads(x, places_BHLR) for x in arrays)


def _at_places(x_VT, places_LR, fill):
  """For the first place of each position, the second, ...: rows, or `fill`."""
  x_P = x_VT.reshape(-1, *x_VT.shape[2:])
  return [x_P.at[p].get(mode="fill", fill_value=fill) for p in places_LR.T]
