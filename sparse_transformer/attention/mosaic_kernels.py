"""The fused kernels of the `mosaic` executor, in Pallas for TPUs.

They know nothing of patterns. Each step of the grid processes one tile of
pairs, see `mosaic_tables`: the blocks of an item stay in VMEM from its first
step to its last, which writes its results.

Scores are held as [keys, queries], so that what a query has one of, such as
its log-sum-exp, is a row of lanes, and accumulators whose rows are queries are
transposed, so that no square of scores ever is.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_transformer.attention.mosaic_tables import (
  FIRST,
  FULL,
  LAST,
  PARTIAL,
  SHIFT,
  Launch,
)

LOG2_E = math.log2(math.e)


def _dot(a, b, contract):
  """Product over one axis of each, accumulated in float32."""
  # Otherwise float32 operands would be rounded to bfloat16.
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(
    a,
    b,
    (((contract[0],), (contract[1],)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def _unpack(words):
  """A mask: bool [keys, queries] from bits int32 [keys // 32, queries]."""
  count, tile = words.shape
  shape = count, 32, tile
  bit = lax.broadcasted_iota(jnp.int32, shape, 1)
  found = jnp.broadcast_to(words[...][:, None], shape)
  bits = lax.shift_right_logical(found, bit) & 1
  return bits.reshape(tile, tile) != 0


def _step(codes, masks, start, body, finish):
  """Runs one step of the grid.

  Args:
    codes: see `mosaic_tables.Steps`.
    masks: bits of a partial tile.
    start: called in the first step of an item.
    body: called with the pairs [keys, queries] of a tile, None for all.
    finish: called in the last step of an item.
  """
  code = codes[pl.program_id(1)]
  pl.when(code & FIRST != 0)(start)
  pl.when(code & PARTIAL != 0)(lambda: body(_unpack(masks)))
  pl.when(code & FULL != 0)(lambda: body(None))
  pl.when(code & LAST != 0)(finish)


def _forward(
  items, others, codes, q, k, v, masks, out, lse, out_EL, max_1L, sum_1L
):
  """Output and log-sum-exp of the queries of an item, by an online softmax."""
  del items, others
  scale = LOG2_E / math.sqrt(q.shape[-1])

  def start():
    out_EL[...] = jnp.zeros_like(out_EL)
    max_1L[...] = jnp.full_like(max_1L, -jnp.inf)
    sum_1L[...] = jnp.zeros_like(sum_1L)

  def body(pairs):
    s = _dot(k[...], q[...], (1, 1)) * scale
    if pairs is not None:
      s = jnp.where(pairs, s, -jnp.inf)
    old = max_1L[...]
    new = jnp.maximum(old, s.max(0, keepdims=True))
    # A query may have no keys yet: exp2(-inf - 0) is 0, not NaN.
    shift = jnp.where(new == -jnp.inf, 0.0, new)
    p, decay = jnp.exp2(s - shift), jnp.exp2(old - shift)
    sum_1L[...] = sum_1L[...] * decay + p.sum(0, keepdims=True)
    out_EL[...] = out_EL[...] * decay + _dot(v[...], p.astype(v.dtype), (0, 0))
    max_1L[...] = new

  def finish():
    is_empty = sum_1L[...] == 0
    total = jnp.where(is_empty, 1.0, sum_1L[...])
    out[...] = (out_EL[...] / total).T.astype(out.dtype)
    found = (max_1L[...] + jnp.log2(total)) / LOG2_E
    lse[...] = jnp.where(is_empty, -jnp.inf, found)

  _step(codes, masks, start, body, finish)


def _gradients_of_scores(q, dout, lse, delta, k, v, pairs):
  """(weights, gradients of the scores before scaling): [keys, queries]."""
  scale = LOG2_E / math.sqrt(q.shape[-1])
  p = jnp.exp2(_dot(k[...], q[...], (1, 1)) * scale - lse[...] * LOG2_E)
  if pairs is not None:
    p = jnp.where(pairs, p, 0.0)
  return p, p * (_dot(v[...], dout[...], (1, 1)) - delta[...])


def _backward_of_queries(
  items, others, codes, q, dout, lse, delta, k, v, masks, dq, dq_KL
):
  """dq of the queries of an item."""
  del items, others

  def start():
    dq_KL[...] = jnp.zeros_like(dq_KL)

  def body(pairs):
    _, ds = _gradients_of_scores(q, dout, lse, delta, k, v, pairs)
    dq_KL[...] += _dot(k[...], ds.astype(k.dtype), (0, 0))

  def finish():
    dq[...] = (dq_KL[...] / math.sqrt(q.shape[-1])).T.astype(dq.dtype)

  _step(codes, masks, start, body, finish)


def _backward_of_keys(
  items, others, codes, q, dout, lse, delta, k, v, masks, dk, dv, dk_MK, dv_ME
):
  """dk and dv of the keys of an item."""
  del items, others

  def start():
    dk_MK[...] = jnp.zeros_like(dk_MK)
    dv_ME[...] = jnp.zeros_like(dv_ME)

  def body(pairs):
    p, ds = _gradients_of_scores(q, dout, lse, delta, k, v, pairs)
    dk_MK[...] += _dot(ds.astype(q.dtype), q[...], (1, 0))
    dv_ME[...] += _dot(p.astype(dout.dtype), dout[...], (1, 0))

  def finish():
    dk[...] = (dk_MK[...] / math.sqrt(q.shape[-1])).astype(dk.dtype)
    dv[...] = dv_ME[...].astype(dv.dtype)

  _step(codes, masks, start, body, finish)


def forward(
  launch: Launch,
  masks: jax.Array,
  q_BLHK: jax.Array,
  k_BMHK: jax.Array,
  v_BMHE: jax.Array,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """(out_SBLHE, lse_SBLH) of each slot, with any values where not written.

  Args:
    launch: which tiles; its items are tiles of queries.
    masks: int32 [masks, tile // 32, tile], see `mosaic_tables.Tables`.
    q_BLHK, k_BMHK, v_BMHE: as in `attention.attend`.
    interpret: whether to interpret the kernel instead of compiling it.
  """
  tile, width = launch.tile, v_BMHE.shape[-1]
  out, lse = _launch(
    _forward,
    launch,
    masks,
    [(launch.mine, q_BLHK), (launch.others, k_BMHK), (launch.others, v_BMHE)],
    [((tile, width), v_BMHE.dtype), ((1, tile), jnp.float32)],
    [(width, tile), (1, tile), (1, tile)],
    interpret,
  )
  return launch.restore(out), launch.restore(lse.swapaxes(2, 3))[..., 0]


def backward_of_queries(
  launch: Launch,
  masks: jax.Array,
  of_queries: tuple[jax.Array, ...],
  of_keys: tuple[jax.Array, ...],
  *,
  interpret: bool = False,
) -> jax.Array:
  """dq_SBLHK of each slot, see `forward`.

  Args:
    launch: which tiles; its items are tiles of queries.
    masks: see `forward`.
    of_queries: q_BLHK, dout_BLHE, lse_BLH, delta_BLH.
    of_keys: k_BMHK, v_BMHE.
    interpret: see `forward`.
  """
  q_BLHK = of_queries[0]
  tile, width = launch.tile, q_BLHK.shape[-1]
  (dq,) = _launch(
    _backward_of_queries,
    launch,
    masks,
    [
      *((launch.mine, x) for x in of_queries),
      *((launch.others, x) for x in of_keys),
    ],
    [((tile, width), q_BLHK.dtype)],
    [(width, tile)],
    interpret,
  )
  return launch.restore(dq)


def backward_of_keys(
  launch: Launch,
  masks: jax.Array,
  of_queries: tuple[jax.Array, ...],
  of_keys: tuple[jax.Array, ...],
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """(dk_SBMHK, dv_SBMHE) of each slot; the items are tiles of keys."""
  shapes = [(launch.tile, x.shape[-1]) for x in of_keys]
  dk, dv = _launch(
    _backward_of_keys,
    launch,
    masks,
    [
      *((launch.others, x) for x in of_queries),
      *((launch.mine, x) for x in of_keys),
    ],
    [(shape, x.dtype) for shape, x in zip(shapes, of_keys, strict=True)],
    shapes,
    interpret,
  )
  return launch.restore(dk), launch.restore(dv)


def _launch(kernel, launch, masks, inputs, outs, scratch, interpret):
  """Runs a kernel.

  Args:
    kernel: one of this module.
    launch: its work.
    masks: see `forward`.
    inputs: pairs of blocks and the array [B, L, H, ...] they are taken from.
    outs: shape of a block and dtype of each result.
    scratch: shapes of accumulators.
    interpret: see `forward`.

  Returns:
    Results [B, items, ...], in float32 if there are several slots.
  """
  masks = jnp.asarray(masks)
  arrays = [blocks.take(x) for blocks, x in inputs]
  in_specs = [
    _spec(x, 0 if blocks is launch.mine else 1)
    for (blocks, _), x in zip(inputs, arrays, strict=True)
  ]
  in_specs.append(
    pl.BlockSpec(
      (None, *masks.shape[1:]),
      lambda b, step, items, others, codes: (codes[step] >> SHIFT, 0, 0),
    )
  )
  batch, results = len(arrays[0]), []
  for steps in launch.steps:
    shapes = [
      jax.ShapeDtypeStruct(
        (batch, steps.num_items, *shape),
        dtype if len(launch.rows) == 1 else jnp.float32,
      )
      for shape, dtype in outs
    ]
    call = pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(batch, len(steps.items)),
        in_specs=in_specs,
        out_specs=[_spec(x, 0, steps.first) for x in shapes],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
      ),
      out_shape=shapes,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary")
      ),
      interpret=interpret,
      name=kernel.__name__.strip("_"),
    )
    tables = map(jnp.asarray, (steps.items, steps.others, steps.codes))
    results.append(call(*tables, *arrays, masks))
  if len(results) == 1:
    return results[0]
  return [jnp.concatenate(x, 1) for x in zip(*results, strict=True)]


def _spec(x: Any, table: int, first: int = 0) -> pl.BlockSpec:
  """Blocks of an array [B, blocks, rows, lanes], whose numbers a table has."""

  def index(b, step, *tables):
    return b, tables[table][step] - first, 0, 0

  return pl.BlockSpec((None, None, *x.shape[2:]), index)
