"""The fused kernels of the `triton` backend, in Pallas.

A grid [items, B] has a program for each work item of each sequence. The rows of
the program are the positions of its item. The columns are positions of the
other side: keys if rows are queries, and queries if rows are keys. The program
processes the columns tile by tile. Rows and columns are read and written by
position, so arrays stay in natural order, whatever the order of tiles is. See
`items`.

The loop of a program carries its sums in registers, in float32. Tiles of the
other side pass through shared memory; Triton copies the next tiles while
products run, unless registers spill.

Axes: T rows of a work item, S columns of a tile, W any width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sparse_transformer.attention import platforms
from sparse_transformer.attention.backends.kernel_math import (
  LOG2_E,
  finish_softmax,
  keep_pairs,
  raise_max,
  scale_products,
  unpack,
)
from sparse_transformer.attention.contract import Keys, Plan, Queries

# The number of tiles that are copied in advance. With fewer, loops wait for
# every copy, so copies do not overlap with products.
NUM_STAGES = 5


class _Tables(NamedTuple):
  """The tables of a kernel, in memory; see `items.Lists`."""

  items: Any  # int32 [items, 6]
  tiles: Any  # int32 [tiles, 2 or 3]
  # int32 [tiles, S], the positions of `tiles`. They are stored so that the
  # address of a row depends on a single load, because Triton does not load in
  # advance if it depends on more.
  columns: Any
  masks: Any  # int32 [masks, T, S / 32]
  rows: Any  # int32 [tiles of this side, T], positions, -1 for padding


class _Rows(NamedTuple):
  """Positions of one head of one sequence, which a program reads together."""

  batch: Any
  head: Any
  positions: Any  # int32 [T]

  def load(self, ref: Any) -> jax.Array:
    """Loads [T, W] of an array [B, L, H, W], or [T] of an array [B, H, L].

    Arrays with one number per query have positions on their last axis, so that
    the numbers of a tile are adjacent.
    """
    if ref.ndim == 3:
      return ref[self.batch, self.head, self.positions]
    return ref[self.batch, self.positions, self.head, :]


class _RowProgram:
  """A program of the grid: one work item of one sequence.

  Its rows are queries or, in `_backward_of_keys`, keys. A kernel loads its
  rows, processes the tiles of the other side, and stores the results.

  Args:
    plan: a plan whose tables are `items.Work`.
    is_by_key: whether rows are keys.
    interpret: whether Pallas interprets the kernel.
    tables: references to the tables.
    queries, keys: references to arrays.
    earlier: (written, results) of the other slots, see `load_earlier`; None if
      this program does not add them.

  Attributes: rows: the positions of the item, where padding is replaced by 0.
    scores: how scores are computed from products of queries and keys.
  """

  def __init__(
    self,
    plan,
    is_by_key,
    interpret,
    tables,
    queries,
    keys,
    earlier,
  ):
    self.scores = plan.scores
    self._is_by_key = is_by_key
    self._interpret = interpret
    self._tables = tables
    self._earlier = earlier
    self._group = queries.q.shape[2] // keys.k.shape[2]

    self._row_segments = queries.segments
    self._column_segments = keys.segments
    if is_by_key:
      self._row_segments = keys.segments
      self._column_segments = queries.segments

    item = pl.program_id(0)
    batch = pl.program_id(1)
    head, tile, self._first, self._middle, self._last, self._slot = (
      tables.items[item, column] for column in range(6)
    )

    # Padding reads position 0, which always exists, and is not stored.
    positions = tables.rows[tile, :]
    self._is_row = positions >= 0
    self.rows = _Rows(batch, head, jnp.maximum(positions, 0))

  def for_each_tile(self, body: Callable, carry: Any) -> Any:
    """Runs carry = body(columns, pairs, carry) over the tiles of the item.

    Args:
      body: a function that adds the contribution of a tile to the carry.
        `columns` are `_Rows` of the other side. `pairs` is a mask, bool [T, S],
        or None if all rows meet all columns.
      carry: the sums, a pytree of arrays that stay in registers.

    Returns:
      The carry after the last tile.
    """
    # Full tiles have a separate loop, without masks.
    partial = functools.partial(self._run_tile, body, True)
    full = functools.partial(self._run_tile, body, False)
    carry = lax.fori_loop(self._first, self._middle, partial, carry)
    return lax.fori_loop(self._middle, self._last, full, carry)

  def _run_tile(self, body, is_partial, i, carry):
    """Runs the body on entry i of the tables."""
    positions = self._tables.columns[i, :]

    # Columns that pad a tile are at position 0. They need no check, because a
    # tile that is cut at the end of the sequence is never listed as full, and
    # its mask excludes padding.
    pairs = None
    if is_partial:
      number = self._tables.tiles[i, 1]
      pairs = unpack(self._tables.masks[number, :, :], 1)

    # Tiles without pairs within segments are not skipped, because a branch
    # would prevent Triton from loading tiles in advance, and would spill
    # registers.
    batch = self.rows.batch
    if self._row_segments is not None:
      mine = self._row_segments[batch, self.rows.positions, 0]
      theirs = self._column_segments[batch, positions, 0]
      same = mine[:, None] == theirs[None, :]
      pairs = same if pairs is None else pairs & same

    columns = _Rows(batch, self._head_of_columns(i), positions)
    return body(columns, pairs, carry)

  def _head_of_columns(self, i):
    """Returns the head of the other side for entry i of the tables.

    If rows are queries, this is the KV head that their query head uses. If rows
    are keys, it is one of the query heads that share the KV head; the tables
    list which one.
    """
    # The common case is known while the program is traced, and loads nothing.
    if self._group == 1:
      return self.rows.head
    if self._is_by_key:
      return self.rows.head * self._group + self._tables.tiles[i, 2]
    return self.rows.head // self._group

  def full(self, value: float, *width: int) -> jax.Array:
    """Returns float32 [T] or [T, W], filled with a value."""
    shape = len(self.rows.positions), *width
    return jnp.full(shape, value, jnp.float32)

  def dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies two matrices, and accumulates in float32."""
    # By default, Triton rounds float32 operands to TF32, which has 10 bits of
    # mantissa. Splitting them into TF32 parts and adding three products gives
    # the accuracy of float32, on tensor cores.
    precision: Any = None
    if a.dtype == jnp.float32:
      three = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
      precision = lax.Precision.HIGHEST if self._interpret else three
    return jnp.dot(
      a,
      b,
      precision=precision,
      preferred_element_type=jnp.float32,
    )

  def scaled_dot(self, a: jax.Array, b: jax.Array) -> tuple:
    """Computes scores of rows a and columns b, as `scale_products` does."""
    products = self.dot(a, b.T)
    return scale_products(products, self.scores, a.shape[-1])

  def exp2(
    self,
    x: jax.Array,
    factor: float,
    shift: jax.Array,
  ) -> jax.Array:
    """Computes 2^(factor x - shift), with a shift for each row or column."""
    if self._interpret:
      return jnp.exp2(x * factor - shift)

    # This is one FMA and one MUFU instruction, and turns denormal results into
    # 0. Triton's own exp2 needs more instructions to keep them.
    factors = jnp.full(x.shape, factor, jnp.float32)
    shifts = jnp.broadcast_to(-shift, x.shape)
    (result,) = plgpu.elementwise_inline_asm(
      "{ .reg .f32 t; fma.rn.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t; }",
      args=[x, factors, shifts],
      constraints="=f,f,f,f",
      pack=1,
      result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return result

  def load_earlier(self, number: int, fill: float = 0.0) -> list[jax.Array]:
    """Loads the rows of a result from the other slots.

    Args:
      number: index of the result among the kernel's results.
      fill: the value to return for rows that a slot has not written. The memory
        of these rows is undefined.

    Returns:
      A list of float32 [T, W] or [T], one for each slot.
    """
    if self._earlier is None:
      return []

    # The rows that each slot has written, int8 [slots, H, L], and the results,
    # [slots, B, L, H, W] or [slots, B, H, L].
    written, results = self._earlier
    ref = results[number]
    _, head, positions = self.rows
    loaded = []
    for slot in range(len(written)):
      is_written = written[slot, head, positions] != 0
      index, mask = self._locate(ref, slot, positions, is_written)
      rows = plgpu.load(ref.at[index], mask=mask, other=fill)
      loaded.append(rows)
    return loaded

  def store(self, ref: Any, x: jax.Array) -> None:
    """Writes the rows of a result, [T, W] or [T], to the slot of the item."""
    # Padding is stored out of bounds. Interpret mode would otherwise write back
    # what it has read where the mask is false, but another row may have the
    # same position.
    length = ref.shape[2 if x.ndim > 1 else 3]
    positions = jnp.where(self._is_row, self.rows.positions, length)
    # Slot 0, which is launched last, has separate arrays. Slots 1, 2, ... share
    # arrays, in which they have indices 0, 1, ...
    slot = jnp.maximum(self._slot - 1, 0)
    index, mask = self._locate(ref, slot, positions, self._is_row)
    plgpu.store(ref.at[index], x.astype(ref.dtype), mask=mask)

  def _locate(self, ref, slot, positions, mask):
    """Returns (index, mask) of rows in an array of slots.

    The array is [slots, B, L, H, W] or [slots, B, H, L].
    """
    batch, head, _ = self.rows
    if ref.ndim == 4:
      return (slot, batch, head, positions), mask

    # Interpret mode supports either slices or index arrays, but not both.
    width = ref.shape[-1]
    columns = lax.broadcasted_iota(jnp.int32, (1, width), 1)
    positions = positions[:, None]

    mask = mask[:, None]
    mask = jnp.broadcast_to(mask, (len(mask), width))
    return (slot, batch, positions, head, columns), mask


def _forward(program, queries, keys, out_ref, lse_ref):
  """Computes output and log-sum-exp of queries, by an online softmax.

  Reads queries.q [B, L, H, K], keys.k [B, M, G, K] and keys.v [B, M, G, E];
  writes out [slots, B, L, H, E] and lse [slots, B, H, L].
  """
  q = program.rows.load(queries.q)

  # The loop carries the weighted sum of values [T, E], the largest score [T]
  # and the sum of weights [T].
  def meet_keys(columns, pairs, carry):
    accumulator, running_max, normalizer = carry

    # Scores do not include their factor, because exp2 applies it in the same
    # instruction that subtracts the shift.
    k = columns.load(keys.k)
    scores, factor, _ = program.scaled_dot(q, k)
    scores = keep_pairs(scores, pairs, -jnp.inf)

    # Earlier sums are scaled down when the maximum rises.
    tile_max = scores.max(1) * factor
    new_max, shift, decay = raise_max(running_max, tile_max)
    weights = program.exp2(scores, factor, shift[:, None])
    normalizer = normalizer * decay + weights.sum(1)

    # Tensor cores need weights in the dtype of the values, but the normalizer
    # sums the weights before they are rounded. Values are loaded only here, so
    # that they do not occupy registers at the same time as the scores.
    v = columns.load(keys.v)
    weights = weights.astype(v.dtype)
    decayed = accumulator * decay[:, None]
    accumulator = decayed + program.dot(weights, v)
    return accumulator, new_max, normalizer

  start = _start_softmax(program, out_ref.shape[-1])
  carry = program.for_each_tile(meet_keys, start)
  accumulator, running_max, normalizer = carry

  # Divide each output once, rather than each weight.
  total, lse = finish_softmax(running_max, normalizer)
  program.store(out_ref, accumulator / total[:, None])
  program.store(lse_ref, lse)


def _start_softmax(program, width):
  """Returns the initial carry of the loop over keys.

  The carry already includes the results of earlier slots.

  Args:
    program: the program of a tile of queries.
    width: width of values, E.

  Returns:
    (accumulator [T, E], maximum [T], normalizer [T]), float32. Without earlier
    slots, these are 0, -inf and 0.
  """
  accumulator = program.full(0.0, width)
  running_max = program.full(-jnp.inf)
  normalizer = program.full(0.0)

  # A slot acts like a key whose score is the slot's log-sum-exp, and whose
  # value is the slot's output.
  earlier = zip(
    program.load_earlier(0),
    program.load_earlier(1, -jnp.inf),
    strict=True,
  )
  for out, lse in earlier:
    score = lse * LOG2_E
    running_max, shift, decay = raise_max(running_max, score)
    weight = jnp.exp2(score - shift)
    accumulator = accumulator * decay[:, None]
    accumulator += out * weight[:, None]
    normalizer = normalizer * decay + weight
  return accumulator, running_max, normalizer


def _backward_of_queries(program, queries, keys, dq_ref):
  """Computes dq of a tile of queries; log-sum-exps are to base 2.

  In addition to the arrays of `_forward`, it reads queries.dout [B, L, H, E],
  queries.lse and queries.delta [B, H, L]. It writes dq [slots, B, L, H, K].
  """
  q = program.rows.load(queries.q)
  dout = program.rows.load(queries.dout)
  lse = program.rows.load(queries.lse)
  delta = program.rows.load(queries.delta)

  def meet_keys(columns, pairs, dq):
    k = columns.load(keys.k)
    v = columns.load(keys.v)
    scores, factor, slope = program.scaled_dot(q, k)

    # Weights are relative to the log-sum-exp over all keys, so no maximum is
    # needed, and weights of pairs are at most 1. Weights that are not pairs may
    # exceed 1, but they are masked afterwards.
    weights = program.exp2(scores, factor, lse[:, None])
    weights = keep_pairs(weights, pairs, 0.0)

    # Differentiate through the softmax, ds = p (dout v^T - delta), and through
    # the soft cap.
    if slope is not None:
      weights = weights * slope
    dweights = program.dot(dout, v.T) - delta[:, None]
    dscores = (weights * dweights).astype(k.dtype)
    return dq + program.dot(dscores, k)

  # The factor of the scores is applied once, to the sum. Applied to 16-bit
  # gradients of scores, it would round them once more.
  width = q.shape[-1]
  zeros = program.full(0.0, width)
  dq = program.for_each_tile(meet_keys, zeros)
  dq = dq * program.scores.factor(width)
  dq = sum(program.load_earlier(0), dq)
  program.store(dq_ref, dq)


def _backward_of_keys(program, queries, keys, dk_ref, dv_ref):
  """Computes dk and dv of a tile of keys; scores have shape [keys, queries].

  Each tile of keys has one program, which processes all its queries in a fixed
  order. Sums therefore need no atomic additions, and are the same in every run.

  It reads the same arrays as `_backward_of_queries`. It writes dk [slots, B, M,
  G, K] and dv [slots, B, M, G, E].
  """
  k = program.rows.load(keys.k)
  v = program.rows.load(keys.v)

  def meet_queries(columns, pairs, carry):
    dk, dv = carry

    q = columns.load(queries.q)
    dout = columns.load(queries.dout)
    scores, factor, slope = program.scaled_dot(k, q)

    # This is the same as for dq, except that here each column has its own
    # log-sum-exp.
    lse = columns.load(queries.lse)
    delta = columns.load(queries.delta)
    weights = program.exp2(scores, factor, lse[None, :])
    weights = keep_pairs(weights, pairs, 0.0)

    # dv is computed before dk, because both products at once would need more
    # registers.
    dv += program.dot(weights.astype(dout.dtype), dout)
    if slope is not None:
      weights = weights * slope
    dweights = program.dot(v, dout.T) - delta[None, :]
    dscores = (weights * dweights).astype(q.dtype)
    dk += program.dot(dscores, q)
    return dk, dv

  # As for dq, the factor is applied once, to the sum. dv has no factor.
  width = k.shape[-1]
  dk = program.full(0.0, width)
  dv = program.full(0.0, v.shape[-1])
  dk, dv = program.for_each_tile(meet_queries, (dk, dv))
  dk = dk * program.scores.factor(width)
  dk = sum(program.load_earlier(0), dk)
  dv = sum(program.load_earlier(1), dv)
  program.store(dk_ref, dk)
  program.store(dv_ref, dv)


def forward(
  plan: Plan,
  queries: Queries,
  keys: Keys,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """Computes attention over the pairs of a plan.

  Args:
    plan: a plan whose tables are `items.Work`.
    queries: q_BLHK, and their segments if there are any.
    keys: k_BMGK, v_BMGE, and their segments if there are any.
    interpret: whether to interpret the kernels instead of compiling them.

  Returns:
    (out_BLHE, lse_BLH). out is in the dtype of the values if no other results
    are added to it (see `Plan.is_whole`), and in float32 otherwise.
  """
  # The results have a row for each query. A device may store more or fewer
  # queries than keys.
  batch, num_queries, num_heads, _ = queries.q.shape
  v = keys.v
  out_BLHE = jax.ShapeDtypeStruct(
    (batch, num_queries, num_heads, v.shape[-1]),
    v.dtype,
  )
  lse_BHL = jax.ShapeDtypeStruct(
    (batch, num_heads, num_queries),
    jnp.float32,
  )

  out, lse = _launch(
    _forward,
    plan,
    queries,
    keys,
    [out_BLHE, lse_BHL],
    interpret,
  )
  return out, lse.swapaxes(1, 2)


def backward(
  plan: Plan,
  queries: Queries,
  keys: Keys,
  interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes (dq_BLHK, dk_BMGK, dv_BMGE), with arguments as in `forward`.

  `queries` must also contain dout_BLHE, lse_BLH and delta_BLH, see
  `contract.Queries`.
  """
  # Arrays become [B, H, L], so that the values of a tile are adjacent. lse is
  # converted to base 2 here, once for each query, rather than in the kernels
  # for each pair.
  lse_BLH = queries.lse * LOG2_E
  queries = queries._replace(
    lse=lse_BLH.swapaxes(1, 2),
    delta=queries.delta.swapaxes(1, 2),
  )

  # There are two kernels, because in a single kernel, programs of different
  # keys would have to add to dq, in an order that is not fixed.
  (dq,) = _launch(
    _backward_of_queries,
    plan,
    queries,
    keys,
    [queries.q],
    interpret,
  )
  dk, dv = _launch(
    _backward_of_keys,
    plan,
    queries,
    keys,
    [keys.k, keys.v],
    interpret,
  )
  return dq, dk, dv


def _num_warps(kernel, v, tile):
  """Returns the number of warps with which a program spills no registers.

  A warp has 32 threads, and a thread at most 255 registers.
  """
  generations = {int(x) for x in platforms.compute_capabilities()}
  needs_more = (
    v.dtype == jnp.float32
    or (kernel is not _forward and v.shape[-1] > 64)
    or (tile == 64 and not generations.isdisjoint((8, 10)))
  )
  return 8 if needs_more else 4


def _launch(kernel, plan, queries, keys, outs, interpret):
  """Runs a kernel on all work items.

  Args:
    kernel: one of `_forward`, `_backward_of_queries`, `_backward_of_keys`.
    plan: a plan whose tables are `items.Work`.
    queries: arrays [B, L, H, ...], or [B, H, L] if they have one number per
      query.
    keys: arrays [B, M, G, ...].
    outs: arrays with the shapes and dtypes of the results. Results are in
      float32 instead if other results are added to them, see `Plan.is_whole`.
    interpret: whether to interpret the kernel instead of compiling it.

  Returns:
    The results. If there are several slots, the first slot runs last. This slot
    covers all rows, and its programs add the results of the other slots to
    their own.
  """
  work = plan.tables
  is_by_key = kernel is _backward_of_keys
  lists = work.by_key if is_by_key else work.by_query
  rows = work.keys if is_by_key else work.queries
  columns = work.queries if is_by_key else work.keys

  # The positions of each entry. If both tables are on the host, this one is
  # too, and is a constant of the program.
  tiles = lists.tiles[:, 0]
  if isinstance(tiles, jax.Array):
    columns = jnp.asarray(columns)
  columns = columns[tiles].clip(0)

  # Pallas passes references to the arguments of `call`, in the same structure,
  # followed by references to the results.
  def run_program(tables, queries, keys, earlier, *refs):
    program = _RowProgram(
      plan=plan,
      is_by_key=is_by_key,
      interpret=interpret,
      tables=tables,
      queries=queries,
      keys=keys,
      earlier=earlier,
    )
    kernel(program, queries, keys, *refs)

  def run_slots(items, num_slots, outs, earlier=None):
    tables = _Tables(
      items=items,
      tiles=lists.tiles,
      columns=columns,
      masks=lists.masks,
      rows=rows,
    )

    # Within `jax.shard_map`, results vary over the same axes as the inputs.
    vma = jax.typeof(queries.q).manual_axis_type
    shapes = [
      jax.ShapeDtypeStruct((num_slots, *x.shape), x.dtype, manual_axis_type=vma)
      for x in outs
    ]
    call = pl.pallas_call(
      run_program,
      grid=(len(items), len(queries.q)),
      out_shape=shapes,
      compiler_params=plgpu.CompilerParams(
        num_warps=_num_warps(kernel, keys.v, plan.tile),
        num_stages=NUM_STAGES,
      ),
      interpret=interpret,
      name=kernel.__name__.removeprefix("_"),
    )
    tables = jax.tree.map(jnp.asarray, tables)
    return call(tables, queries, keys, earlier)

  # Results that are added to others stay in float32, so that sums are rounded
  # only once.
  sums = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in outs]
  outs = outs if plan.is_whole else sums

  # Most patterns have a single order of tiles, and need no second call.
  num_slots, n, num_heads = lists.written.shape
  if num_slots == 1:
    return [x[0] for x in run_slots(lists.items, 1, outs)]

  # Tables may be traced, so the items of the first slot are selected by
  # sorting: it has one item for each tile of each head. Tables of several
  # devices, which are padded with more items, have only one slot.
  items = lists.items[(lists.items[:, 5] > 0).argsort(stable=True)]
  num_tiles = -(-n // rows.shape[1])
  count = num_tiles * num_heads

  # The first slot runs last, and adds the results of the others.
  results = run_slots(items[count:], num_slots - 1, sums)
  written = jnp.asarray(lists.written[1:].swapaxes(1, 2).astype("int8"))
  earlier = written, results
  return [x[0] for x in run_slots(items[:count], 1, outs, earlier)]
