"""The fused kernels of the `triton` executor, in Pallas.

Work lists say which tiles each program of the grid processes, see `items`. Rows
are read and written by position.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sparse_transformer.attention import platforms
from sparse_transformer.attention.contract import Keys, Plan, Queries
from sparse_transformer.attention.executors import kernel_math
from sparse_transformer.attention.executors.kernel_math import LOG2_E

# With fewer, loops wait for all copies: they would not overlap with products.
NUM_STAGES = 5


class _Rows:
  """Rows of the arrays of a side, each read when it is asked for."""

  def __init__(self, read, refs):
    self._read, self._refs = read, refs

  def __getattr__(self, name):
    return self._read(getattr(self._refs, name))


class _Item(kernel_math.Item):
  """One item of a list; `earlier` are (rows, results) of earlier slots."""

  def __init__(self, name, plan, tables, sides, earlier, interpret):
    super().__init__(plan.scores)
    self._is_forward, self._earlier = name == "forward", earlier
    self._interpret = interpret
    items, self._others, self._listed, self._masks, mine = tables
    self._queries, self._keys = sides
    self._is_by_key = name == "backward_of_keys"
    self._mine, self._other = sides[::-1] if self._is_by_key else sides
    row = pl.program_id(0)
    self._batch = pl.program_id(1)
    self._head, tile, self._first, self._middle, self._last, self._slot = (
      items[row, column] for column in range(6)
    )
    found = mine[tile, :]
    self._is_real, self._at = found >= 0, jnp.maximum(found, 0)

  def mine(self):
    return self._rows(self._mine, self._at, self._head)

  def _rows(self, refs, at, head):
    """Rows of arrays [B, L, H, W] or [B, H, L]."""

    def read(ref):
      if ref.ndim == 3:
        return ref[self._batch, head, at]
      return ref[self._batch, at, head, :]

    return _Rows(read, refs)

  def full(self, value, *width):
    return jnp.full((len(self._at), *width), value, jnp.float32)

  def dot(self, a, b, total=None):
    # By default, Triton rounds float32 operands to TF32, with 10 bits. Three
    # products of such parts have the accuracy of float32, on tensor cores.
    precision: Any = None
    if a.dtype == jnp.float32:
      three = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
      precision = lax.Precision.HIGHEST if self._interpret else three
    found = jnp.dot(
      a, b, precision=precision, preferred_element_type=jnp.float32
    )
    return found if total is None else total + found

  def sweep(self, body, carry):
    def step(i, carry, masked):
      at = self._listed[i, :]
      pairs = self._pairs(self._others[i, 1]) if masked else None
      mine, other = self._mine.segments, self._other.segments
      if mine is not None:
        # A branch around tiles whose segments cannot meet would keep Triton
        # from loading tiles in advance, and spill registers.
        mine = mine[self._batch, self._at, 0]
        other = other[self._batch, at, 0]
        same = mine[:, None] == other[None, :]
        pairs = same if pairs is None else pairs & same

      def mask(x, fill):
        return x if pairs is None else jnp.where(pairs, x, fill)

      return body(self._rows(self._other, at, self._other_head(i)), mask, carry)

    for start, stop, masked in (
      (self._first, self._middle, True),
      (self._middle, self._last, False),
    ):
      of_kind = functools.partial(step, masked=masked)
      carry = lax.fori_loop(start, stop, of_kind, carry)
    return carry

  def _other_head(self, i):
    """The head of the other side of a tile."""
    group = self._queries.q.shape[2] // self._keys.k.shape[2]
    if group == 1:
      return self._head
    if self._is_by_key:
      return self._head * group + self._others[i, 2]
    return self._head // group

  def exp2(self, x, factor, minus):
    # As one FMA and one MUFU; denormal results are 0. Triton's own does more to
    # keep them.
    if self._interpret:
      return super().exp2(x, factor, minus)
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

  def start(self, width):
    out, max_, sum_ = super().start(width)
    slots = self._of_slots(0), self._of_slots(1, -jnp.inf)
    for more, lse in zip(*slots, strict=True):
      lse = lse * LOG2_E
      max_, shift, decay = kernel_math.raise_max(max_, lse)
      weight = jnp.exp2(lse - shift)
      out = out * decay[:, None] + more * weight[:, None]
      sum_ = sum_ * decay + weight
    return out, max_, sum_

  def _of_slots(self, number, fill=0.0):
    """The rows of this item in result `number` of each earlier slot."""
    if self._earlier is None:
      return []
    (written, results), found = self._earlier, []
    for slot in range(len(written)):
      ref, mask = results[number], written[slot, self._head, self._at] != 0
      where, mask = self._index(ref, self._at, mask)
      found.append(plgpu.load(ref.at[slot, *where], mask=mask, other=fill))
    return found

  def store(self, refs, *arrays):
    for number, (ref, x) in enumerate(zip(refs, arrays, strict=True)):
      if not self._is_forward:
        x = sum(self._of_slots(number), x)
      # Out of bounds, since interpret mode writes back what it read where the
      # mask is false: another row may have the same position.
      size = ref.shape[2 if x.ndim > 1 else 3]
      at = jnp.where(self._is_real, self._at, size)
      where, mask = self._index(ref, at, self._is_real)
      slot = jnp.maximum(self._slot - 1, 0)
      plgpu.store(ref.at[slot, *where], x.astype(ref.dtype), mask=mask)

  def _index(self, ref, at, mask):
    """(index of rows of one slot [B, L, H, W] or [B, H, L], their mask)."""
    if ref.ndim == 4:
      return (self._batch, self._head, at), mask
    # Interpret mode takes either slices or index arrays, not both.
    columns = lax.broadcasted_iota(jnp.int32, (1, ref.shape[-1]), 1)
    mask = jnp.broadcast_to(mask[:, None], (len(mask), ref.shape[-1]))
    return (self._batch, at[:, None], self._head, columns), mask


def forward(
  plan: Plan, queries: Queries, keys: Keys, interpret: bool
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH); `interpret` the kernels instead of compiling them."""
  # One row for each query: a device may hold more or fewer queries than keys.
  rows, v = queries.q.shape[:3], keys.v
  out_BLHE = jax.ShapeDtypeStruct((*rows, v.shape[-1]), v.dtype)
  lse_BHL = jax.ShapeDtypeStruct((rows[0], rows[2], rows[1]), jnp.float32)
  given = plan, queries, keys, interpret
  out, lse = _launch("forward", *given, [out_BLHE, lse_BHL])
  return out, lse.swapaxes(1, 2)


def backward(
  plan: Plan, queries: Queries, keys: Keys, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(dq_BLHK, dk_BMGK, dv_BMGE), as in `forward`."""
  # [B, H, L], so that the values of a tile are next to each other.
  lse, delta = (x.swapaxes(1, 2) for x in (queries.lse * LOG2_E, queries.delta))
  queries = queries._replace(lse=lse, delta=delta)
  given = plan, queries, keys, interpret
  (dq,) = _launch("backward_of_queries", *given, [queries.q])
  dk, dv = _launch("backward_of_keys", *given, [keys.k, keys.v])
  return dq, dk, dv


def _num_warps(name, v, tile):
  """Warps of a program: with fewer, registers would spill."""
  is_wide = name != "forward" and v.shape[-1] > 64
  of_gpus = {int(x) for x in platforms.compute_capabilities()}
  is_large = tile == 64 and not of_gpus.isdisjoint((8, 10))
  return 8 if is_wide or is_large or v.dtype == jnp.float32 else 4


def _launch(name, plan, queries, keys, interpret, outs):
  """The results, each like one of `outs`; the first slot adds the others'."""
  work, q, is_by_key = plan.tables, queries.q, name == "backward_of_keys"
  lists = work.by_key if is_by_key else work.by_query
  sides = work.queries, work.keys
  mine, other = sides[::-1] if is_by_key else sides
  # The positions of each entry of the lists, so that the address of a row
  # depends on one load: Triton loads in advance through no more than one. On
  # the host if both tables are.
  tiles = lists.others[:, 0]
  if isinstance(tiles, jax.Array):
    other = jnp.asarray(other)
  listed = other[tiles].clip(0)
  tables = lists.others, listed, lists.masks, mine

  def run(tables, queries, keys, earlier, *refs):
    item = _Item(name, plan, tables, (queries, keys), earlier, interpret)
    kernel_math.KERNELS[name](item, refs)

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
        num_warps=_num_warps(name, keys.v, plan.tile),
        num_stages=NUM_STAGES,
      ),
      interpret=interpret,
      name=name,
    )(tuple(map(jnp.asarray, (items, *tables))), queries, keys, earlier)

  sums = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in outs]
  outs = outs if plan.is_whole else sums
  num_slots, n, num_heads = lists.written.shape
  if num_slots == 1:
    return [x[0] for x in launch(lists.items, 1, outs)]
  # Sorted, since tables may be traced: the first slot has one item for each
  # tile of each head. Shares of devices, padded with more, have one slot.
  items = lists.items[(lists.items[:, 5] > 0).argsort(stable=True)]
  count = -(-n // mine.shape[1]) * num_heads
  results = launch(items[count:], num_slots - 1, sums)
  written = jnp.asarray(lists.written[1:].swapaxes(1, 2).astype("int8"))
  return [x[0] for x in launch(items[:count], 1, outs, (written, results))]
