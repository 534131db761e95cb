"""The fused kernels of the `triton` executor, in Pallas.

They know nothing of patterns: work lists say which tiles each program of the
grid processes, see `worklists`. Rows are read and written by position. Nothing
is accumulated by atomic operations, so that results are deterministic.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sparse_transformer.attention.contract import Keys, Queries
from sparse_transformer.attention.executors.worklists import Work

LOG2_E = math.log2(math.e)


class _Item:
  """One item of a list, within a kernel."""

  def __init__(self, items, others, masks, mine, other, precision):
    self._precision = precision
    row = pl.program_id(0)
    self.batch = pl.program_id(1)
    self.head, self.tile, self.first, self.middle, self.last, self.slot = (
      items[row, column] for column in range(6)
    )
    self._others, self._masks, self._positions = others, masks, other
    self.is_real, self.at = _read_positions(mine, self.tile)

  def rows(self, ref, at):
    """Rows of an array [B, L, H, ...] at positions [tile]."""
    return ref[self.batch, at, self.head, ...]

  def dot(self, a, b, contract):
    """Product over one axis of each, accumulated in float32."""
    return lax.dot_general(
      a,
      b,
      (((contract[0],), (contract[1],)), ((), ())),
      precision=self._precision,
      preferred_element_type=jnp.float32,
    )

  def sweep(self, body, carry):
    """body(positions of a tile, pairs or None, carry) over the other side."""

    def step(i, carry, masked):
      _, at = _read_positions(self._positions, self._others[i, 0])
      pairs = self._pairs(self._others[i, 1]) if masked else None
      return body(at, pairs, carry)

    for start, stop, masked in (
      (self.first, self.middle, True),
      (self.middle, self.last, False),
    ):
      of_kind = functools.partial(step, masked=masked)
      carry = lax.fori_loop(start, stop, of_kind, carry)
    return carry

  def _pairs(self, number):
    """A mask, unpacked: bool [this side, other side]."""
    words = self._masks[number, :, :]
    tile, count = words.shape
    shape = tile, count, 32
    bit = lax.broadcasted_iota(jnp.int32, shape, 2)
    words = jnp.broadcast_to(words[:, :, None], shape)
    bits = lax.shift_right_logical(words, bit) & 1
    return bits.reshape(tile, tile) != 0

  def store(self, ref, x):
    """Writes rows [tile, ...] into this item's slot."""
    # Out of bounds, since interpret mode writes back what it read where the
    # mask is false: another row may have the same position.
    at = jnp.where(self.is_real, self.at, ref.shape[2])
    where: tuple[Any, ...] = (at, self.head)
    mask = self.is_real
    if x.ndim > 1:
      # Interpret mode takes either slices or index arrays, not both.
      columns = lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
      where = at[:, None], self.head, columns
      mask = jnp.broadcast_to(self.is_real[:, None], x.shape)
    plgpu.store(
      ref.at[self.slot, self.batch, *where], x.astype(ref.dtype), mask=mask
    )


def _read_positions(positions, tile):
  """(which positions of a tile are real, positions that can be read)."""
  found = positions[tile, :]
  return found >= 0, jnp.maximum(found, 0)


def _forward(item, q_ref, k_ref, v_ref, out_ref, lse_ref):
  """Output and log-sum-exp of the rows of an item, by an online softmax."""
  q = item.rows(q_ref, item.at)
  scale = LOG2_E / math.sqrt(q.shape[-1])

  def body(at, pairs, carry):
    out, max_, sum_ = carry
    s = item.dot(q, item.rows(k_ref, at), (1, 1)) * scale
    if pairs is not None:
      s = jnp.where(pairs, s, -jnp.inf)
    new = jnp.maximum(max_, s.max(1))
    # A row may have no keys yet: exp2(-inf - 0) is 0, not NaN.
    shift = new if pairs is None else jnp.where(new == -jnp.inf, 0.0, new)
    p, decay = jnp.exp2(s - shift[:, None]), jnp.exp2(max_ - shift)
    v = item.rows(v_ref, at)
    out = out * decay[:, None] + item.dot(p.astype(v.dtype), v, (1, 0))
    return out, new, sum_ * decay + p.sum(1)

  tile = len(item.at)
  out, max_, sum_ = item.sweep(
    body,
    (
      jnp.zeros((tile, v_ref.shape[-1]), jnp.float32),
      jnp.full((tile,), -jnp.inf, jnp.float32),
      jnp.zeros((tile,), jnp.float32),
    ),
  )
  is_empty = sum_ == 0
  item.store(out_ref, out / jnp.where(is_empty, 1.0, sum_)[:, None])
  lse = (max_ + jnp.log2(jnp.where(is_empty, 1.0, sum_))) / LOG2_E
  item.store(lse_ref, jnp.where(is_empty, -jnp.inf, lse))


def _weights(item, a, b, lse, pairs):
  """exp(scores - lse), 0 outside the pairs: [rows of a, rows of b].

  lse is in base 2: [tile, 1] or [1, tile].
  """
  p = jnp.exp2(item.dot(a, b, (1, 1)) * (LOG2_E / math.sqrt(a.shape[-1])) - lse)
  return p if pairs is None else jnp.where(pairs, p, 0.0)


def _backward_of_queries(
  item, q_ref, dout_ref, lse_ref, delta_ref, k_ref, v_ref, dq_ref
):
  """dq of the rows of an item."""
  q, dout = (item.rows(ref, item.at) for ref in (q_ref, dout_ref))
  lse, delta = (item.rows(ref, item.at) for ref in (lse_ref, delta_ref))
  scale = 1 / math.sqrt(q.shape[-1])
  lse = lse * LOG2_E

  def body(at, pairs, dq):
    k, v = item.rows(k_ref, at), item.rows(v_ref, at)
    p = _weights(item, q, k, lse[:, None], pairs)
    ds = p * (item.dot(dout, v, (1, 1)) - delta[:, None])
    return dq + item.dot(ds.astype(k.dtype), k, (1, 0))

  dq = item.sweep(body, jnp.zeros(q.shape, jnp.float32))
  item.store(dq_ref, dq * scale)


def _backward_of_keys(
  item, q_ref, dout_ref, lse_ref, delta_ref, k_ref, v_ref, dk_ref, dv_ref
):
  """dk and dv of the rows of an item."""
  k, v = item.rows(k_ref, item.at), item.rows(v_ref, item.at)
  scale = 1 / math.sqrt(k.shape[-1])

  def body(at, pairs, carry):
    dk, dv = carry
    q, dout = item.rows(q_ref, at), item.rows(dout_ref, at)
    lse, delta = item.rows(lse_ref, at) * LOG2_E, item.rows(delta_ref, at)
    # Transposed: a row for each key.
    p = _weights(item, k, q, lse[None, :], pairs)
    # dv before ds: both gradients at once would need more registers.
    dv = dv + item.dot(p.astype(dout.dtype), dout, (1, 0))
    ds = p * (item.dot(v, dout, (1, 1)) - delta[None, :])
    return dk + item.dot(ds.astype(q.dtype), q, (1, 0)), dv

  zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  dk, dv = item.sweep(body, zeros)
  item.store(dk_ref, dk * scale)
  item.store(dv_ref, dv)


def forward(
  work: Work, q_BLHK: jax.Array, keys: Keys, interpret: bool
) -> tuple[jax.Array, jax.Array]:
  """(out_SBLHE, lse_SBLH) of each slot, unspecified where not written.

  With `interpret`, the kernel is interpreted instead of compiled.
  """
  # As many rows as queries, of which a device may have more or fewer than keys.
  rows, v = q_BLHK.shape[:3], keys.v
  out_BLHE = jax.ShapeDtypeStruct((*rows, v.shape[-1]), v.dtype)
  lse_BLH = jax.ShapeDtypeStruct(rows, jnp.float32)
  outs, warps = (out_BLHE, lse_BLH), 8 if v.dtype == jnp.float32 else 4
  return _launch(_forward, work, False, (q_BLHK, *keys), outs, warps, interpret)


def backward(
  work: Work, queries: Queries, keys: Keys, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(dq_SBLHK, dk_SBMHK, dv_SBMHE) of each slot, see `forward`."""
  arrays, v = (*queries, *keys), keys.v
  # With 4 warps, wider values spill registers.
  warps = 8 if v.shape[-1] > 64 or v.dtype == jnp.float32 else 4
  (dq,) = _launch(
    _backward_of_queries, work, False, arrays, [queries.q], warps, interpret
  )
  dk, dv = _launch(
    _backward_of_keys, work, True, arrays, keys, warps, interpret
  )
  return dq, dk, dv


def _launch(kernel, work, is_by_key, arrays, outs, num_warps, interpret):
  """[slots, B, L, H, ...] of a kernel, in float32 if there are several slots.

  Its items are tiles of keys if `is_by_key`. It takes `arrays` [B, L, H, ...];
  `outs` are arrays or shapes like the results of one slot.
  """
  lists = work.by_key if is_by_key else work.by_query
  tables = lists.items, lists.others, lists.masks, work.queries, work.keys
  shapes = [
    jax.ShapeDtypeStruct(
      (len(lists.written), *x.shape),
      x.dtype if len(lists.written) == 1 else jnp.float32,
      manual_axis_type=jax.typeof(arrays[0]).manual_axis_type,
    )
    for x in outs
  ]
  # By default, Triton rounds float32 operands to TF32, with 10 bits. Three
  # products of such parts have the accuracy of float32, on tensor cores.
  precision: Any = None
  if arrays[0].dtype == jnp.float32:
    three = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    precision = lax.Precision.HIGHEST if interpret else three

  def run(items, others, masks, queries, keys, *refs):
    sides = (keys, queries) if is_by_key else (queries, keys)
    kernel(_Item(items, others, masks, *sides, precision), *refs)

  return pl.pallas_call(
    run,
    grid=(len(lists.items), len(arrays[0])),
    out_shape=shapes,
    compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
    interpret=interpret,
    name=kernel.__name__.strip("_"),
  )(*map(jnp.asarray, tables), *arrays)
