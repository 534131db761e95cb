"""The schedule of the blocked backend for accelerators: all tiles in parallel.

The lists of key tiles that the query tiles visit are dealt out to lanes, long
lists first, so that all lanes are about as long as the longest list. A step
advances every lane by one key tile. The backward pass runs the lists twice,
by queries for dq and by keys for dk and dv: nothing is added up across lanes,
so no two lanes write to one place and the result does not depend on timing.
"""

import dataclasses
import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import online_softmax as tiles
from sparse_transformer.patterns import Pattern

TILE = 128  # positions: a side of the matrix units of GPUs and TPUs


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """The tiles of one pattern, dealt out to lanes.

  by_query, by_key: `Lanes` of query tiles, over the key tiles they visit, and
    the other way round.
  query_positions, key_positions: what stands at each place, -1 for padding.
  """

  pattern: Pattern
  tile: int
  by_query: "Lanes"
  by_key: "Lanes"
  query_positions: np.ndarray
  key_positions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Lanes:
  """What each lane does in each step: tables [steps, lanes].

  major: the tile it works for, -1 where it rests.
  minor: the tile of the other side that it visits.
  first, last: whether this visit is the tile's first, its last.
  """

  major: np.ndarray
  minor: np.ndarray
  first: np.ndarray
  last: np.ndarray


@functools.lru_cache(maxsize=256)
def plan(pattern, n, tile=0):
  tile = tile or min(TILE, n)
  layout = pattern.layout(n, tile)
  num_rows, num_cols = -(-n // tile), max(layout.cols, default=0) + 1
  by_key = np.lexsort((layout.rows, layout.cols))
  return Plan(
    pattern,
    tile,
    _deal(layout.rows, layout.cols),
    _deal(layout.cols[by_key], layout.rows[by_key]),
    tiles.pad(layout.query_order, num_rows * tile),
    tiles.pad(layout.key_order, num_cols * tile),
  )


def _deal(majors, minors):
  """`Lanes` from pairs of tiles, sorted by the major one."""
  tiles, first, counts = np.unique(
    majors, return_index=True, return_counts=True
  )
  num_steps = max(counts, default=0)
  num_lanes = -(-len(majors) // max(num_steps, 1))
  lanes = [(0, lane) for lane in range(num_lanes)]  # (length, lane): a heap
  place = np.zeros(len(majors), np.int64), np.zeros(len(majors), np.int64)
  for i in np.argsort(-counts, kind="stable"):
    length, lane = heapq.heappop(lanes)
    here = slice(first[i], first[i] + counts[i])
    place[0][here] = length + np.arange(counts[i])
    place[1][here] = lane
    heapq.heappush(lanes, (length + int(counts[i]), lane))
  shape = max(length for length, _ in lanes) if lanes else 0, num_lanes
  tables = [np.full(shape, -1, np.int32), np.zeros(shape, np.int32)]
  ends = [np.zeros(shape, bool), np.zeros(shape, bool)]
  is_first = np.diff(majors, prepend=-1) != 0
  is_last = np.diff(majors, append=-1) != 0
  values = majors, minors, is_first, is_last
  for table, value in zip((*tables, *ends), values, strict=True):
    table[place] = value
  return Lanes(*tables, *ends)


def forward(plan, q_BLHK, k_BLHK, v_BLHE):
  """(out_BLHE, lse_BLH) over the pairs of a plan, in its orders."""
  q, k, v = (_split(x, plan.tile) for x in (q_BLHK, k_BLHK, v_BLHE))
  queries = q * tiles.scale(q), plan.query_positions.reshape(-1, plan.tile)
  keys = k, v, plan.key_positions.reshape(-1, plan.tile)

  def visit(state, query, key):
    return tiles.combine(state, tiles.visit(plan.pattern, query, key))

  dtype = jnp.promote_types(q.dtype, jnp.float32)
  out = jnp.zeros((*q.shape[:-1], v.shape[-1]), dtype)
  initial = out, jnp.full_like(out[..., :1], -jnp.inf), out[..., :1]
  state = _sweep(plan.by_query, queries, keys, initial, visit)
  out, lse = tiles.finish(*state)
  return _join(out), _join(lse)[..., 0]


def backward(plan, q_BLHK, dout_BLHE, lse_BLH, delta_BLH, k_BLHK, v_BLHE):
  """(dq, dk, dv) of the pairs of a plan, weights taken against `lse_BLH`."""
  of_queries = q_BLHK, dout_BLHE, lse_BLH[..., None], delta_BLH[..., None]
  q, dout, lse, delta = (_split(x, plan.tile) for x in of_queries)
  k, v = (_split(x, plan.tile) for x in (k_BLHK, v_BLHE))
  scale, positions = tiles.scale(q), plan.query_positions
  queries = q * scale, dout, lse, delta, positions.reshape(-1, plan.tile)
  keys = k, v, plan.key_positions.reshape(-1, plan.tile)

  def visit_key(dq, query, key):
    _, ds = tiles.weights(plan.pattern, query, key)
    return dq + tiles.dot("abhts,abhsk->abhtk", ds, key[0])

  def visit_query(state, key, query):
    (dk, dv), (q, dout, *_) = state, query
    p, ds = tiles.weights(plan.pattern, query, key)
    dk = dk + tiles.dot("abhts,abhtk->abhsk", ds, q)
    return dk, dv + tiles.dot("abhts,abhte->abhse", p, dout)

  dq, dk, dv = (jnp.zeros(x.shape, lse.dtype) for x in (q, k, v))
  dq = _sweep(plan.by_query, queries, keys, dq, visit_key)
  dk, dv = _sweep(plan.by_key, keys, queries, (dk, dv), visit_query)
  return _join(dq * scale), _join(dk), _join(dv)


def _sweep(lanes, majors, minors, initial, visit):
  """Runs state = visit(state, major, minor) over the visits of each tile.

  majors, minors, initial: arrays [tiles, ...]. Returns the last states in the
  place of the initial ones.
  """
  majors, minors = (jax.tree.map(jnp.asarray, x) for x in (majors, minors))
  num_tiles = len(majors[0])
  # A lane that rests reads some tile and writes none.
  read = np.maximum(lanes.major, 0)
  write = np.where(lanes.last, lanes.major, num_tiles)

  def step(carry, now):
    state, done = carry
    major, minor, write, is_first = now

    def begin(x, start):
      fresh = is_first.reshape(-1, *(1,) * (x.ndim - 1))
      return jnp.where(fresh, start[major], x)

    def end(x, done):
      return done.at[write].set(x, mode="drop")

    state = jax.tree.map(begin, state, initial)
    state = visit(
      state, tuple(x[major] for x in majors), tuple(x[minor] for x in minors)
    )
    return (state, jax.tree.map(end, state, done)), None

  num_lanes = read.shape[1]
  state = jax.tree.map(
    lambda x: jnp.zeros((num_lanes, *x.shape[1:]), x.dtype), initial
  )
  tables = read, lanes.minor, write, lanes.first
  (_, done), _ = lax.scan(step, (state, initial), tables)
  return done


def _split(x_BLH, tile):
  """Tiles in front, positions behind the heads: [tiles, B, H, tile, ...]."""
  b, n, h, *width = x_BLH.shape
  x = jnp.pad(x_BLH, ((0, 0), (0, -n % tile), *((0, 0),) * (x_BLH.ndim - 2)))
  return jnp.moveaxis(x.reshape(b, -1, tile, h, *width), (1, 3), (0, 2))


def _join(x):
  """Undoes `_split`."""
  x = jnp.moveaxis(x, (0, 2), (1, 3))
  return x.reshape(x.shape[0], -1, *x.shape[3:])
