"""The schedule of the blocked backend for CPUs: one query tile at a time.

A step is a tile of queries against a span of neighbouring key tiles, all
batches and heads together; its scores stay in cache. A row of steps runs an
online softmax; where no row has more than one step, as in local and block
attention, a plain one.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.patterns import Pattern

TILES = (64, 96, 128, 192, 256)  # positions, to choose from
MAX_SPAN = 4  # tiles of keys in a step
MAX_KEYS = 512  # positions of keys in a step
# What a step costs besides its scores, counted in scores of one head: fitted
# to steps of 64 x 192 to 256 x 512 on 2 cores, jax 0.10.2 and 0.12.0.
STEP_COST = 10_000


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
  tiles = (tile,) if tile else sorted({min(t, n) for t in TILES})
  return min(
    (
      _plan(pattern, n, tile, span)
      for tile in tiles
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
    _pad(layout.query_order, num_rows * tile),
    _pad(layout.key_order, num_cols * tile),
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


def _pad(order, length):
  """The first `length` of an order of positions, filled up with -1."""
  order = order[:length]
  return np.pad(order, (0, length - len(order)), constant_values=-1)


def forward(plan, q_BLHK, k_BLHK, v_BLHE):
  """(out_BLHE, lse_BLH) over the pairs of a plan, in its orders."""
  tile = plan.tile
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  (b, n, h, _), e = q_BLHK.shape, v_BLHE.shape[-1]

  def row_body(i, carry):
    row = _at(plan.rows, i)
    q_BHTK = _tile(q_BLHK, row * tile, tile) * _scale(q_BLHK)

    def scores(step):
      return _scores(plan, row, step, q_BHTK, _keys(plan, k_BLHK, step))

    def weigh(p_BHTS, step):
      v_BHSE = _keys(plan, v_BLHE, step)
      return _dot("bhts,bhse->bhte", p_BHTS.astype(v_BHSE.dtype), v_BHSE)

    if plan.is_single:
      step = _step(plan, i)
      s_BHTS = scores(step)
      max_BHT1, p_BHTS = _exponentials(s_BHTS, -jnp.inf)
      sum_BHT1 = p_BHTS.sum(-1, keepdims=True)
      out_BHTE = weigh(p_BHTS, step)
    else:

      def body(j, carry):
        out_BHTE, max_BHT1, sum_BHT1 = carry
        step = _step(plan, j)
        new_BHT1, p_BHTS = _exponentials(scores(step), max_BHT1)
        decay_BHT1 = jnp.exp(max_BHT1 - _finite(new_BHT1))
        sum_BHT1 = sum_BHT1 * decay_BHT1 + p_BHTS.sum(-1, keepdims=True)
        return out_BHTE * decay_BHT1 + weigh(p_BHTS, step), new_BHT1, sum_BHT1

      zeros = jnp.zeros((b, h, tile, 1), dtype)
      state = jnp.zeros((b, h, tile, e), dtype), zeros - jnp.inf, zeros
      out_BHTE, max_BHT1, sum_BHT1 = lax.fori_loop(
        _at(plan.first, i), _at(plan.first, i + 1), body, state
      )
    out_BHTE = out_BHTE / jnp.where(sum_BHT1 == 0, 1, sum_BHT1)
    lse_BHT = (max_BHT1 + jnp.log(sum_BHT1))[..., 0]
    out_BLHE, lse_BLH = carry
    return (
      _write(out_BLHE, out_BHTE, row * tile),
      _write(lse_BLH, lse_BHT, row * tile),
    )

  carry = jnp.zeros((b, n, h, e), dtype), jnp.full((b, n, h), -jnp.inf, dtype)
  return lax.fori_loop(0, len(plan.rows), row_body, carry)


def backward(plan, q_BLHK, dout_BLHE, lse_BLH, delta_BLH, k_BLHK, v_BLHE):
  """(dq, dk, dv) of the pairs of a plan, weights taken against `lse_BLH`."""
  tile, scale = plan.tile, _scale(q_BLHK)
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)

  def row_body(i, carry):
    row = _at(plan.rows, i)
    q_BHTK, dout_BHTE, lse_BHT, delta_BHT = (
      _tile(x, row * tile, tile)
      for x in (q_BLHK, dout_BLHE, lse_BLH, delta_BLH)
    )
    q_BHTK = q_BHTK * scale
    # Transposed here, while small: a product with its left side transposed
    # runs at half the rate.
    q_BHKT, dout_BHET = lax.optimization_barrier(
      (q_BHTK.swapaxes(2, 3), dout_BHTE.swapaxes(2, 3))
    )

    def body(j, carry):
      dq_BHTK, dk_BLHK, dv_BLHE = carry
      step = _step(plan, j)
      k_BHSK, v_BHSE = (_keys(plan, x, step) for x in (k_BLHK, v_BLHE))
      s_BHTS = _scores(plan, row, step, q_BHTK, k_BHSK)
      p_BHTS = jnp.exp(s_BHTS - lse_BHT[..., None])
      dp_BHTS = _dot("bhte,bhse->bhts", dout_BHTE, v_BHSE)
      ds_BHTS = p_BHTS * (dp_BHTS - delta_BHT[..., None])
      p_BHTS, ds_BHTS = (x.astype(q_BHTK.dtype) for x in (p_BHTS, ds_BHTS))
      dv_BHES = _dot("bhet,bhts->bhes", dout_BHET, p_BHTS)
      dk_BHKS = _dot("bhkt,bhts->bhks", q_BHKT, ds_BHTS)
      dq_BHTK = dq_BHTK + _dot("bhts,bhsk->bhtk", ds_BHTS, k_BHSK)
      begin = step[1] * tile
      return (
        dq_BHTK,
        _add(dk_BLHK, dk_BHKS.swapaxes(2, 3), begin),
        _add(dv_BLHE, dv_BHES.swapaxes(2, 3), begin),
      )

    dq_BLHK, *dkv = carry
    state = jnp.zeros(q_BHTK.shape, dtype), *dkv
    if plan.is_single:
      dq_BHTK, *dkv = body(i, state)
    else:
      dq_BHTK, *dkv = lax.fori_loop(
        _at(plan.first, i), _at(plan.first, i + 1), body, state
      )
    return _write(dq_BLHK, dq_BHTK * scale, row * tile), *dkv

  zeros = tuple(jnp.zeros(x.shape, dtype) for x in (q_BLHK, k_BLHK, v_BLHE))
  return lax.fori_loop(0, len(plan.rows), row_body, zeros)


def _step(plan, j):
  """(start, begin): the step's first key tile, and the first that it reads.

  It reads earlier ones where its span would leave the keys.
  """
  start = _at(plan.starts, j)
  last = len(plan.key_positions) // plan.tile - plan.span
  return start, jnp.minimum(start, last)


def _scores(plan, row, step, q_BHTK, k_BHSK):
  """Scores [B, H, T, S] of one step, -inf off the pattern."""
  (start, begin), tile, width = step, plan.tile, plan.span * plan.tile
  q_T = lax.dynamic_slice_in_dim(plan.query_positions, row * tile, tile)
  k_S = lax.dynamic_slice_in_dim(plan.key_positions, begin * tile, width)
  # Tiles before the start belong to the step before.
  is_new_S = (k_S >= 0) & (jnp.arange(width) >= (start - begin) * tile)
  mask_TS = plan.pattern.mask(q_T[:, None], k_S[None])
  mask_TS = mask_TS & is_new_S[None] & (q_T >= 0)[:, None]
  s_BHTS = _dot("bhtk,bhsk->bhts", q_BHTK, k_BHSK)
  return jnp.where(mask_TS[None, None], s_BHTS, -jnp.inf)


def _exponentials(s_BHTS, old_BHT1):
  """(running maximum, exponentials of the scores relative to it)."""
  max_BHT1 = jnp.maximum(old_BHT1, s_BHTS.max(-1, keepdims=True))
  return max_BHT1, jnp.exp(s_BHTS - _finite(max_BHT1))


def _finite(max_BHT1):
  """0 while no key was seen: exp(-inf - 0) is 0, not NaN."""
  return jnp.where(max_BHT1 == -jnp.inf, 0, max_BHT1)


def _scale(q_BLHK):
  return np.asarray(1 / np.sqrt(q_BLHK.shape[-1]), q_BLHK.dtype)


def _dot(spec, a, b):
  dtype = jnp.promote_types(a.dtype, jnp.float32)
  return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def _at(table, i):
  return jnp.asarray(table)[i]


def _keys(plan, x_BLH, step):
  return _tile(x_BLH, step[1] * plan.tile, plan.span * plan.tile)


def _tile(x_BLH, start, length):
  """A slice of positions, heads in front: [B, H, length, ...]."""
  return lax.dynamic_slice_in_dim(x_BLH, start, length, 1).swapaxes(1, 2)


def _write(x_BLH, tile_BHT, start):
  return lax.dynamic_update_slice_in_dim(
    x_BLH, tile_BHT.swapaxes(1, 2), start, 1
  )


def _add(x_BLH, tile_BHT, start):
  length = tile_BHT.shape[2]
  return _write(x_BLH, _tile(x_BLH, start, length) + tile_BHT, start)
