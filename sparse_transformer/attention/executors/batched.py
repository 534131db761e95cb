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
from sparse_transformer.attention.heads import patterns_of_units
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

  # A unit is the query heads of a key head or, if their patterns differ, some
  # of them.
  units: contract.Table  # [groups, members], of units with the same pattern
  places: contract.Table  # [2, U], the group and the member that each unit is
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
  tile, units = tile_size(patterns[0], case), patterns_of_units(patterns, case)
  return [(_plan(units, case.length, tile), None)]


@functools.lru_cache(maxsize=64)
def _plan(patterns, n, tile):
  units = _groups(patterns)
  distinct = tuple(patterns[first] for first in units[:, 0])
  work = worklists.make_work(distinct, n, tile)
  (tables,) = _tables_of([work], units)
  return contract.Plan(None, tile, tables)


def shares(
  part: Pattern, layouts: Sequence[Layout], case: contract.Case
) -> list[Tables]:
  """The tables with which devices share a part, all of the same shapes."""
  works = worklists.make_shares(part, layouts, num_heads=1)
  return _tables_of(works, _groups((part,) * (case.num_heads // case.group)))


def _tables_of(
  works: Sequence[worklists.Work], units: np.ndarray
) -> list[Tables]:
  """Tables of the same shapes, for works of groups of units."""
  places = np.zeros((2, units.size), np.int32)
  places[:, units] = np.indices(units.shape)
  by_query = _sweeps_of([(w.by_query, w.queries) for w in works])
  by_key = _sweeps_of([(w.by_key, w.keys) for w in works])
  return [
    Tables(units, places, w.queries, w.keys, *sweeps)
    for w, *sweeps in zip(works, by_query, by_key, strict=True)
  ]


def _groups(patterns):
  """Groups of units with the same pattern, all of one size: [groups, size]."""
  units: dict[Pattern, list[int]] = {}
  for unit, pattern in enumerate(patterns):
    units.setdefault(pattern, []).append(unit)
  size = math.gcd(*map(len, units.values()))
  return np.concatenate([*units.values()]).reshape(-1, size).astype(np.int32)


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
  plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
) -> tuple[jax.Array, jax.Array]:
  """See `contract.Executor`."""
  tables, scores = plan.tables, plan.scores

  def process(mine, others, pairs):
    q = mine.q * scale(mine.q, scores)
    return online_softmax.finish(
      *softmax_of_tile(q, others, (pairs, None), scores)
    )

  out, lse = _run(
    tables,
    tables.by_query,
    (tables.queries, queries),
    (tables.keys, keys),
    (keys.v.shape[-1], 1),
    process,
  )
  out_SBLHE = _slots(tables, tables.by_query, out, 0)
  lse_SBLH = _slots(tables, tables.by_query, lse, -jnp.inf)
  shape = queries.q.shape[:3]
  results = zip(out_SBLHE, lse_SBLH, strict=True)
  return online_softmax.merge(
    *((out.reshape(*shape, -1), lse.reshape(shape)) for out, lse in results)
  )


def backward(
  plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
) -> tuple[jax.Array, ...]:
  """See `contract.Executor`."""
  tables, scores = plan.tables, plan.scores
  of_queries, of_keys = (tables.queries, queries), (tables.keys, keys)

  def of_query(mine, others, pairs):
    lse, delta = mine.lse[..., None], mine.delta[..., None]
    of_mine = mine.q * scale(mine.q, scores), mine.dout
    _, dp, slope = weights_and_gradients(
      of_mine, others[:2], lse, delta, pairs, scores
    )
    factor = scale_of_scores(mine.q, scores)
    ds = (dp * slope * factor).astype(others.k.dtype)
    dq = dot("bahts,bahsk->bahtk", ds, others.k)
    return (dq * scale(mine.q, scores),)

  def of_key(mine, others, pairs):
    lse, delta = others.lse[..., None, :], others.delta[..., None, :]
    q, dout = others.q * scale(others.q, scores), others.dout
    p, dp, slope = weights_and_gradients(
      mine[:2], (q, dout), lse, delta, pairs, scores
    )
    ds = (dp * slope * scale_of_scores(q, scores)).astype(q.dtype)
    dk = dot("bahts,bahsk->bahtk", ds, q)
    return dk, dot("bahts,bahse->bahte", p.astype(dout.dtype), dout)

  k, e = (x.shape[-1] for x in keys[:2])
  (dq,) = _run(tables, tables.by_query, of_queries, of_keys, (k,), of_query)
  dk_dv = _run(tables, tables.by_key, of_keys, of_queries, (k, e), of_key)
  (dq_BLUK,) = _sum_slots(tables, tables.by_query, dq)
  sums = _sum_slots(tables, tables.by_key, *dk_dv)
  shape = *keys.k.shape[:3], -1  # the units of a key head follow each other
  grads = (x.reshape(*shape, x.shape[-1]).sum(3) for x in sums)
  return dq_BLUK.reshape(queries.q.shape), *grads


def _sum_slots(tables, sweep, *results):
  return [_slots(tables, sweep, x, 0).sum(0) for x in results]


# Positions in tiles, and `Queries` or `Keys`.
Side = tuple[contract.Table, Any]


def _run(
  tables: Tables,
  sweep: Sweep,
  mine: Side,
  other: Side,
  widths: tuple[int, ...],
  process: Callable,
) -> tuple[jax.Array, ...]:
  """Runs process(rows of this side, rows of the other, pairs) on all lists.

  T = positions in a tile, S = those in a list, A = lanes, M = units in a group,
  R = heads in a unit: 1 for keys. `process` gets arrays [B, A, M, R T, ...],
  arrays [B, A, M, R S, ...] and pairs, bool [B or 1, A, 1, R T, R S]. Its
  results [B, A, M, R T, width] are returned as [B, lanes of all loops, T, M,
  R width], float32 or wider.
  """
  (_, tile), x_BLH = mine[0].shape, mine[1][0]
  num_lanes = max(1, sum(loop.tiles.size for loop in sweep.loops))
  heads = [side[1][0].shape[2] // tables.units.size for side in (mine, other)]
  rows, columns = (max(1, num) for num in heads)
  shape = x_BLH.shape[0], num_lanes, tile, tables.units.shape[1]
  dtype = jnp.promote_types(x_BLH.dtype, jnp.float32)
  done = tuple(jnp.zeros_like(x_BLH, dtype, (*shape, rows * w)) for w in widths)

  def step(given, done, now):
    (units_GM, masks, mine, other), (lane, loop) = given, now
    units_AM = units_GM[loop.groups]
    mine = _gather(mine, loop.tiles[:, None], units_GM, units_AM, rows)
    other = _gather(other, loop.others, units_GM, units_AM, columns)
    pairs = _unpack(masks[loop.masks])[None, :, None]
    pairs = jnp.tile(pairs, (1, 1, 1, rows, columns))
    new = process(
      mine,
      other,
      online_softmax.within_segments(pairs, mine.segments, other.segments),
    )
    new = (_by_place(x, rows) for x in new)
    return tuple(
      lax.dynamic_update_slice_in_dim(x, y, lane, 1)
      for x, y in zip(done, new, strict=True)
    ), None

  lane, given = 0, (tables.units, sweep.masks, mine, other)
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


def _by_place(x_BAMT, rows):
  """[B, A, T, M, R width] from [B, A, M, R T, width]."""
  b, a, m, _, width = x_BAMT.shape
  x_BAMRTW = x_BAMT.reshape(b, a, m, rows, -1, width)
  return x_BAMRTW.transpose(0, 1, 4, 2, 3, 5).reshape(b, a, -1, m, rows * width)


def _gather(side, tiles_AC, units_GM, units_AM, num):
  """The rows of tiles: arrays [B, A, M, R S, ...]; padding is unspecified.

  `num` is R, the number of heads in a unit.
  """
  positions, arrays = side
  rows_AS = positions[tiles_AC].clip(0).reshape(len(tiles_AC), -1)

  def of_array(x_BLH):
    if x_BLH.ndim == 3 and x_BLH.shape[2] == 1:  # the same for all heads
      return jnp.tile(x_BLH[:, rows_AS, 0][:, :, None], (1, 1, 1, num))
    x_BLUR = x_BLH.reshape(*x_BLH.shape[:2], -1, num, *x_BLH.shape[3:])
    index: tuple[jax.Array, ...] = (rows_AS,)
    if len(units_GM) > 1:  # otherwise, heads may be divided over devices
      # A key head may be that of several units.
      at = units_AM[:, None] * x_BLUR.shape[2] // units_GM.size
      index = rows_AS[:, :, None], at
    x_BAMRS = jnp.moveaxis(x_BLUR[:, *index], 2, 4)
    return x_BAMRS.reshape(*x_BAMRS.shape[:3], -1, *x_BAMRS.shape[5:])

  # Otherwise the compiler gathers once for each product that transposes.
  return lax.optimization_barrier(jax.tree.map(of_array, arrays))


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
    if len(tables.units) > 1:
      group_U, member_U = jnp.asarray(tables.places)
      index = rows_LG[:, group_U], member_U[None]
    return x.at[:, *index].get(mode="fill", fill_value=fill)

  return jnp.stack([of_slot(rows_LG) for rows_LG in rows_SLG])
