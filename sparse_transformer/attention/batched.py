"""The executor for any accelerator, in plain XLA: all tiles in one batch.

Each query tile has a list of key tiles. The lists are distributed over lanes,
longest first, so that no lane is much longer than the longest list. A step
advances every lane by one key tile. The backward pass runs the lists twice, by
query for dq and by key for dk and dv: nothing is summed across lanes, so no two
lanes write to the same place and the result does not depend on timing.
"""

import dataclasses
import functools
import heapq
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract, online_softmax
from sparse_transformer.attention.contract import (
  Case,
  Heads,
  Plan,
  Table,
  make_plan,
)
from sparse_transformer.patterns import Pattern

TILE = 128  # positions: a side of the matrix units of GPUs and TPUs
NOWHERE = np.iinfo(np.int32).max  # an out-of-bounds tile: writes are dropped


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["major", "minor", "first", "write"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Lanes:
  """What each lane does in each step: tables [steps, lanes].

  Attributes:
    major: int32, the tile it accumulates, -1 where it is idle.
    minor: int32, the tile of the other side that it processes.
    first: bool, whether the minor tile is the first of the major tile's list.
    write: int32, the major tile if it is the last of the list, else NOWHERE.
  """

  major: Table
  minor: Table
  first: Table
  write: Table


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["by_query", "by_key"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Sweeps:
  """Lanes of query tiles over their key tiles, and vice versa."""

  by_query: Lanes
  by_key: Lanes


unsupported = contract.nothing_unsupported


def tile_size(part: Pattern, n: int) -> int:
  """The tile that `plan` chooses for n positions."""
  del part
  return min(TILE, n)


@functools.lru_cache(maxsize=256)
def plan(part: Pattern, n: int, tile: int = 0) -> Plan:
  """The plan of a part; `tile` 0 chooses the tile."""
  layout = part.layout(n, tile or tile_size(part, n))
  by_key = np.lexsort((layout.rows, layout.cols))
  sweeps = Sweeps(
    _deal(layout.rows, layout.cols),
    _deal(layout.cols[by_key], layout.rows[by_key]),
  )
  return make_plan(layout, part, n, sweeps)


def plans(
  patterns: tuple[Pattern, ...], case: Case, tile: int = 0
) -> list[tuple[Plan, Heads]]:
  """The plans of all parts, each with its heads."""
  return contract.plan_parts(plan, patterns, case.length, tile)


def _deal(majors, minors):
  """`Lanes` from pairs of tiles, sorted by the major one.

  Longest-processing-time scheduling: each list of minor tiles, longest first,
  goes to the lane that is shortest so far (Graham 1969).
  """
  _, start, counts = np.unique(majors, return_index=True, return_counts=True)
  longest = max(counts, default=0)
  num_lanes = -(-len(majors) // max(longest, 1))
  lanes = [(0, lane) for lane in range(num_lanes)]  # (length, lane): a heap
  step, lane_of = np.zeros((2, len(majors)), np.int64)
  for i in np.argsort(-counts, kind="stable"):
    length, lane = heapq.heappop(lanes)
    here = slice(start[i], start[i] + counts[i])
    step[here] = length + np.arange(counts[i])
    lane_of[here] = lane
    heapq.heappush(lanes, (length + int(counts[i]), lane))
  shape = max((length for length, _ in lanes), default=0), num_lanes

  def table(values, idle):
    result = np.full(shape, idle, values.dtype)
    result[step, lane_of] = values
    return result

  is_first = np.diff(majors, prepend=-1) != 0
  is_last = np.diff(majors, append=-1) != 0
  write = np.where(is_last, majors, NOWHERE)
  return Lanes(
    table(majors.astype(np.int32), -1),
    table(minors.astype(np.int32), 0),
    table(is_first, False),
    table(write.astype(np.int32), NOWHERE),
  )


def forward(
  plan: Plan, q_BLHK: jax.Array, k_BLHK: jax.Array, v_BLHE: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) over the pairs of a plan, in its orders."""
  q, k, v = (_split(x, plan.tile) for x in (q_BLHK, k_BLHK, v_BLHE))
  positions = plan.queries.positions.reshape(-1, plan.tile)
  queries = q * online_softmax.scale(q), positions
  keys = k, v, plan.keys.positions.reshape(-1, plan.tile)

  def process(state, query, key):
    new = online_softmax.softmax_of_tile(plan.pattern, query, key)
    return online_softmax.combine(state, new)

  dtype = jnp.promote_types(q.dtype, jnp.float32)
  out = jnp.zeros_like(q, dtype, (*q.shape[:-1], v.shape[-1]))
  initial = out, jnp.full_like(out[..., :1], -jnp.inf), out[..., :1]
  state = _sweep(plan.tables.by_query, queries, keys, initial, process)
  out, lse = online_softmax.finish(*state)
  return _join(out), _join(lse)[..., 0]


def backward(
  plan: Plan,
  q_BLHK: jax.Array,
  dout_BLHE: jax.Array,
  lse_BLH: jax.Array,
  delta_BLH: jax.Array,
  k_BLHK: jax.Array,
  v_BLHE: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(dq, dk, dv) of the pairs of a plan, with weights relative to `lse_BLH`."""
  of_queries = q_BLHK, dout_BLHE, lse_BLH[..., None], delta_BLH[..., None]
  q, dout, lse, delta = (_split(x, plan.tile) for x in of_queries)
  k, v = (_split(x, plan.tile) for x in (k_BLHK, v_BLHE))
  scale, positions = online_softmax.scale(q), plan.queries.positions
  queries = q * scale, dout, lse, delta, positions.reshape(-1, plan.tile)
  keys = k, v, plan.keys.positions.reshape(-1, plan.tile)

  def process_key(dq, query, key):
    _, ds = online_softmax.weights_and_gradients(plan.pattern, query, key)
    return dq + online_softmax.dot("abhts,abhsk->abhtk", ds, key[0])

  def process_query(state, key, query):
    (dk, dv), (q, dout, *_) = state, query
    p, ds = online_softmax.weights_and_gradients(plan.pattern, query, key)
    dk = dk + online_softmax.dot("abhts,abhtk->abhsk", ds, q)
    return dk, dv + online_softmax.dot("abhts,abhte->abhse", p, dout)

  dq, dk, dv = (jnp.zeros_like(x, lse.dtype) for x in (q, k, v))
  dq = _sweep(plan.tables.by_query, queries, keys, dq, process_key)
  dk, dv = _sweep(plan.tables.by_key, keys, queries, (dk, dv), process_query)
  return _join(dq * scale), _join(dk), _join(dv)


def _sweep(
  lanes: Lanes,
  majors: tuple[Any, ...],
  minors: tuple[Any, ...],
  initial: Any,
  process: Callable,
) -> Any:
  """Runs state = process(state, major, minor) over the list of each tile.

  Args:
    lanes: which tiles are processed together, and when.
    majors, minors: arrays [tiles, ...].
    initial: the state of each major tile before its list: [tiles, ...].
    process: a function of the states and tiles of all lanes at once.

  Returns:
    The states after the lists, in place of the initial ones.
  """
  majors, minors = (jax.tree.map(jnp.asarray, x) for x in (majors, minors))

  def step(carry, now):
    state, done = carry
    major, minor, is_first, write = now

    def begin(x, start):
      fresh = is_first.reshape(-1, *(1,) * (x.ndim - 1))
      return jnp.where(fresh, start[major], x)

    def end(x, done):
      return done.at[write].set(x, mode="drop")

    state = jax.tree.map(begin, state, initial)
    state = process(
      state, tuple(x[major] for x in majors), tuple(x[minor] for x in minors)
    )
    return (state, jax.tree.map(end, state, done)), None

  num_lanes = lanes.major.shape[1]
  state = jax.tree.map(
    lambda x: jnp.zeros_like(x, shape=(num_lanes, *x.shape[1:])), initial
  )
  # An idle lane reads some tile and writes none.
  tables = lanes.major.clip(0), lanes.minor, lanes.first, lanes.write
  (_, done), _ = lax.scan(step, (state, initial), tables)
  return done


def _split(x_BLH, tile):
  """Tiles first, positions after the heads: [tiles, B, H, tile, ...]."""
  b, n, h, *width = x_BLH.shape
  x = jnp.pad(x_BLH, ((0, 0), (0, -n % tile), *((0, 0),) * (x_BLH.ndim - 2)))
  return jnp.moveaxis(x.reshape(b, -1, tile, h, *width), (1, 3), (0, 2))


def _join(x):
  """Undoes `_split`."""
  x = jnp.moveaxis(x, (0, 2), (1, 3))
  return x.reshape(x.shape[0], -1, *x.shape[3:])
