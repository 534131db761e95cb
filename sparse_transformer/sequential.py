"""The schedule of the blocked backend for CPUs: few query tiles at a time.

A step is a tile of queries against a span of neighbouring key tiles, all
batches and heads together; its scores stay in cache. Query tiles with several
steps go through them with an online softmax. Where each has one step, as in
local and block attention, some are taken side by side, since small products
leave processors idle.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer import tiles
from sparse_transformer.patterns import Pattern

TILES = (64, 96, 128, 192, 256)  # positions, to choose from
MAX_SPAN = 4  # tiles of keys in a step
MAX_KEYS = 512  # positions of keys in a step
# What a step costs besides its scores, counted in scores of one head: fitted
# to steps of 64 x 192 to 256 x 512 on 2 cores, jax 0.10.2 and 0.12.0.
STEP_COST = 10_000
# Scores, of all heads, that one step may have for tiles side by side.
STEP_SCORES = 300_000


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """The steps of one pattern.

  span: tiles of keys in a step.
  rows: [rows], the query tiles that have steps.
  first: [rows + 1], where the steps of each row begin.
  starts: [steps], the first key tile of each step.
  query_positions, key_positions: what stands at each place, -1 for padding.
    Keys behind the last visited tile are left out.
  """

  pattern: Pattern
  tile: int
  span: int
  rows: np.ndarray
  first: np.ndarray
  starts: np.ndarray
  query_positions: np.ndarray
  key_positions: np.ndarray

  @property
  def cost(self):
    width = self.span * self.tile
    return len(self.starts) * (self.tile * width + STEP_COST)

  @property
  def is_single(self):
    return len(self.starts) == len(self.rows)


@functools.lru_cache(maxsize=256)
def plan(pattern, n, tile=0):
  """The cheapest `Plan`; tile 0 chooses the tile, too."""
  sizes = (tile,) if tile else sorted({min(t, n) for t in TILES})
  return min(
    (
      _plan(pattern, n, tile, span)
      for tile in sizes
      for span in range(1, max(1, min(MAX_SPAN, MAX_KEYS // tile)) + 1)
      if span == 1 or span * tile < n + tile
    ),
    key=lambda p: p.cost,
  )


def _plan(pattern, n, tile, span):
  layout = pattern.layout(n, tile)
  num_rows, num_cols = -(-n // tile), max(layout.cols, default=0) + 1
  span = min(span, num_cols)
  steps = _cover(layout.rows, layout.cols, span)
  rows, first = np.unique(layout.rows[steps], return_index=True)
  return Plan(
    pattern,
    tile,
    span,
    rows.astype(np.int32),
    np.append(first, len(steps)).astype(np.int32),
    layout.cols[steps].astype(np.int32),
    tiles.pad(layout.query_order, num_rows * tile),
    tiles.pad(layout.key_order, num_cols * tile),
  )


def _cover(rows, cols, span):
  """Indices of the tiles at which steps start.

  From the left of each row, a step covers the tiles up to `span` from its
  start, and the next one starts at the first tile that is left.
  """
  width = max(cols, default=0) + span + 1
  place = rows * width + cols  # rows never run into one another
  after = np.searchsorted(place, place + span)
  is_start = np.diff(rows, prepend=-1) != 0
  now = np.flatnonzero(is_start)
  while len(now):
    ahead = after[now]
    inside = ahead < len(rows)
    inside[inside] = rows[ahead[inside]] == rows[now[inside]]
    now = ahead[inside]
    is_start[now] = True
  return np.flatnonzero(is_start)


def forward(plan, q_BLHK, k_BLHK, v_BLHE):
  """(out_BLHE, lse_BLH) over the pairs of a plan, in its orders."""
  group, tile = _group(plan, q_BLHK), plan.tile
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)

  def body(i, carry):
    at = _places(plan.rows, i, group, tile)
    q = _take(q_BLHK, at, tile) * tiles.scale(q_BLHK)
    query = q, _positions(plan.query_positions, at, tile)

    def visit(j):
      key = _keys(plan, _places(plan.starts, j, group, tile), k_BLHK, v_BLHE)
      return tiles.visit(plan.pattern, query, key)

    if plan.is_single:
      state = visit(i)
    else:
      out = jnp.zeros((*q.shape[:-1], v_BLHE.shape[-1]), dtype)
      state = lax.fori_loop(
        *_steps(plan, i),
        lambda j, state: tiles.combine(state, visit(j)),
        (out, jnp.full_like(out[..., :1], -jnp.inf), out[..., :1]),
      )
    out, lse = tiles.finish(*state)
    out_BLHE, lse_BLH = carry
    return _put(out_BLHE, out, at), _put(lse_BLH, lse[..., 0], at)

  lse_BLH = jnp.full(q_BLHK.shape[:3], -jnp.inf, dtype)
  carry = jnp.zeros((*lse_BLH.shape, v_BLHE.shape[-1]), dtype), lse_BLH
  return lax.fori_loop(0, len(plan.rows) // group, body, carry)


def backward(plan, q_BLHK, dout_BLHE, lse_BLH, delta_BLH, k_BLHK, v_BLHE):
  """(dq, dk, dv) of the pairs of a plan, weights taken against `lse_BLH`."""
  group, tile = _group(plan, q_BLHK), plan.tile
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  scale = tiles.scale(q_BLHK)

  def body(i, carry):
    dq_BLHK, *dkv = carry
    at = _places(plan.rows, i, group, tile)
    q = _take(q_BLHK, at, tile) * scale
    dout = _take(dout_BLHE, at, tile)
    lse, delta = (_take(x, at, tile)[..., None] for x in (lse_BLH, delta_BLH))
    query = q, dout, lse, delta, _positions(plan.query_positions, at, tile)
    # Transposed here, while small: a product with its left side transposed
    # runs at half the rate.
    q_T, dout_T = lax.optimization_barrier(
      (q.swapaxes(-1, -2), dout.swapaxes(-1, -2))
    )

    def visit(j, carry):
      dq, dk_BLHK, dv_BLHE = carry
      starts = _places(plan.starts, j, group, tile)
      key = _keys(plan, starts, k_BLHK, v_BLHE)
      p, ds = tiles.weights(plan.pattern, query, key)
      dv = tiles.dot("abhet,abhts->abhes", dout_T, p).swapaxes(-1, -2)
      dk = tiles.dot("abhkt,abhts->abhks", q_T, ds).swapaxes(-1, -2)
      dq = dq + tiles.dot("abhts,abhsk->abhtk", ds, key[0])
      begins = _begins(plan, starts)
      return dq, _add(dk_BLHK, dk, begins), _add(dv_BLHE, dv, begins)

    carry = jnp.zeros(q.shape, dtype), *dkv
    if plan.is_single:
      dq, *dkv = visit(i, carry)
    else:
      dq, *dkv = lax.fori_loop(*_steps(plan, i), visit, carry)
    return _put(dq_BLHK, dq * scale, at), *dkv

  zeros = tuple(jnp.zeros(x.shape, dtype) for x in (q_BLHK, k_BLHK, v_BLHE))
  return lax.fori_loop(0, len(plan.rows) // group, body, zeros)


def _group(plan, q_BLHK):
  """How many query tiles to take side by side: a divisor of their number."""
  b, _, h, _ = q_BLHK.shape
  scores = b * h * plan.tile**2 * plan.span
  most = STEP_SCORES // scores if plan.is_single else 1
  sizes = range(1, max(1, min(most, len(plan.rows))) + 1)
  return max(size for size in sizes if len(plan.rows) % size == 0)


def _steps(plan, i):
  """Where the steps of the i-th row begin and end."""
  first = jnp.asarray(plan.first)
  return first[i], first[i + 1]


def _places(table, i, group, tile):
  """Positions at which the i-th group of tiles in a table begin."""
  table = jnp.asarray(table)
  return [table[i * group + a] * tile for a in range(group)]


def _keys(plan, starts, k_BLHK, v_BLHE):
  """Keys, values and positions of a step, as `tiles` takes them."""
  begins, width = _begins(plan, starts), plan.span * plan.tile
  k, v = (_take(x, begins, width) for x in (k_BLHK, v_BLHE))
  positions = _positions(plan.key_positions, begins, width)
  # Keys before the start belong to the step before.
  skip = jnp.stack(starts) - jnp.stack(begins)
  is_new = jnp.arange(width)[None] >= skip[:, None]
  return k, v, jnp.where(is_new, positions, -1)


def _begins(plan, starts):
  """Where steps begin to read: earlier, where a span would leave the keys."""
  last = len(plan.key_positions) - plan.span * plan.tile
  return [jnp.minimum(start, last) for start in starts]


def _positions(positions, at, length):
  positions = jnp.asarray(positions)
  return jnp.stack(
    [lax.dynamic_slice_in_dim(positions, start, length) for start in at]
  )


def _take(x_BLH, at, length):
  """Slices of positions, heads in front: [A, B, H, length, ...]."""
  return jnp.stack(
    [
      lax.dynamic_slice_in_dim(x_BLH, start, length, 1).swapaxes(1, 2)
      for start in at
    ]
  )


def _put(x_BLH, new, at):
  """Undoes `_take`: x_BLH with new slices."""
  for start, slice_BHT in zip(at, new, strict=True):
    slice_BTH = slice_BHT.swapaxes(1, 2)
    x_BLH = lax.dynamic_update_slice_in_dim(x_BLH, slice_BTH, start, 1)
  return x_BLH


def _add(x_BLH, new, at):
  for start, slice_BHT in zip(at, new, strict=True):
    (old_BHT,) = _take(x_BLH, [start], slice_BHT.shape[2])
    x_BLH = _put(x_BLH, [old_BHT + slice_BHT], [start])
  return x_BLH
