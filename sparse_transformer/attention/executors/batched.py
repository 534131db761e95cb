"""The executor for any accelerator, in plain XLA: few, large batched products.

A list names the tiles of keys of one tile of queries, or the reverse. Lists of
similar length run together: a step gathers the tiles of many lists by position
and computes their entire softmax, or their gradients, in batched products. A
loop over steps bounds memory; lists that fit one step, as in local and block
attention, need none.

Every list runs within one step and in one lane: nothing is summed across lanes,
so no two lanes write to the same place and the result does not depend on
timing. Queries have their lists for the forward pass and dq, keys theirs for
dk and dv.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract, online_softmax
from sparse_transformer.attention.executors import worklists
from sparse_transformer.attention.online_softmax import (
  dot,
  scale,
  scale_of_scores,
  softmax_of_tile,
  weights_and_gradients,
)
from sparse_transformer.patterns import Layout, Pattern

TILE = 128  # positions: a side of the matrix units of GPUs and TPUs
# The most scores that a step computes, per position and head.
SCORES = 256
# Cost of one more step, as a share of a full one, and of one more loop, as a
# share of all tiles.
STEP_COST, LOOP_COST = 1 / 4, 1 / 32
NOWHERE = np.iinfo(np.int32).max  # out of bounds: read as a fill value


class Loop(NamedTuple):
  """Lists of similar length, one in each lane of each step: int32."""

  groups: contract.Table  # [steps, lanes], the group of heads of the list
  tiles: contract.Table  # [steps, lanes], the tile of this side it belongs to
  others: contract.Table  # [steps, lanes, span], the tiles in the list
  masks: contract.Table  # [steps, lanes, span], the mask of each of them


class Sweep(NamedTuple):
  """All lists of one side."""

  loops: tuple[Loop, ...]  # the lists, in the order of their results
  # int32 [masks, tile, words], see `worklists.Lists`; the last two are those of
  # a full tile and of one without pairs.
  masks: contract.Table
  # int32 [slots, n, groups], where among the results each slot has its row,
  # `NOWHERE` for none.
  rows: contract.Table


class Tables(NamedTuple):
  """The tables of a plan: int32."""

  heads: contract.Table  # [groups, members], of heads with the same pattern
  places: contract.Table  # [2, H], the group and the member that each head is
  queries: contract.Table  # [tiles, tile], see `worklists.Work`
  keys: contract.Table
  by_query: Sweep  # the lists of queries
  by_key: Sweep  # the lists of keys


unsupported = contract.nothing_unsupported


def tile_size(part: Pattern, case: contract.Case) -> int:
  """See `contract.Executor`."""
  del part
  return min(case.tile or TILE, case.length)


def plans(patterns: tuple[Pattern, ...], case: contract.Case) -> contract.Plans:
  """One plan for all heads."""
  tile = tile_size(patterns[0], case)
  return [(_plan(patterns, case.length, tile), None)]


@functools.lru_cache(maxsize=64)
def _plan(patterns, n, tile):
  heads = _groups(patterns)
  distinct = tuple(patterns[first] for first in heads[:, 0])
  work = worklists.make_work(distinct, n, tile)
  (tables,) = _tables_of([work], heads)
  return contract.Plan(None, tile, tables)


def shares(
  part: Pattern, layouts: Sequence[Layout], num_heads: int
) -> list[Tables]:
  """The tables with which devices share a part, all of the same shapes."""
  works = worklists.make_shares(part, layouts, num_heads=1)
  return _tables_of(works, _groups((part,) * num_heads))


def _tables_of(
  works: Sequence[worklists.Work], heads: np.ndarray
) -> list[Tables]:
  """Tables of the same shapes, for works of groups of heads."""
  places = np.zeros((2, heads.size), np.int32)
  places[:, heads] = np.indices(heads.shape)
  by_query = _sweeps_of([(w.by_query, w.queries) for w in works])
  by_key = _sweeps_of([(w.by_key, w.keys) for w in works])
  return [
    Tables(heads, places, w.queries, w.keys, *sweeps)
    for w, *sweeps in zip(works, by_query, by_key, strict=True)
  ]


def _groups(patterns):
  """Groups of heads with the same pattern, all of one size: [groups, size]."""
  heads: dict[Pattern, list[int]] = {}
  for head, pattern in enumerate(patterns):
    heads.setdefault(pattern, []).append(head)
  size = math.gcd(*map(len, heads.values()))
  return np.concatenate([*heads.values()]).reshape(-1, size).astype(np.int32)


def _sweeps_of(sides):
  """The sweeps of several (lists, positions), of the same shapes."""
  items = [np.asarray(lists.items) for lists, _ in sides]
  items = [x[x[:, 2] < x[:, 4]] for x in items]  # the others have no pairs
  # Lists are longest first: at each place, the longest of all sides.
  counts = np.zeros(max(map(len, items)), int)
  for x in items:
    counts[: len(x)] = np.maximum(counts[: len(x)], x[:, 4] - x[:, 2])
  (_, n, num_groups), tile = sides[0][0].written.shape, sides[0][1].shape[1]
  room = num_groups * -(-n // tile) * max(1, SCORES // tile)  # tiles of a step
  cuts = [(first, last, counts[first]) for first, last in _cut(counts, room)]
  return [
    _sweep_of(lists, at, x, cuts, room)
    for (lists, at), x in zip(sides, items, strict=True)
  ]


def _sweep_of(lists, positions, items, cuts, room):
  """The sweep of one side, from cuts (first, last, span) of its items."""
  (_, n, num_groups), tile = lists.written.shape, positions.shape[1]
  rows = np.full((len(lists.written), n + 1, num_groups), NOWHERE, np.int32)
  loops, lane = [], 0
  for first, last, span in cuts:
    groups, tiles, _, _, _, slots = items[first:last].T
    results = tile * (lane + np.arange(len(tiles)))[:, None]
    here = slots[:, None], positions[tiles], groups[:, None]
    rows[here] = results + np.arange(tile)
    loops.append(_loop(lists, items[first:last], last - first, span, room))
    lane += loops[-1].tiles.size
  words = np.asarray(lists.masks)
  every = np.full_like(words[:1], -1)
  masks = np.concatenate([words, every, ~every])
  return Sweep(tuple(loops), masks, rows[:, :n])


def _cut(counts, room):
  """Decides which lists, longest first, run together: (first, last)."""
  # They are padded to the longest of their loop. The cheapest cuts are found by
  # dynamic programming, over lengths that differ by a twelfth.
  starts = np.flatnonzero(np.diff(np.ceil(8 * np.log2(counts)), prepend=-1))
  ends = np.append(starts[1:], len(counts))
  # The least cost of the lists from each start on, and where the loop ends.
  best = np.zeros(len(starts) + 1)
  choice = np.zeros(len(starts), int)
  for i in reversed(range(len(starts))):
    span, sizes = counts[starts[i]], ends[i:] - starts[i]
    steps = _num_steps(sizes, span, room)
    costs = span * sizes + STEP_COST * room * steps + best[i + 1 :]
    choice[i] = i + costs.argmin()
    best[i] = costs.min() + LOOP_COST * counts.sum()
  i = 0
  while i < len(starts):
    yield starts[i], ends[choice[i]]
    i = choice[i] + 1


def _num_steps(size, span, room):
  """Number of steps that `size` lists of at most `span` tiles take."""
  return -(-size // max(1, room // span))


def _loop(lists, items, size, span, room):
  """A loop over items, padded to `size` lists of `span` tiles."""
  num_steps = _num_steps(size, span, room)
  num_lanes = -(-size // num_steps)
  index = items[:, 2, None] + np.arange(span)
  is_partial, is_real = index < items[:, 3, None], index < items[:, 4, None]
  found = np.asarray(lists.others)[np.where(is_real, index, 0)]
  every = len(lists.masks)
  masks = np.where(is_partial, found[..., 1], every)
  masks = np.where(is_real, masks, every + 1)

  def table(values, idle):
    padded = np.full((num_steps * num_lanes, *values.shape[1:]), idle, np.int32)
    padded[: len(values)] = values
    return padded.reshape(num_steps, num_lanes, *values.shape[1:])

  return Loop(
    table(items[:, 0], 0),
    table(items[:, 1], 0),
    table(found[..., 0], 0),
    table(masks, every + 1),
  )


def forward(
  plan: contract.Plan, q_BLHK: jax.Array, k_BLHK: jax.Array, v_BLHE: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """See `contract.Executor`."""
  tables = plan.tables

  def process(query, key, pairs):
    (q,), keys = query, contract.Keys(*key)
    state = softmax_of_tile(q * scale(q), keys, (pairs, None))
    return online_softmax.finish(*state)

  out, lse = _run(
    tables,
    tables.by_query,
    (tables.queries, (q_BLHK,)),
    (tables.keys, (k_BLHK, v_BLHE)),
    (v_BLHE.shape[-1], 1),
    process,
  )
  out_SBLHE = _slots(tables, tables.by_query, out, 0)
  lse_SBLH = _slots(tables, tables.by_query, lse, -jnp.inf)[..., 0]
  return online_softmax.merge(*zip(out_SBLHE, lse_SBLH, strict=True))


def backward(
  plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
) -> tuple[jax.Array, ...]:
  """See `contract.Executor`."""
  tables = plan.tables
  of_queries, of_keys = (tables.queries, queries), (tables.keys, keys)

  def of_query(query, key, pairs):
    (q, dout, lse, delta), (k, v) = query, key
    lse, delta = lse[..., None], delta[..., None]
    mine = q * scale(q), dout
    _, ds = weights_and_gradients(mine, (k, v), lse, delta, pairs)
    ds = (ds * scale_of_scores(q)).astype(k.dtype)
    return (dot("bahts,bahsk->bahtk", ds, k) * scale(q),)

  def of_key(key, query, pairs):
    (k, v), (q, dout, lse, delta) = key, query
    lse, delta = lse[..., None, :], delta[..., None, :]
    q = q * scale(q)
    p, ds = weights_and_gradients((k, v), (q, dout), lse, delta, pairs)
    ds = (ds * scale_of_scores(q)).astype(q.dtype)
    dk = dot("bahts,bahsk->bahtk", ds, q)
    return dk, dot("bahts,bahse->bahte", p.astype(dout.dtype), dout)

  k, e = (x.shape[-1] for x in keys)
  (dq,) = _run(tables, tables.by_query, of_queries, of_keys, (k,), of_query)
  dk_dv = _run(tables, tables.by_key, of_keys, of_queries, (k, e), of_key)
  sweeps = tables.by_query, tables.by_key, tables.by_key
  found = zip(sweeps, (dq, *dk_dv), strict=True)
  return tuple(_slots(tables, *x, 0).sum(0) for x in found)


# Positions in tiles, and arrays.
Side = tuple[contract.Table, tuple[jax.Array, ...]]


def _run(
  tables: Tables,
  sweep: Sweep,
  mine: Side,
  other: Side,
  widths: tuple[int, ...],
  process: Callable,
) -> tuple[jax.Array, ...]:
  """Runs process(rows of this side, rows of the other, pairs) on all lists.

  T = positions in a tile, S = those in a list, A = lanes, M = heads in a group.
  `process` gets arrays [B, A, M, T, ...], arrays [B, A, M, S, ...] and pairs,
  bool [1, A, 1, T, S]. Its results [B, A, M, T, width] are returned as
  [B, lanes of all loops, T, M, width], float32 or wider.
  """
  (_, tile), x_BLH = mine[0].shape, mine[1][0]
  num_lanes = max(1, sum(loop.tiles.size for loop in sweep.loops))
  shape = x_BLH.shape[0], num_lanes, tile, tables.heads.shape[1]
  dtype = jnp.promote_types(x_BLH.dtype, jnp.float32)
  done = tuple(jnp.zeros_like(x_BLH, dtype, (*shape, w)) for w in widths)

  def step(given, done, now):
    (heads_GM, masks, mine, other), (lane, loop) = given, now
    heads_AM = heads_GM[loop.groups]
    new = process(
      _gather(mine, loop.tiles[:, None], heads_GM, heads_AM),
      _gather(other, loop.others, heads_GM, heads_AM),
      _unpack(masks[loop.masks])[None, :, None],
    )
    return tuple(
      lax.dynamic_update_slice_in_dim(x, y.swapaxes(2, 3), lane, 1)
      for x, y in zip(done, new, strict=True)
    ), None

  lane, given = 0, (tables.heads, sweep.masks, mine, other)
  for loop in sweep.loops:
    # The barrier makes each loop wait for the one before, so that only one of
    # them needs memory at a time. It also keeps the compiler from computing in
    # advance what depends on tables only, such as the pairs of all tiles.
    done, given, loop = lax.optimization_barrier(
      jax.tree.map(jnp.asarray, (done, given, loop))
    )
    num_steps, num_lanes = loop.tiles.shape
    if num_steps == 1:
      done, _ = step(given, done, (lane, jax.tree.map(lambda x: x[0], loop)))
    else:
      lanes = lane + num_lanes * jnp.arange(num_steps)
      done, _ = lax.scan(functools.partial(step, given), done, (lanes, loop))
    lane += loop.tiles.size
  return done


def _gather(side, tiles_AC, heads_GM, heads_AM):
  """The rows of tiles: arrays [B, A, M, S, ...]; padding is unspecified."""
  positions, arrays = side
  rows_AS = positions[tiles_AC].clip(0).reshape(len(tiles_AC), -1)
  index: tuple[jax.Array, ...] = rows_AS[:, :, None], heads_AM[:, None]
  if len(heads_GM) == 1:  # all heads, which may be divided over devices
    index = (rows_AS,)
  # Otherwise the compiler gathers once for each product that transposes.
  return lax.optimization_barrier(
    tuple(x_BLH[:, *index].swapaxes(2, 3) for x_BLH in arrays)
  )


def _unpack(words_ACTW):
  """The pairs of lists, bool [A, T, C * tile], from the masks of tiles."""
  a, c, t, _ = words_ACTW.shape
  shifts = np.arange(32, dtype=np.int32).reshape(1, 1, 1, 1, 32)
  bits = (words_ACTW[..., None] >> shifts) & 1 != 0
  pairs_ACTS = bits.reshape(a, c, t, -1)[..., :t]
  return pairs_ACTS.swapaxes(1, 2).reshape(a, t, c * t)


def _slots(tables, sweep, x, fill):
  """x_SBLH of each slot, from the results of `_run`; `fill` where unwritten."""
  x = x.reshape(x.shape[0], -1, *x.shape[3:])  # [B, rows, M, width]
  rows_SLG = jnp.asarray(sweep.rows)

  def of_slot(rows_LG):
    index: tuple[Any, ...] = rows_LG[:, 0], slice(None)
    if len(tables.heads) > 1:
      group_H, member_H = jnp.asarray(tables.places)
      index = rows_LG[:, group_H], member_H[None]
    return x.at[:, *index].get(mode="fill", fill_value=fill)

  return jnp.stack([of_slot(rows_LG) for rows_LG in rows_SLG])
