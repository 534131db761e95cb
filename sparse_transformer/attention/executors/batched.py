"""The executor for any accelerator, in plain XLA: few, large batched products.

A list names the tiles of keys of one tile of queries, or the reverse. Lists of
similar length run together: a step takes the tiles of many lists and computes
their entire softmax, or their gradients, in batched products. A loop over steps
bounds memory; lists that fit one step, as in local and block attention, need
none.

Every list runs within one step and in one lane: nothing is summed across lanes,
so no two lanes write to the same place and the result does not depend on
timing. Queries have their lists for the forward pass and dq, keys theirs for
dk and dv.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract
from sparse_transformer.attention.executors import tiles
from sparse_transformer.attention.heads import heads_of_parts
from sparse_transformer.attention.online_softmax import (
  dot,
  finish,
  scale,
  softmax_of_tile,
  weights_and_gradients,
  within_segments,
)
from sparse_transformer.attention.orders import orders_of
from sparse_transformer.patterns import Layout, Pattern

TILE = 128  # positions: a side of the matrix units of GPUs and TPUs
# The most scores that a step computes, per position and head, of all heads.
SCORES = 256
# Cost of one more step, as a share of a full one, and of one more loop, as a
# share of all tiles.
STEP_COST, LOOP_COST = 1 / 4, 1 / 32
NOWHERE = np.iinfo(np.int32).max  # out of bounds: read as a fill value


class Loop(NamedTuple):
  """Lists of similar length, one in each lane of each step: int32."""

  mine: contract.Table  # [steps, lanes], the tile of this side it belongs to
  others: contract.Table  # [steps, lanes, span], its tiles, -1 for none


class Sweep(NamedTuple):
  """All lists of one side."""

  loops: tuple[Loop, ...]
  # int32 [tiles], the lane of the list of each tile, counted over all loops and
  # their steps; `NOWHERE` for none.
  lanes: contract.Table


class Sweeps(NamedTuple):
  """The tables of a plan."""

  by_query: Sweep  # the lists of queries
  by_key: Sweep  # the lists of keys


unsupported = contract.nothing_unsupported


def tile_size(part: Pattern, case: contract.Case) -> int:
  """See `contract.Executor`."""
  del part
  return min(case.tile or TILE, case.length)


def plans(patterns: tuple[Pattern, ...], case: contract.Case) -> contract.Plans:
  """The plans of all parts, each with its heads."""
  n, tile = case.length, tile_size(patterns[0], case)
  return [
    (_plan(part, n, tile, len(patterns) // len(heads or patterns)), heads)
    for part, heads in heads_of_parts(patterns, n)
  ]


@functools.lru_cache(maxsize=256)
def _plan(part: Pattern, n: int, tile: int, share: int) -> contract.Plan:
  """The plan of a part that one of `share` heads has."""
  layout = part.layout(n, tile)
  queries, keys = orders_of(layout)
  sizes = len(queries.positions), len(keys.positions)
  (sweeps,) = _sweeps_of([layout], *sizes, share * SCORES)
  return contract.Plan(part, tile, sweeps, queries, keys)


def shares(
  part: Pattern, layouts: Sequence[Layout], case: contract.Case
) -> list[Sweeps]:
  """The tables with which devices share a part, all of the same shapes."""
  del part, case
  sizes = len(layouts[0].query_order), len(layouts[0].key_order)
  return _sweeps_of(layouts, *sizes, SCORES)


def _sweeps_of(
  layouts: Sequence[Layout], num_queries: int, num_keys: int, scores: int
) -> list[Sweeps]:
  """The sweeps of layouts with as many places, of the same shapes."""
  tile = layouts[0].tile
  tiles_of_step = max(1, scores // tile)  # per tile of this side
  by_query = [_lists(x.rows, x.cols) for x in layouts]
  by_key = [_lists(x.cols, x.rows) for x in layouts]
  return [
    *map(
      Sweeps,
      _make_sweeps(by_query, num_queries // tile, tiles_of_step),
      _make_sweeps(by_key, num_keys // tile, tiles_of_step),
    )
  ]


def _lists(mine: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, ...]:
  """(tiles with a list, what is in each, -1 for padding), longest first."""
  order = np.lexsort((others, mine))
  tiles, row, sizes = np.unique(
    mine[order], return_inverse=True, return_counts=True
  )
  place = np.arange(len(mine)) - (np.cumsum(sizes) - sizes)[row]
  table = np.full((len(tiles), sizes.max(initial=0)), -1, np.int32)
  table[row, place] = others[order]
  longest = np.argsort(-sizes, kind="stable")
  return tiles[longest].astype(np.int32), table[longest]


def _make_sweeps(
  of_devices: Sequence[tuple[np.ndarray, ...]], num_tiles: int, per_tile: int
) -> list[Sweep]:
  """The sweeps of a side with some tiles, on each device, from its lists."""
  sizes = [(table >= 0).sum(1) for _, table in of_devices]
  counts = np.zeros(max(map(len, sizes)), int)  # the most of all devices
  for of_device in sizes:
    here = slice(len(of_device))
    counts[here] = np.maximum(counts[here], of_device)
  room = num_tiles * per_tile  # tiles of a step
  lanes = np.full((len(of_devices), num_tiles), NOWHERE, np.int32)
  loops: list[list[Loop]] = [[] for _ in of_devices]
  lane = 0
  for first, last in _cut(counts, room):
    num_steps = _num_steps(last - first, counts[first], room)
    shape = num_steps, -(-(last - first) // num_steps)
    for device, (own, table) in enumerate(of_devices):
      mine, others = own[first:last], table[first:last, : counts[first]]
      lanes[device, mine] = lane + np.arange(len(mine))
      full = shape[0] * shape[1], counts[first]
      others = _fit(others, full, -1).reshape(*shape, -1)
      loops[device].append(Loop(_fit(mine, full[:1], 0).reshape(shape), others))
    lane += full[0]
  return [Sweep(tuple(x), y) for x, y in zip(loops, lanes, strict=True)]


def _fit(x: np.ndarray, shape: tuple[int, ...], fill: int) -> np.ndarray:
  """x, padded to a shape."""
  missing = [
    (0, size - len_) for size, len_ in zip(shape, x.shape, strict=True)
  ]
  return np.pad(x, missing, constant_values=fill)


def _cut(counts: np.ndarray, room: int) -> Iterator[tuple[int, int]]:
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


def _num_steps(size: Any, span: int, room: int) -> Any:
  """Steps of lists with `span` tiles each, of which a step has up to `room`."""
  return -(-size // max(1, room // span))


def forward(
  plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
) -> tuple[jax.Array, jax.Array]:
  """See `contract.Executor`."""

  def process(q, k, pairs):
    scaled = q.q * scale(q.q, plan.scores)
    return finish(*softmax_of_tile(scaled, k, (pairs, None), plan.scores))

  outs = (keys.v.shape[-1], 0.0), (1, -jnp.inf)
  out, lse = _run(plan, False, (queries, keys), process, outs)
  return out, lse[..., 0]


def backward(
  plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
) -> tuple[jax.Array, ...]:
  """See `contract.Executor`."""
  scores = plan.scores

  def gradients(q, k, pairs):
    """(scaled queries, weights, gradients of the scores)."""
    q = q._replace(q=q.q * scale(q.q, scores))
    p, dp, slope = weights_and_gradients(q, k, pairs, scores)
    return q.q, p.astype(q.dout.dtype), (dp * slope).astype(q.q.dtype)

  def of_query(q, k, pairs):
    _, _, ds = gradients(q, k, pairs)
    return (dot("abhts,abhsk->abhtk", ds, k.k) * scale(q.q, scores),)

  def of_key(q, k, pairs):
    scaled, p, ds = gradients(q, k, pairs)
    dk = dot("abhts,abhtk->abhsk", ds, scaled)
    return dk, dot("abhts,abhte->abhse", p, q.dout)

  of_dq, *of_dk_dv = ((x.shape[-1], 0.0) for x in (queries.q, *keys[:2]))
  (dq,) = _run(plan, False, (queries, keys), of_query, [of_dq])
  return dq, *_run(plan, True, (queries, keys), of_key, of_dk_dv)


def _run(
  plan: contract.Plan,
  is_by_key: bool,
  given: tuple[contract.Queries, contract.Keys],
  process: Callable,
  outs: Sequence[tuple[int, float]],
) -> list[jax.Array]:
  """Runs process(queries, keys, pairs) on the tiles of all lists.

  It gets [A, B, G, R T, ...] of the queries of A lists, [A, B, G, S, ...] of
  the keys and their pairs [A, 1, 1, R T, S], with G key heads and R query heads
  of each; T or S are the positions of a tile, the other those of a list. `outs`
  has the width of each result, and its value without any pairs. Results are
  [B, L, H or G, width], float32 or wider.
  """
  queries, keys = given
  sweep = plan.tables.by_key if is_by_key else plan.tables.by_query
  rows = queries.q.shape[2] // keys.k.shape[2]
  batch, _, heads, _ = (keys.k if is_by_key else queries.q).shape
  num_lanes = max(1, sum(loop.mine.size for loop in sweep.loops))
  shape, dtype = (num_lanes, batch, heads, plan.tile), queries.q.dtype
  dtype = jnp.promote_types(dtype, jnp.float32)
  done = [jnp.zeros_like(queries.q, dtype, (*shape, x)) for x, _ in outs]

  def step(given, done, now):
    lane, (mine, others) = now
    at = (others, mine[:, None]) if is_by_key else (mine[:, None], others)
    q, k = (
      jax.tree.map(
        lambda x, i=i, r=r: tiles.take_rows(x, i, plan.tile, r), side
      )
      for side, i, r in zip(given, at, (rows, 1), strict=True)
    )
    # Otherwise the compiler takes once for each product that transposes.
    q, k = lax.optimization_barrier((q, k))
    pairs = tiles.take_pairs(plan, *at, plan.tile, rows)
    pairs = within_segments(pairs, q.segments, k.segments)
    return [
      lax.dynamic_update_slice_in_dim(
        x, y if is_by_key else tiles.by_head(y, rows), lane, 0
      )
      for x, y in zip(done, process(q, k, pairs), strict=True)
    ], None

  lane = 0
  for loop in sweep.loops:
    # The barrier makes each loop wait for the one before, so that only one of
    # them needs memory at a time. It also keeps the compiler from computing in
    # advance what depends on tables only, such as the pairs of all tiles.
    done, given, loop = lax.optimization_barrier(
      jax.tree.map(jnp.asarray, (done, given, loop))
    )
    num_steps, size = loop.mine.shape
    if num_steps == 1:
      done, _ = step(given, done, (lane, jax.tree.map(lambda x: x[0], loop)))
    else:
      lanes = lane + size * jnp.arange(num_steps)
      done, _ = lax.scan(functools.partial(step, given), done, (lanes, loop))
    lane += loop.mine.size
  return [
    _in_order(x, sweep.lanes, fill)
    for x, (_, fill) in zip(done, outs, strict=True)
  ]


def _in_order(x_ABHTW, lanes, fill):
  """[B, L, H, W] from the results of lanes, `fill` for tiles without any."""
  x = x_ABHTW.at[jnp.asarray(lanes)].get(mode="fill", fill_value=fill)
  x_BVTHW = x.transpose(1, 0, 3, 2, 4)
  return x_BVTHW.reshape(x_BVTHW.shape[0], -1, *x_BVTHW.shape[3:])
