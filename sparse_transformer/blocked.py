"""Sparse attention tile by tile, in plain JAX, in linear memory.

Each part of a pattern runs in its own order of positions. There its pairs
fill whole tiles; a row of query tiles visits only the tiles of keys that hold
pairs, with an online softmax, and the mask is applied to the positions inside.
Parts are merged by log-sum-exp. One backward pass stands over all parts: it
recomputes the weights of each against the merged log-sum-exp, so nothing of
size n x keys is ever stored.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.patterns import Pattern

TILE = 64  # positions
MAX_SPAN = 4  # tiles of keys in one step: bounds its memory


def attend(q_BLHK, k_BLHK, v_BLHE, patterns, tile=0):
  """`attention.attend`, with a tuple of one pattern per head.

  Returns (out_BLHE, lse_BLH).
  """
  tile = tile or min(TILE, q_BLHK.shape[1])
  return _attend(q_BLHK, k_BLHK, v_BLHE, patterns, tile)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(q_BLHK, k_BLHK, v_BLHE, patterns, tile):
  return _attend_forward(q_BLHK, k_BLHK, v_BLHE, patterns, tile)[0]


def _attend_forward(q_BLHK, k_BLHK, v_BLHE, patterns, tile):
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  out_BLHE = jnp.zeros(v_BLHE.shape, dtype)
  lse_BLH = jnp.full(v_BLHE.shape[:3], -jnp.inf, dtype)
  for part, heads in _parts(patterns, q_BLHK.shape[1]):
    schedule = _schedule(part, q_BLHK.shape[1], tile)
    new = _forward(
      schedule, *(x[:, :, heads] for x in (q_BLHK, k_BLHK, v_BLHE))
    )
    old = out_BLHE[:, :, heads], lse_BLH[:, :, heads]
    out, lse = merge(old, new)
    out_BLHE = out_BLHE.at[:, :, heads].set(out)
    lse_BLH = lse_BLH.at[:, :, heads].set(lse)
  out_BLHE = out_BLHE.astype(v_BLHE.dtype)
  return (out_BLHE, lse_BLH), (q_BLHK, k_BLHK, v_BLHE, out_BLHE, lse_BLH)


def _attend_backward(patterns, tile, saved, cotangents):
  q_BLHK, k_BLHK, v_BLHE, out_BLHE, lse_BLH = saved
  dout_BLHE, dlse_BLH = cotangents
  # With p the merged weights: ds = p (dout v^T - delta), and lse adds p dlse.
  delta_BLH = jnp.einsum(
    "blhe,blhe->blh", out_BLHE, dout_BLHE, preferred_element_type=lse_BLH.dtype
  )
  # A row without keys has no weights; 0 keeps its exp(-inf - lse) at 0.
  lse_BLH = jnp.where(jnp.isfinite(lse_BLH), lse_BLH, 0)
  rows = q_BLHK, dout_BLHE, lse_BLH, delta_BLH - dlse_BLH
  grads = [jnp.zeros(x.shape, lse_BLH.dtype) for x in (q_BLHK, k_BLHK, v_BLHE)]
  for part, heads in _parts(patterns, q_BLHK.shape[1]):
    schedule = _schedule(part, q_BLHK.shape[1], tile)
    new = _backward(
      schedule, *(x[:, :, heads] for x in (*rows, k_BLHK, v_BLHE))
    )
    grads = [g.at[:, :, heads].add(x) for g, x in zip(grads, new, strict=True)]
  return tuple(g.astype(x.dtype) for g, x in zip(grads, saved[:3], strict=True))


_attend.defvjp(_attend_forward, _attend_backward)


def merge(first, second):
  """(out_BLHE, lse_BLH) over the keys of both, from those over each.

  Exact, as long as no pair is counted in both. Two rows without keys give
  one without keys.
  """
  (out_1, lse_1), (out_2, lse_2) = first, second
  lse = jnp.logaddexp(lse_1, lse_2)
  shift = jnp.where(jnp.isfinite(lse), lse, 0)
  weight_1, weight_2 = jnp.exp(lse_1 - shift), jnp.exp(lse_2 - shift)
  return weight_1[..., None] * out_1 + weight_2[..., None] * out_2, lse


@dataclasses.dataclass(frozen=True, eq=False)
class _Schedule:
  """The steps of one part: a tile of queries against a span of key tiles.

  n: positions in the sequence.
  span: tiles of keys in a step.
  first: [query tiles + 1], where the steps of each query tile begin.
  starts: [steps], the first key tile of each step.
  query_positions, key_positions: what stands at each place, -1 for padding.
    Keys behind the last visited tile are left out.
  """

  pattern: Pattern
  n: int
  tile: int
  span: int
  first: np.ndarray
  starts: np.ndarray
  query_positions: np.ndarray
  key_positions: np.ndarray

  def mask(self, row, start, begin):
    """Booleans [tile, span * tile] of one step.

    The step reads the keys from tile `begin` on; those before tile `start`
    belong to the step before.
    """
    tile, width = self.tile, self.span * self.tile
    q = lax.dynamic_slice_in_dim(self.query_positions, row * tile, tile)
    k = lax.dynamic_slice_in_dim(self.key_positions, begin * tile, width)
    new = (k >= 0) & (jnp.arange(width) >= (start - begin) * tile)
    return (
      self.pattern.mask(q[:, None], k[None]) & new[None] & (q >= 0)[:, None]
    )


@functools.lru_cache(maxsize=256)
def _schedule(pattern, n, tile):
  layout = pattern.layout(n, tile)
  num_tiles = -(-n // tile)
  num_keys = max(layout.cols, default=0) + 1
  plans = [
    (span, *_spans(layout, num_tiles, span))
    for span in range(1, min(MAX_SPAN, num_keys) + 1)
  ]
  # A step costs its tiles and, about, one more: the shortest plan wins.
  span, first, starts = min(plans, key=lambda p: len(p[2]) * (p[0] + 1))
  return _Schedule(
    pattern,
    n,
    tile,
    span,
    first,
    starts,
    _pad(layout.query_order, num_tiles * tile),
    _pad(layout.key_order, num_keys * tile),
  )


def _spans(layout, num_tiles, span):
  """(first, starts): covers each row's key tiles with runs of `span` tiles."""
  first, starts = [0], []
  for cols in np.split(
    layout.cols, np.searchsorted(layout.rows, np.arange(1, num_tiles))
  ):
    end = -1
    for col in cols:
      if col >= end:
        starts.append(col)
        end = col + span
    first.append(len(starts))
  return np.array(first, np.int32), np.array(starts, np.int32)


def _pad(order, length):
  """The first `length` of an order of positions, filled up with -1."""
  order = order[:length]
  return np.pad(order, (0, length - len(order)), constant_values=-1)


@functools.lru_cache(maxsize=256)
def _parts(patterns, n):
  """Each distinct part that has pairs, with the heads that use it.

  Heads come as a slice where they can, so that taking them copies nothing.
  """
  heads = {}
  for head, pattern in enumerate(patterns):
    for part in pattern.parts():
      heads.setdefault(part, []).append(head)
  everyone = list(range(len(patterns)))
  return tuple(
    (part, slice(None) if h == everyone else np.array(h))
    for part, h in heads.items()
    if part.pairs(n)
  )


def _arrange(x_BL, positions):
  """x in the order of `positions`; anything finite at padded places."""
  n = x_BL.shape[1]
  if np.array_equal(positions, np.arange(n)):
    return x_BL
  return jnp.take(x_BL, np.maximum(positions, 0), axis=1)


def _restore(x_BL, positions, n):
  """Undoes `_arrange`: natural order, 0 where `positions` has no place."""
  if np.array_equal(positions, np.arange(n)):
    return x_BL
  inverse = np.full(n, len(positions))
  real = positions >= 0
  inverse[positions[real]] = np.flatnonzero(real)
  return jnp.take(x_BL, inverse, axis=1, mode="fill", fill_value=0)


def _rows(x_BL, start, length):
  return lax.dynamic_slice_in_dim(x_BL, start, length, axis=1)


def _write(x_BL, update_BL, start):
  return lax.dynamic_update_slice_in_dim(x_BL, update_BL, start, axis=1)


def _scores(schedule, step, row, q_BTHK, k_BSHK):
  """Scores [B, H, T, S] of one step, -inf off the pattern."""
  start, begin = step
  s_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, **_accumulate(q_BTHK))
  mask_TS = schedule.mask(row, start, begin)
  scale = 1 / np.sqrt(q_BTHK.shape[-1])
  return jnp.where(mask_TS[None, None], s_BHTS * scale, -jnp.inf)


def _accumulate(x):
  return dict(preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _loop_spans(schedule, row, body, carry):
  """Runs body(carry, (start, begin)) over the steps of a query tile.

  start: the step's first key tile; begin: the first it reads, moved back
  where the span would leave the keys.
  """
  last = len(schedule.key_positions) // schedule.tile - schedule.span
  first, starts = jnp.asarray(schedule.first), jnp.asarray(schedule.starts)

  def step(i, carry):
    return body(carry, (starts[i], jnp.minimum(starts[i], last)))

  return lax.fori_loop(first[row], first[row + 1], step, carry)


def _forward(schedule, q_BLHK, k_BLHK, v_BLHE):
  """(out_BLHE, lse_BLH) over the pairs of one part."""
  tile, width = schedule.tile, schedule.span * schedule.tile
  q_BLHK = _arrange(q_BLHK, schedule.query_positions)
  k_BLHK, v_BLHE = (
    _arrange(x, schedule.key_positions) for x in (k_BLHK, v_BLHE)
  )
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  (b, n, h, _), e = q_BLHK.shape, v_BLHE.shape[-1]

  def row_body(row, carry):
    out_BLHE, lse_BLH = carry
    q_BTHK = _rows(q_BLHK, row * tile, tile)

    def body(carry, step):
      out_BHTE, max_BHT1, sum_BHT1 = carry
      k_BSHK, v_BSHE = (
        _rows(x, step[1] * tile, width) for x in (k_BLHK, v_BLHE)
      )
      s_BHTS = _scores(schedule, step, row, q_BTHK, k_BSHK)
      new_max = jnp.maximum(max_BHT1, s_BHTS.max(-1, keepdims=True))
      # Finite even while no key was seen: exp(-inf - 0) is 0, not NaN.
      shift = jnp.where(new_max == -jnp.inf, 0, new_max)
      p_BHTS = jnp.exp(s_BHTS - shift)
      decay = jnp.exp(max_BHT1 - shift)
      sum_BHT1 = sum_BHT1 * decay + p_BHTS.sum(-1, keepdims=True)
      out_BHTE = out_BHTE * decay + jnp.einsum(
        "bhts,bshe->bhte",
        p_BHTS.astype(v_BSHE.dtype),
        v_BSHE,
        **_accumulate(v_BSHE),
      )
      return out_BHTE, new_max, sum_BHT1

    zeros = jnp.zeros((b, h, tile, 1), dtype)
    carry = jnp.zeros((b, h, tile, e), dtype), zeros - jnp.inf, zeros
    out, max_BHT1, sum_BHT1 = _loop_spans(schedule, row, body, carry)
    out = out / jnp.where(sum_BHT1 == 0, 1, sum_BHT1)
    lse = (max_BHT1 + jnp.log(sum_BHT1))[..., 0]
    return (
      _write(out_BLHE, out.transpose(0, 2, 1, 3), row * tile),
      _write(lse_BLH, lse.transpose(0, 2, 1), row * tile),
    )

  carry = jnp.zeros((b, n, h, e), dtype), jnp.zeros((b, n, h), dtype)
  result = lax.fori_loop(0, n // tile, row_body, carry)
  return tuple(
    _restore(x, schedule.query_positions, schedule.n) for x in result
  )


def _backward(schedule, q_BLHK, dout_BLHE, lse_BLH, delta_BLH, k_BLHK, v_BLHE):
  """(dq, dk, dv) of one part, its weights taken against the merged lse."""
  tile, width = schedule.tile, schedule.span * schedule.tile
  rows_in = tuple(
    _arrange(x, schedule.query_positions)
    for x in (q_BLHK, dout_BLHE, lse_BLH, delta_BLH)
  )
  k_BLHK, v_BLHE = (
    _arrange(x, schedule.key_positions) for x in (k_BLHK, v_BLHE)
  )
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  scale = 1 / np.sqrt(q_BLHK.shape[-1])

  def row_body(row, carry):
    dq_BLHK, *dkv = carry
    q_BTHK, dout_BTHE, lse_BTH, delta_BTH = (
      _rows(x, row * tile, tile) for x in rows_in
    )
    lse_BHT1, delta_BHT1 = (
      x.transpose(0, 2, 1)[..., None] for x in (lse_BTH, delta_BTH)
    )

    def body(carry, step):
      dq_BTHK, dk_BLHK, dv_BLHE = carry
      begin = step[1] * tile
      k_BSHK, v_BSHE = (_rows(x, begin, width) for x in (k_BLHK, v_BLHE))
      s_BHTS = _scores(schedule, step, row, q_BTHK, k_BSHK)
      p_BHTS = jnp.exp(s_BHTS - lse_BHT1)
      dp_BHTS = jnp.einsum(
        "bthe,bshe->bhts", dout_BTHE, v_BSHE, **_accumulate(v_BSHE)
      )
      ds_BHTS = p_BHTS * (dp_BHTS - delta_BHT1) * scale
      p_BHTS, ds_BHTS = (x.astype(q_BTHK.dtype) for x in (p_BHTS, ds_BHTS))
      dv_BSHE = jnp.einsum(
        "bhts,bthe->bshe", p_BHTS, dout_BTHE, **_accumulate(v_BSHE)
      )
      dk_BSHK = jnp.einsum(
        "bhts,bthk->bshk", ds_BHTS, q_BTHK, **_accumulate(q_BTHK)
      )
      dq_BTHK += jnp.einsum(
        "bhts,bshk->bthk", ds_BHTS, k_BSHK, **_accumulate(q_BTHK)
      )
      dk_BLHK = _write(dk_BLHK, _rows(dk_BLHK, begin, width) + dk_BSHK, begin)
      dv_BLHE = _write(dv_BLHE, _rows(dv_BLHE, begin, width) + dv_BSHE, begin)
      return dq_BTHK, dk_BLHK, dv_BLHE

    carry = jnp.zeros(q_BTHK.shape, dtype), *dkv
    dq_BTHK, *dkv = _loop_spans(schedule, row, body, carry)
    return _write(dq_BLHK, dq_BTHK, row * tile), *dkv

  num_rows = len(schedule.query_positions) // tile
  carry = tuple(jnp.zeros(x.shape, dtype) for x in (rows_in[0], k_BLHK, v_BLHE))
  dq, dk, dv = lax.fori_loop(0, num_rows, row_body, carry)
  keys = schedule.key_positions
  return (
    _restore(dq, schedule.query_positions, schedule.n),
    _restore(dk, keys, schedule.n),
    _restore(dv, keys, schedule.n),
  )
