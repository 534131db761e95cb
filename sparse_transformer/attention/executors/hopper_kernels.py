"""The fused kernels of the `hopper` executor, in Pallas for Mosaic GPU.

One warpgroup of an item's program, the producer, copies tiles of the other side
to shared memory in advance. The others, the consumers, compute 64 rows of the
item each. Barriers say when a buffer is full, and when it is free again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparse_transformer.attention.contract import Plan
from sparse_transformer.attention.executors import block_tables, kernel_math
from sparse_transformer.attention.executors.kernel_math import (
  LOG2_E,
  by_column,
  by_row,
)

ROWS = 64  # of a warpgroup: those of its matrix products
STAGES = 3  # buffers for tiles of the other side
# Registers of each thread of a producer, and of a consumer if there are two.
FEW, MANY = 40, 232


class _Tables(NamedTuple):
  """What items do, in global memory; see `block_tables`."""

  items: Any  # `ranges` of `Grid`
  others: Any  # of `Grid`
  codes: Any
  masks: Any  # of `BlockTables`


class _Buffers(NamedTuple):
  """Shared memory, and barriers."""

  mine: Any  # the block of an item
  others: Any  # blocks of the other side
  masks: Any
  results: Any
  arrived: Any  # the block of the item is there
  full: Any  # of each stage
  free: Any


class _Program(kernel_math.Item):
  """One item, within a kernel, as seen by one of its warpgroups."""

  def __init__(self, tables, blocks, buffers, is_by_key, scores, interpret):
    super().__init__(scores)
    self._tables, self._blocks, self._buffers = tables, blocks, buffers
    self._is_by_key, self._interpret = is_by_key, interpret
    program, batch = lax.axis_index("program"), blocks[0][0].shape[0]
    # The longest items of all sequences come first.
    row, self._batch = lax.div(program, batch), lax.rem(program, batch)
    self._block, self._first, self._middle, self._last = (
      tables.items[row, column] for column in range(4)
    )
    self._group = lax.axis_index("warpgroup")
    self._rows = pl.ds(self._group * ROWS, ROWS)

  def mine(self):
    """The rows of this warpgroup, once they are there."""
    plgpu.barrier_wait(self._buffers.arrived)
    return jax.tree.map(lambda x: x.at[self._rows], self._buffers.mine)

  def produce(self):
    """Copies the block of the item, and all others as buffers become free."""
    tables, buffers = self._tables, self._buffers
    mine, others = self._blocks

    def copy(block, barrier, source, target):
      plgpu.copy_gmem_to_smem(source.at[self._batch, block], target, barrier)

    copy_mine = functools.partial(copy, self._block, buffers.arrived)
    jax.tree.map(copy_mine, mine, buffers.mine)

    def step(i, stage, masked, carry):
      full, free = buffers.full.at[stage], buffers.free.at[stage]
      # Read now, not once the buffer is free.
      block, number = tables.others[i], tables.codes[i] >> block_tables.SHIFT
      is_reused = i - self._first >= STAGES
      pl.when(is_reused)(lambda: plgpu.barrier_wait(free))
      copy_other = functools.partial(copy, block, full)
      targets = jax.tree.map(lambda x: x.at[stage], buffers.others)
      jax.tree.map(copy_other, others, targets)
      if masked:
        mask = tables.masks.at[number], buffers.masks.at[stage]
        plgpu.copy_gmem_to_smem(*mask, full)
      else:
        plgpu.barrier_arrive(full)
      return carry

    self._loop(step, None)

    def wait(i, carry):
      plgpu.barrier_wait(buffers.free.at[self._stage(i)])
      return carry

    # The interpreter of jax 0.11 requires that each arrival is seen.
    unseen = jnp.maximum(self._first, self._last - STAGES)
    lax.fori_loop(unseen, self._last, wait, None)

  def sweep(self, body, carry):
    buffers = self._buffers
    tile = buffers.masks.shape[2]
    # With a soft cap, gradients of a larger tile would spill registers.
    size = ROWS if self._is_by_key and self._scores.softcap else tile

    def step(i, stage, masked, carry):
      plgpu.barrier_wait(buffers.full.at[stage])
      for first in range(0, tile, size):
        at = stage, pl.ds(first, size)
        other = jax.tree.map(lambda x, at=at: x.at[at], buffers.others)
        mask = functools.partial(self._mask, at, masked, other)
        carry = body(other, mask, carry)
      if masked or self._is_by_key or other.segments is not None:
        # Loads and TMA are different proxies: without a fence, the copy that
        # reuses a buffer could overtake them.
        plgpu.commit_smem()
      plgpu.barrier_arrive(buffers.free.at[stage])
      return carry

    return self._loop(step, carry)

  def _stage(self, i):
    return lax.rem(i - self._first, STAGES)

  def _loop(self, step, carry):
    """step(i, stage, masked, carry) over partial tiles, then full ones."""
    for start, stop, masked in (
      (self._first, self._middle, True),
      (self._middle, self._last, False),
    ):

      def run(i, carry, masked=masked):
        return step(i, self._stage(i), masked, carry)

      carry = lax.fori_loop(start, stop, run, carry)
    return carry

  def _mask(self, at, masked, other, x, fill):
    """x [rows, columns] with `fill` in place of what is not a pair."""
    is_pair = self._pairs(at, x.shape) if masked else None
    mine = self._buffers.mine.segments
    if mine is not None:
      rows, columns = mine.at[self._rows], other.segments
      same = by_row(self.rows(rows), x) == by_column(self.columns(columns), x)
      is_pair = same if is_pair is None else is_pair & same
    return x if is_pair is None else jnp.where(is_pair, x, fill)

  def _pairs(self, at, shape):
    """The pairs of a partial tile, unpacked: bool [rows, columns]."""
    stage, columns = at
    masks = self._buffers.masks.at[stage]  # a bit for each key
    axis = 0 if self._is_by_key else 1
    key = plgpu.broadcasted_iota(
      jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA
    )

    def words(number):
      if self._is_by_key:
        word = self._group * (ROWS // 32) + number
        return by_column(self.columns(masks.at[word, columns]), key)
      word = columns.start // 32 + number
      return by_row(self.rows(masks.at[word, self._rows]), key)

    bits = words(0)
    for number in range(1, shape[axis] // 32):
      bits = jnp.where(key < 32 * number, bits, words(number))
    return lax.shift_right_logical(bits, key & 31) & 1 != 0

  def dot(self, a, b, total=None):
    # b is in shared memory.
    if self._interpret and isinstance(a, jax.Array):
      # The interpreter needs both operands in shared memory, so b is loaded.
      # Loads need a fence before b is overwritten; on a GPU, wgmma needs none.
      found = jnp.dot(a, b[...], preferred_element_type=jnp.float32)
      plgpu.commit_smem()
      return found if total is None else total + found

    def compute(result):
      plgpu.wgmma(result, a, b)
      return result[...]

    if total is None:
      return pl.run_scoped(compute, plgpu.ACC((a.shape[0], b.shape[1])))
    run = pl.run_state(lambda result: plgpu.wgmma(result, a, b))
    return run(plgpu.ACC.init(total))

  def rows(self, x):
    return plgpu.load(x, layout=plgpu.Layout.WGMMA.reduce(1))

  def columns(self, x):
    return plgpu.load(x, layout=plgpu.Layout.WGMMA.reduce(0))

  def full(self, value, *width):
    layout = plgpu.Layout.WGMMA if width else plgpu.Layout.WGMMA.reduce(1)
    x = jnp.full((ROWS, *width), value, jnp.float32)
    return plgpu.layout_cast(x, layout)

  @staticmethod
  def tanh(x):
    """jnp.tanh, which the compiler would round to 11 bits."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))

  def store(self, refs, *arrays):
    buffers = [x.at[self._rows] for x in self._buffers.results]
    for x, buffer in zip(arrays, buffers, strict=True):
      buffer[...] = x.astype(buffer.dtype)
    plgpu.commit_smem()
    for buffer, ref in zip(buffers, refs, strict=True):
      target = ref.at[self._batch, self._block, self._rows]
      plgpu.copy_smem_to_gmem(buffer, target)
    plgpu.wait_smem_to_gmem(0)


def launch(
  name: str, plan: Plan, blocks: Any, outs: Any, interpret: bool
) -> list[jax.Array]:
  """See `block_executor.BlockExecutor.kernels`."""
  kernel, tables = kernel_math.KERNELS[name], plan.tables
  mine, others = blocks
  if name != "forward":
    mine = mine._replace(lse=mine.lse * LOG2_E)
  batch, is_by_key = len(mine.q), name == "backward_of_keys"
  if is_by_key:
    mine, others = others, mine
  (steps,) = tables.by_key if is_by_key else tables.by_query
  consumers = plan.tile // ROWS
  shapes = [
    jax.ShapeDtypeStruct(
      (batch, steps.num_blocks, plan.tile, *[width] * (width > 0)), dtype
    )
    for width, dtype in outs
  ]

  def run(given, blocks, *results, buffers):
    item = _Program(given, blocks, buffers, is_by_key, plan.scores, interpret)
    is_producer = lax.axis_index("warpgroup") == consumers

    @pl.when(is_producer)
    def _():
      if consumers > 1:
        plgpu.set_max_registers(FEW, action="decrease")
      item.produce()

    @pl.when(~is_producer)
    def _():
      if consumers > 1:
        plgpu.set_max_registers(MANY, action="increase")
      kernel(item, results)

  run.__name__ = name
  of_tables = steps.ranges, steps.others, steps.codes, tables.masks
  found = plgpu.kernel(
    run,
    out_type=shapes,
    scratch_types=dict(buffers=_buffers(mine, others, tables.masks, shapes)),
    grid=(steps.num_blocks * batch,),
    grid_names=("program",),
    num_threads=consumers + 1,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=plgpu.InterpretGPUParams(detect_races=True)
    if interpret
    else None,
  )(_Tables(*map(jnp.asarray, of_tables)), (mine, others))
  # Within `jax.shard_map`, Mosaic GPU does not say that results vary.
  axes = tuple(jax.typeof(blocks[0].q).manual_axis_type.varying)
  return [lax.pcast(x, axes, to="varying") for x in found]


def _buffers(mine, others, masks, results):
  """Shared memory and barriers for items of `mine`."""
  consumers = results[0].shape[2] // ROWS
  num_mine, num_others = (len(jax.tree.leaves(x)) for x in (mine, others))
  return _Buffers(
    jax.tree.map(_buffer, mine),
    jax.tree.map(functools.partial(_buffer, stages=(STAGES,)), others),
    plgpu.SMEM((STAGES, *masks.shape[1:]), masks.dtype),
    [*map(_buffer, results)],
    plgpu.Barrier(num_arrivals=num_mine),
    # The blocks of a tile, and its mask, if it has any.
    plgpu.Barrier(num_arrivals=num_others + 1, num_barriers=STAGES),
    plgpu.Barrier(num_arrivals=consumers, num_barriers=STAGES),
  )


def _buffer(block, stages=()):
  """Shared memory for a block, tiled and swizzled as products need it."""
  shape, size = (*stages, *block.shape[2:]), block.dtype.itemsize
  if block.ndim < 4:
    return plgpu.SMEM(shape, block.dtype)
  swizzle = plgpu.find_swizzle(shape[-1] * size * 8)
  # mypy thinks that these classes are abstract: they derive from a protocol.
  tiling = plgpu.TilingTransform((8, swizzle // size))  # type: ignore[abstract]
  swizzling = plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
  return plgpu.SMEM(shape, block.dtype, transforms=(tiling, swizzling))
