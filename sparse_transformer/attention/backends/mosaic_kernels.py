"""The fused kernels of the `mosaic` backend, in Pallas for TPUs.

A grid [B, steps] has a step for each sequence and each tile of each item. The
steps of an item are consecutive, so that the item's block stays in VMEM from
the first step to the last, and results are written to HBM only once.

A block is [width, positions], with a column for each position. The last axis of
a register has 128 lanes. If this axis were the width, narrow heads would leave
many lanes idle. Scores are [keys, queries], so that the maxima, sums and
log-sum-exps of queries are rows, which are broadcast along sublanes. Only
blocks are ever transposed, never scores.

Axes: T positions of a tile of queries, S positions of a tile of keys; T = S.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_transformer.attention.backends import block_tables
from sparse_transformer.attention.backends.kernel_math import (
  LOG2_E,
  finish_softmax,
  keep_pairs,
  raise_max,
  scale_products,
  unpack,
)
from sparse_transformer.attention.contract import Keys, Plan, Queries, Scores

# The table of `block_tables.Grid` that contains the block indices of a side.
ROWS, COLUMNS = range(2)


class _Step(NamedTuple):
  """The inputs of a grid step. All but the code are references to VMEM.

  Pallas copies the blocks of the next step while a step runs. It copies nothing
  if the next step uses the same block.
  """

  scores: Scores
  code: jax.Array  # see `block_tables.FIRST`
  queries: Any  # `Queries` of blocks: q [K, T], dout [E, T], others [1, T]
  keys: Any  # `Keys` of blocks: k [K, S], v [E, S], segments [1, S]
  masks: Any  # int32 [S / 32, T]

  def scaled_dot(self) -> tuple:
    """Computes the scores [S, T], in the form that `scale_products` returns."""
    q = self.queries.q
    products = _dot(self.keys.k[...], q[...], 0, 0)
    return scale_products(products, self.scores, len(q))

  def run(
    self,
    start: Callable,
    body: Callable,
    finish: Callable,
  ) -> None:
    """Calls the functions that apply to this step.

    Args:
      start: initializes sums in VMEM, at the first step of an item.
      body: adds a tile, if the step has one. Its argument `pairs` is bool [S,
        T], or None if all queries meet all keys.
      finish: writes the results, at the last step of an item.
    """
    # An item without tiles has a single step, which only starts and finishes.
    code = self.code
    pl.when(code & block_tables.FIRST != 0)(start)

    # Full tiles have a separate branch, without masks.
    @pl.when(code & block_tables.PARTIAL != 0)
    def _():
      self._run_within_segments(body, unpack(self.masks[...], 0))

    @pl.when(code & block_tables.FULL != 0)
    def _():
      self._run_within_segments(body, None)

    pl.when(code & block_tables.LAST != 0)(finish)

  def _run_within_segments(self, body, pairs):
    """Runs the body if queries and keys of the tile may share a segment."""
    if self.queries.segments is None:
      return body(pairs)

    # Documents are consecutive, so the segments of tiles from different
    # documents mostly have ranges that do not overlap. A skipped tile is still
    # copied.
    q = self.queries.segments[...]
    k = self.keys.segments[...]
    can_meet = (q.min() <= k.max()) & (k.min() <= q.max())

    # The row of key segments becomes a column. Only whole tiles can be
    # transposed, so it is broadcast first.
    tile = q.shape[1]
    same = jnp.broadcast_to(k, (tile, tile)).T == q

    @pl.when(can_meet)
    def _():
      body(same if pairs is None else pairs & same)


def _dot(a, b, axis_of_a, axis_of_b):
  """Contracts one axis of each matrix, and accumulates in float32."""
  # By default, float32 operands would be rounded to bfloat16.
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  contracted = (axis_of_a,), (axis_of_b,)
  return lax.dot_general(
    a,
    b,
    (contracted, ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def _forward(step, out_ref, lse_ref, accumulator, running_max, normalizer):
  """Computes output and log-sum-exp of queries, by an online softmax.

  Args:
    step: what the step reads.
    out_ref, lse_ref: references for the results, [E, T] and [1, T].
    accumulator: the weighted sum of values so far, float32 [E, T] in VMEM.
    running_max: the largest score so far, to base 2, float32 [1, T].
    normalizer: the sum of weights so far, float32 [1, T].
  """

  # The sums of an item are in scratch memory, which persists between its steps.
  def start():
    accumulator[...] = jnp.zeros_like(accumulator)
    running_max[...] = jnp.full_like(running_max, -jnp.inf)
    normalizer[...] = jnp.zeros_like(normalizer)

  def meet_keys(pairs):
    scores, factor, _ = step.scaled_dot()
    scores = keep_pairs(scores, pairs, -jnp.inf)

    # The maximum is over keys, axis 0. The factor is positive, so it can be
    # applied to the maximum, with one product per query.
    v = step.keys.v
    tile_max = scores.max(0, keepdims=True) * factor
    new_max, shift, decay = raise_max(running_max[...], tile_max)
    weights = jnp.exp2(scores * factor - shift)
    tile_sum = weights.sum(0, keepdims=True)

    # Earlier sums are scaled down when the maximum rises. The normalizer sums
    # the weights before they are rounded to the dtype of the values.
    weights = weights.astype(v.dtype)
    new = _dot(v[...], weights, 1, 0)
    accumulator[...] = accumulator[...] * decay + new
    normalizer[...] = normalizer[...] * decay + tile_sum
    running_max[...] = new_max

  def finish():
    total, lse = finish_softmax(running_max[...], normalizer[...])
    lse_ref[...] = lse
    out = accumulator[...] / total
    out_ref[...] = out.astype(out_ref.dtype)

  step.run(start, meet_keys, finish)


def _gradients_of_scores(step, pairs):
  """Recomputes the weights of a tile, and differentiates its scores.

  With weights p, ds = p * (dout v^T - delta), where delta is dout · out minus
  the gradient of the log-sum-exp (see `vjp.backward`).

  Args:
    step: what the step reads.
    pairs: bool [S, T], or None for all pairs.

  Returns:
    (weights, gradients of q · k), float32 [S, T]. The gradients do not yet
    include the factor of the scores. Kernels apply this factor only once, to
    the sum over all tiles.
  """
  queries = step.queries
  scores, factor, slope = step.scaled_dot()

  # The log-sum-exp over all keys replaces the maximum. Weights that are not
  # pairs may exceed 1, but they are masked afterwards.
  weights = jnp.exp2(scores * factor - queries.lse[...] * LOG2_E)
  weights = keep_pairs(weights, pairs, 0.0)

  # Differentiate through the softmax and the soft cap.
  dweights = _dot(step.keys.v[...], queries.dout[...], 0, 0)
  dscores = weights * (dweights - queries.delta[...])
  if slope is not None:
    dscores = dscores * slope
  return weights, dscores


def _backward_of_queries(step, dq_ref, dq):
  """Computes dq [K, T] of a block of queries, summed in float32 in VMEM."""

  def start():
    dq[...] = jnp.zeros_like(dq)

  def meet_keys(pairs):
    k = step.keys.k
    _, dscores = _gradients_of_scores(step, pairs)

    # [K, S] times [S, T] gives dq in the form in which it is stored, so it need
    # not be transposed at the end.
    dscores = dscores.astype(k.dtype)
    dq[...] += _dot(k[...], dscores, 1, 0)

  def finish():
    width = len(dq)
    scaled = dq[...] * step.scores.factor(width)
    dq_ref[...] = scaled.astype(dq_ref.dtype)

  step.run(start, meet_keys, finish)


def _backward_of_keys(step, dk_ref, dv_ref, dk, dv):
  """Computes dk [K, S] and dv [E, S] of a block of keys.

  They are summed in float32 in VMEM, in transposed form: [S, K] and [S, E].
  """

  def start():
    dk[...] = jnp.zeros_like(dk)
    dv[...] = jnp.zeros_like(dv)

  def meet_queries(pairs):
    q = step.queries.q
    dout = step.queries.dout
    weights, dscores = _gradients_of_scores(step, pairs)

    # [S, T] is multiplied by the transposes of blocks [K, T] and [E, T], so
    # sums over queries need not transpose scores either.
    dscores = dscores.astype(q.dtype)
    weights = weights.astype(dout.dtype)
    dk[...] += _dot(dscores, q[...], 1, 1)
    dv[...] += _dot(weights, dout[...], 1, 1)

  def finish():
    width = len(step.queries.q)
    scaled = dk[...] * step.scores.factor(width)

    # Sums are transposed once per item, rather than once per tile.
    dk_ref[...] = scaled.T.astype(dk_ref.dtype)
    dv_ref[...] = dv[...].T.astype(dv_ref.dtype)

  step.run(start, meet_queries, finish)


def launch(
  name: str,
  plan: Plan,
  queries: Queries,
  keys: Keys,
  outs: Any,
  interpret: bool,
) -> list[jax.Array]:
  """Runs a kernel on blocks, one call for each grid.

  Args:
    name: "forward", "backward_of_queries" or "backward_of_keys".
    plan: a plan whose tables are `BlockTables`.
    queries: blocks [B, blocks, width, tile] from `block_tables.to_blocks`.
    keys: blocks of the same form.
    outs: arrays [B, L, H, W] or [B, L, H], or their shapes and dtypes. They
      determine the widths and dtypes of the results. If results of other plans
      are added to these results (see `Plan.is_whole`), they stay in float32.
    interpret: whether to interpret the kernel instead of compiling it.

  Returns:
    The blocks of each result, [B, blocks, width, tile].
  """
  tile = plan.tile
  widths = [1 if x.ndim == 3 else x.shape[3] for x in outs]

  # Results of other plans may be added to these, and sums should be rounded
  # only once.
  dtypes = [x.dtype for x in outs]
  if not plan.is_whole:
    dtypes = [np.promote_types(x, np.float32) for x in dtypes]

  # The items of a grid are its rows, which are queries, or keys for dk and dv.
  tables = plan.tables
  grids = tables.by_query
  of_queries, of_keys = ROWS, COLUMNS

  # Scratch memory stores the sums over the steps of an item.
  if name == "forward":
    kernel: Callable = _forward
    scratch = [(widths[0], tile), (1, tile), (1, tile)]
  elif name == "backward_of_queries":
    kernel = _backward_of_queries
    scratch = [(widths[0], tile)]
  else:
    kernel = _backward_of_keys
    scratch = [(tile, width) for width in widths]
    grids = tables.by_key
    of_queries, of_keys = COLUMNS, ROWS

  # The arguments are the tables, followed by blocks, results and scratch
  # memory. The tables are in scalar memory, where index maps read them before a
  # step begins.
  def run_step(rows, columns, codes, queries, keys, masks, *refs):
    del rows, columns  # index maps use them to select blocks
    step = _Step(
      scores=plan.scores,
      code=codes[pl.program_id(1)],
      queries=queries,
      keys=keys,
      masks=masks,
    )
    kernel(step, *refs)

  masks = jnp.asarray(tables.masks)
  batch = len(queries.q)
  # Within `jax.shard_map`, results vary over the same axes as the inputs.
  vma = jax.typeof(queries.q).manual_axis_type

  # Each grid has its own call, because the tables of all steps may not fit in
  # scalar memory.
  pieces = []
  for grid in grids:
    shapes = [
      jax.ShapeDtypeStruct(
        (batch, grid.num_blocks, width, tile),
        dtype,
        manual_axis_type=vma,
      )
      for width, dtype in zip(widths, dtypes, strict=True)
    ]
    grid_spec = pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(batch, len(grid.rows)),
      in_specs=[
        _blocks(queries, of_queries),
        _blocks(keys, of_keys),
        pl.BlockSpec((None, *masks.shape[1:]), _mask_of_step),
      ],
      out_specs=_blocks(shapes, ROWS, grid.first),
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    )
    call = pl.pallas_call(
      run_step,
      grid_spec=grid_spec,
      out_shape=shapes,
      # Sequences may run on any core, but the steps of an item must run one
      # after another on the same core.
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary")
      ),
      interpret=interpret,
      name=name,
    )
    results = call(
      jnp.asarray(grid.rows),
      jnp.asarray(grid.columns),
      jnp.asarray(grid.codes),
      queries,
      keys,
      masks,
    )
    pieces.append(results)

  # The grids divide the blocks in order, and each grid has written its own
  # blocks.
  return [jnp.concatenate(x, 1) for x in zip(*pieces, strict=True)]


def _blocks(arrays, table, first=0):
  """Returns specs of arrays [B, blocks, width, tile], one block per step.

  Args:
    arrays: a pytree of arrays, or of their shapes.
    table: the table with the index of a step's block, `ROWS` or `COLUMNS`.
    first: the index of the first block that the arrays contain; 0 unless they
      contain only the blocks of one grid.
  """

  def index(batch, step, *tables):
    return batch, tables[table][step] - first, 0, 0

  def of_array(x):
    _, _, width, tile = x.shape
    return pl.BlockSpec((None, None, width, tile), index)

  return jax.tree.map(of_array, arrays)


def _mask_of_step(batch, step, rows, columns, codes):
  """Returns the index of a step's mask in [masks, S / 32, T]."""
  return codes[step] >> block_tables.SHIFT, 0, 0
