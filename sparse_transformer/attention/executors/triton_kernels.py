"""The fused kernels of the `triton` executor, in Pallas.

They know nothing of patterns: work lists say which tiles each program of the
grid processes, see `items`. Rows are read and written by position. Nothing
is accumulated by atomic operations, so that results are deterministic.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sparse_transformer.attention.contract import Keys, Plan, Queries
from sparse_transformer.attention.executors import softmax_base_2
from sparse_transformer.attention.executors.softmax_base_2 import LOG2_E

# With fewer, loops wait for all copies: they would not overlap with products.
NUM_STAGES = 5


class _Item:
  """One item of a list, within a kernel."""

  def __init__(
    self, tables, segments, group, earlier, scores, interpret, precision
  ):
    items, self._others, self._listed, self._masks, mine = tables
    self._segments, self._group, self._earlier = segments, group, earlier
    self._scores, self._interpret = scores, interpret
    self._precision = precision
    row = pl.program_id(0)
    self.batch = pl.program_id(1)
    self.head, self.tile, self.first, self.middle, self.last, self.slot = (
      items[row, column] for column in range(6)
    )
    found = mine[self.tile, :]
    self.is_real, self.at = found >= 0, jnp.maximum(found, 0)

  def rows(self, ref):
    """The rows of this item of an array [B, L, H, W] or [B, H, L]."""
    return self._read(ref, self.at, self.head)

  def _read(self, ref, at, head):
    if ref.ndim == 3:
      return ref[self.batch, head, at]
    return ref[self.batch, at, head, :]

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
    """body(rows, pairs or None, carry) over tiles of the other side.

    rows(ref) are the rows of a tile of an array, as in `rows`.
    """

    def step(i, carry, masked):
      at = self._listed[i, :]
      pairs = self._pairs(self._others[i, 1]) if masked else None
      mine, other = self._segments
      if mine is not None:
        # A branch around tiles whose segments cannot meet would keep Triton
        # from loading tiles in advance, and spill registers.
        mine, other = mine[self.batch, self.at, 0], other[self.batch, at, 0]
        same = mine[:, None] == other[None, :]
        pairs = same if pairs is None else pairs & same
      head = self._other_head(i)
      return body(lambda ref: self._read(ref, at, head), pairs, carry)

    for start, stop, masked in (
      (self.first, self.middle, True),
      (self.middle, self.last, False),
    ):
      of_kind = functools.partial(step, masked=masked)
      carry = lax.fori_loop(start, stop, of_kind, carry)
    return carry

  def _other_head(self, i):
    """The head of the other side of a tile."""
    if self._group == 1:
      return self.head
    if self._others.shape[1] == 2:
      return self.head // self._group
    return self.head * self._group + self._others[i, 2]

  def scale(self, x):
    """The factor of products of queries and keys, one of which is x."""
    return self._scores.factor(x.shape[-1])

  def scores(self, a, b):
    """Those of rows, see `softmax_base_2.scaled`."""
    s = self.dot(a, b, (1, 1))
    return softmax_base_2.scaled(s, self._scores, a.shape[-1])

  def exp2(self, x, factor=1.0, minus=0.0):
    """2^(factor x - minus), of float32, as one FMA and one MUFU.

    Denormal results are 0. Triton's own does more to keep them.
    """
    if self._interpret:
      return jnp.exp2(x * factor - minus)
    more = [jnp.full(x.shape, factor), jnp.broadcast_to(-minus, x.shape)]
    (result,) = plgpu.elementwise_inline_asm(
      "{ .reg .f32 t; fma.rn.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t; }",
      args=[x, *(y.astype(jnp.float32) for y in more)],
      constraints="=f,f,f,f",
      pack=1,
      result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return result

  def _pairs(self, number):
    """A mask, unpacked: bool [this side, other side]."""
    words = self._masks[number, :, :]
    tile, count = words.shape
    shape = tile, count, 32
    bit = lax.broadcasted_iota(jnp.int32, shape, 2)
    words = jnp.broadcast_to(words[:, :, None], shape)
    bits = lax.shift_right_logical(words, bit) & 1
    return bits.reshape(tile, count * 32) != 0

  def earlier(self, number, fill=0.0):
    """The rows of this item in result `number` of each earlier slot."""
    if self._earlier is None:
      return []
    (written, results), found = self._earlier, []
    for slot in range(len(written)):
      ref, mask = results[number], written[slot, self.head, self.at] != 0
      where, mask = self._index(ref, self.at, mask)
      found.append(plgpu.load(ref.at[slot, *where], mask=mask, other=fill))
    return found

  def store(self, ref, x):
    """Writes rows [tile, W] or [tile] into this item's slot."""
    # Out of bounds, since interpret mode writes back what it read where the
    # mask is false: another row may have the same position.
    at = jnp.where(self.is_real, self.at, ref.shape[2 if x.ndim > 1 else 3])
    where, mask = self._index(ref, at, self.is_real)
    slot = jnp.maximum(self.slot - 1, 0)
    plgpu.store(ref.at[slot, *where], x.astype(ref.dtype), mask=mask)

  def _index(self, ref, at, mask):
    """(index of rows of one slot [B, L, H, W] or [B, H, L], their mask)."""
    if ref.ndim == 4:
      return (self.batch, self.head, at), mask
    # Interpret mode takes either slices or index arrays, not both.
    columns = lax.broadcasted_iota(jnp.int32, (1, ref.shape[-1]), 1)
    mask = jnp.broadcast_to(mask[:, None], (len(mask), ref.shape[-1]))
    return (self.batch, at[:, None], self.head, columns), mask


def _forward(item, queries, keys, out_ref, lse_ref):
  """Output and log-sum-exp of the rows of an item, by an online softmax."""
  q = item.rows(queries.q)

  def body(rows, pairs, carry):
    out, max_, sum_ = carry
    s, factor, _ = item.scores(q, rows(keys.k))
    if pairs is not None:
      s = jnp.where(pairs, s, -jnp.inf)
    new, shift, decay = softmax_base_2.raise_max(max_, s.max(1) * factor)
    p = item.exp2(s, factor, shift[:, None])
    v = rows(keys.v)
    out = out * decay[:, None] + item.dot(p.astype(v.dtype), v, (1, 0))
    return out, new, sum_ * decay + p.sum(1)

  tile = len(item.at)
  out = jnp.zeros((tile, keys.v.shape[-1]), jnp.float32)
  max_ = jnp.full((tile,), -jnp.inf, jnp.float32)
  sum_ = jnp.zeros((tile,), jnp.float32)
  slots = item.earlier(0), item.earlier(1, -jnp.inf)
  for more, lse in zip(*slots, strict=True):
    lse = lse * LOG2_E
    max_, shift, decay = softmax_base_2.raise_max(max_, lse)
    weight = jnp.exp2(lse - shift)
    out = out * decay[:, None] + more * weight[:, None]
    sum_ = sum_ * decay + weight
  out, max_, sum_ = item.sweep(body, (out, max_, sum_))
  total, lse = softmax_base_2.total_and_lse(max_, sum_)
  item.store(out_ref, out / total[:, None])
  item.store(lse_ref, lse)


def _weights(item, a, b, lse, pairs):
  """(weights, their product with the slope): [rows of a, rows of b].

  Weights are exp(scores - lse), 0 outside the pairs. lse is in base 2: [tile,
  1] or [1, tile].
  """
  s, factor, slope = item.scores(a, b)
  p = item.exp2(s, factor, lse)
  p = p if pairs is None else jnp.where(pairs, p, 0.0)
  return p, p if slope is None else p * slope


def _backward_of_queries(item, queries, keys, dq_ref):
  """dq of the rows of an item."""
  q, dout = item.rows(queries.q), item.rows(queries.dout)
  lse, delta = item.rows(queries.lse), item.rows(queries.delta)
  lse = lse * LOG2_E

  def body(rows, pairs, dq):
    k, v = rows(keys.k), rows(keys.v)
    _, p = _weights(item, q, k, lse[:, None], pairs)
    ds = p * (item.dot(dout, v, (1, 1)) - delta[:, None])
    return dq + item.dot(ds.astype(k.dtype), k, (1, 0))

  dq = item.sweep(body, jnp.zeros(q.shape, jnp.float32))
  item.store(dq_ref, sum(item.earlier(0), dq * item.scale(q)))


def _backward_of_keys(item, queries, keys, dk_ref, dv_ref):
  """dk and dv of the rows of an item."""
  k, v = item.rows(keys.k), item.rows(keys.v)

  def body(rows, pairs, carry):
    dk, dv = carry
    q, dout = rows(queries.q), rows(queries.dout)
    lse, delta = rows(queries.lse) * LOG2_E, rows(queries.delta)
    # Transposed: a row for each key.
    p, sloped = _weights(item, k, q, lse[None, :], pairs)
    # dv before ds: both gradients at once would need more registers.
    dv = dv + item.dot(p.astype(dout.dtype), dout, (1, 0))
    ds = sloped * (item.dot(v, dout, (1, 1)) - delta[None, :])
    return dk + item.dot(ds.astype(q.dtype), q, (1, 0)), dv

  zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  dk, dv = item.sweep(body, zeros)
  item.store(dk_ref, sum(item.earlier(0), dk * item.scale(k)))
  item.store(dv_ref, sum(item.earlier(1), dv))


def forward(
  plan: Plan, queries: Queries, keys: Keys, interpret: bool
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH); `interpret` the kernels instead of compiling them."""
  # As many rows as queries, of which a device may have more or fewer than keys.
  rows, v = queries.q.shape[:3], keys.v
  out_BLHE = jax.ShapeDtypeStruct((*rows, v.shape[-1]), v.dtype)
  lse_BHL = jax.ShapeDtypeStruct((rows[0], rows[2], rows[1]), jnp.float32)
  given = plan, queries, keys, interpret
  out, lse = _launch(_forward, *given, [out_BLHE, lse_BHL])
  return out, lse.swapaxes(1, 2)


def backward(
  plan: Plan, queries: Queries, keys: Keys, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(dq_BLHK, dk_BMGK, dv_BMGE), as in `forward`."""
  # [B, H, L], so that the values of a tile are next to each other.
  lse, delta = (x.swapaxes(1, 2) for x in (queries.lse, queries.delta))
  queries = queries._replace(lse=lse, delta=delta)
  given = plan, queries, keys, interpret
  (dq,) = _launch(_backward_of_queries, *given, [queries.q])
  dk, dv = _launch(_backward_of_keys, *given, [keys.k, keys.v])
  return dq, dk, dv


def _num_warps(kernel, v):
  """Warps of a program: with fewer, registers would spill."""
  is_wide = kernel is not _forward and v.shape[-1] > 64
  return 8 if is_wide or v.dtype == jnp.float32 else 4


def _launch(kernel, plan, queries, keys, interpret, outs):
  """The results of a kernel, each like one of `outs`.

  If there are several slots, their items are launched first, except those of
  the first slot, which holds all rows: these are launched last, and start from
  the results of the others.
  """
  work, q, is_by_key = plan.tables, queries.q, kernel is _backward_of_keys
  lists = work.by_key if is_by_key else work.by_query
  mine, other = work.queries, work.keys
  if is_by_key:
    mine, other = other, mine
  # The positions of each entry of the lists, so that the address of a row
  # depends on one load: Triton loads in advance through no more than one. On
  # the host if both tables are.
  tiles = lists.others[:, 0]
  if isinstance(tiles, jax.Array):
    other = jnp.asarray(other)
  listed = other[tiles].clip(0)
  tables = lists.others, listed, lists.masks, mine
  run = _on_items(kernel, plan, is_by_key, queries, keys, interpret)

  def launch(items, num_slots, outs, earlier=None):
    shapes = [
      jax.ShapeDtypeStruct(
        (num_slots, *x.shape),
        x.dtype,
        manual_axis_type=jax.typeof(q).manual_axis_type,
      )
      for x in outs
    ]
    return pl.pallas_call(
      run,
      grid=(len(items), len(q)),
      out_shape=shapes,
      compiler_params=plgpu.CompilerParams(
        num_warps=_num_warps(kernel, keys.v),
        num_stages=NUM_STAGES,
      ),
      interpret=interpret,
      name=kernel.__name__.strip("_"),
    )(tuple(map(jnp.asarray, (items, *tables))), queries, keys, earlier)

  num_slots, n, num_heads = lists.written.shape
  if num_slots == 1:
    return [x[0] for x in launch(lists.items, 1, outs)]
  # Sorted, since tables may be traced: the first slot has one item for each
  # tile of each head. Shares of devices, padded with more, have one slot.
  items = lists.items[(lists.items[:, 5] > 0).argsort(stable=True)]
  count = -(-n // mine.shape[1]) * num_heads
  sums = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in outs]
  results = launch(items[count:], num_slots - 1, sums)
  written = jnp.asarray(lists.written[1:].swapaxes(1, 2).astype("int8"))
  return [x[0] for x in launch(items[:count], 1, outs, (written, results))]


def _on_items(kernel, plan, is_by_key, queries, keys, interpret):
  """A kernel as a function of tables, inputs and results."""
  # By default, Triton rounds float32 operands to TF32, with 10 bits. Three
  # products of such parts have the accuracy of float32, on tensor cores.
  precision: Any = None
  if queries.q.dtype == jnp.float32:
    three = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    precision = lax.Precision.HIGHEST if interpret else three
  group = queries.q.shape[2] // keys.k.shape[2]

  def run(tables, queries, keys, earlier, *refs):
    sides = (keys, queries) if is_by_key else (queries, keys)
    segments = [x.segments for x in sides]
    item = _Item(
      *(tables, segments, group, earlier, plan.scores, interpret, precision)
    )
    kernel(item, queries, keys, *refs)

  return run
