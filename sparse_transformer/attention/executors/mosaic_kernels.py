"""The fused kernels of the `mosaic` executor, in Pallas for TPUs.

They know nothing of patterns. Each step of the grid processes one tile of
pairs, see `mosaic_tables`: the block of an item stays in VMEM from its first
step to its last, which writes its results.

A block holds a column for each position, so that widths below 128 waste no
lanes. Scores are [keys, queries]: values per query, such as the log-sum-exp,
are a row. Only blocks are transposed, never scores.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_transformer.attention.contract import Keys, Queries
from sparse_transformer.attention.executors import mosaic_tables

LOG2_E = math.log2(math.e)
ITEMS, OTHERS, CODES = range(3)  # tables of `mosaic_tables.Steps`


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
  """Runs a step: `start` and `finish` in the first and last of an item.

  body(pairs) gets the pairs [keys, queries] of a tile, None for all.
  """
  code = codes[pl.program_id(1)]
  pl.when(code & mosaic_tables.FIRST != 0)(start)
  pl.when(code & mosaic_tables.PARTIAL != 0)(lambda: body(_unpack(masks)))
  pl.when(code & mosaic_tables.FULL != 0)(lambda: body(None))
  pl.when(code & mosaic_tables.LAST != 0)(finish)


def _forward(codes, q, k, v, masks, out, lse, out_EL, max_1L, sum_1L):
  """Output and log-sum-exp of the queries of an item, by an online softmax."""
  scale = LOG2_E / math.sqrt(len(q))

  def start():
    out_EL[...] = jnp.zeros_like(out_EL)
    max_1L[...] = jnp.full_like(max_1L, -jnp.inf)
    sum_1L[...] = jnp.zeros_like(sum_1L)

  def body(pairs):
    s = _dot(k[...], q[...], (0, 0)) * scale
    if pairs is not None:
      s = jnp.where(pairs, s, -jnp.inf)
    old = max_1L[...]
    new = jnp.maximum(old, s.max(0, keepdims=True))
    # A query may have no keys yet: exp2(-inf - 0) is 0, not NaN.
    shift = jnp.where(new == -jnp.inf, 0.0, new)
    p, decay = jnp.exp2(s - shift), jnp.exp2(old - shift)
    sum_1L[...] = sum_1L[...] * decay + p.sum(0, keepdims=True)
    out_EL[...] = out_EL[...] * decay + _dot(v[...], p.astype(v.dtype), (1, 0))
    max_1L[...] = new

  def finish():
    is_empty = sum_1L[...] == 0
    total = jnp.where(is_empty, 1.0, sum_1L[...])
    out[...] = (out_EL[...] / total).astype(out.dtype)
    found = (max_1L[...] + jnp.log2(total)) / LOG2_E
    lse[...] = jnp.where(is_empty, -jnp.inf, found)

  _step(codes, masks, start, body, finish)


def _gradients_of_scores(q, dout, lse, delta, k, v, pairs):
  """(weights, gradients of the scores before scaling): [keys, queries]."""
  scale = LOG2_E / math.sqrt(len(q))
  p = jnp.exp2(_dot(k[...], q[...], (0, 0)) * scale - lse[...] * LOG2_E)
  if pairs is not None:
    p = jnp.where(pairs, p, 0.0)
  return p, p * (_dot(v[...], dout[...], (0, 0)) - delta[...])


def _backward_of_queries(codes, q, dout, lse, delta, k, v, masks, dq, dq_KL):
  """dq of the queries of an item."""

  def start():
    dq_KL[...] = jnp.zeros_like(dq_KL)

  def body(pairs):
    _, ds = _gradients_of_scores(q, dout, lse, delta, k, v, pairs)
    dq_KL[...] += _dot(k[...], ds.astype(k.dtype), (1, 0))

  def finish():
    dq[...] = (dq_KL[...] / math.sqrt(len(q))).astype(dq.dtype)

  _step(codes, masks, start, body, finish)


def _backward_of_keys(
  codes, k, v, q, dout, lse, delta, masks, dk, dv, dk_MK, dv_ME
):
  """dk and dv of the keys of an item."""

  def start():
    dk_MK[...] = jnp.zeros_like(dk_MK)
    dv_ME[...] = jnp.zeros_like(dv_ME)

  def body(pairs):
    p, ds = _gradients_of_scores(q, dout, lse, delta, k, v, pairs)
    dk_MK[...] += _dot(ds.astype(q.dtype), q[...], (1, 1))
    dv_ME[...] += _dot(p.astype(dout.dtype), dout[...], (1, 1))

  def finish():
    dk[...] = (dk_MK[...] / math.sqrt(len(q))).T.astype(dk.dtype)
    dv[...] = dv_ME[...].T.astype(dv.dtype)

  _step(codes, masks, start, body, finish)


def forward(
  tables: mosaic_tables.Tables, q_BLHK: jax.Array, keys: Keys, interpret: bool
) -> tuple[jax.Array, jax.Array]:
  """See `triton_kernels.forward`; `tables` say which pairs."""
  tile, width = tables.queries.tile, keys.v.shape[-1]
  out, lse = _launch(
    _forward,
    tables.by_query,
    (tables.queries, [tables.queries.take(q_BLHK)]),
    [tables.keys.take(x) for x in keys],
    tables.masks,
    [(width, keys.v.dtype), (1, jnp.float32)],
    [(width, tile), (1, tile), (1, tile)],
    interpret,
  )
  return out, lse[..., 0]


def backward(
  tables: mosaic_tables.Tables, queries: Queries, keys: Keys, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(dq_SBLHK, dk_SBMHK, dv_SBMHE) of each slot, see `forward`."""
  tile = tables.queries.tile
  of_queries = [tables.queries.take(x) for x in queries]
  of_keys = [tables.keys.take(x) for x in keys]
  of_dq, *of_dk_dv = ((x.shape[-1], x.dtype) for x in (queries.q, *keys))
  (dq,) = _launch(
    _backward_of_queries,
    tables.by_query,
    (tables.queries, of_queries),
    of_keys,
    tables.masks,
    [of_dq],
    [(of_dq[0], tile)],
    interpret,
  )
  dk, dv = _launch(
    _backward_of_keys,
    tables.by_key,
    (tables.keys, of_keys),
    of_queries,
    tables.masks,
    of_dk_dv,
    [(tile, width) for width, _ in of_dk_dv],
    interpret,
  )
  return dq, dk, dv


def _launch(kernel, launch, mine, others, masks, outs, scratch, interpret):
  """[slots, B, L, H, K] of a kernel, in float32 if there are several slots.

  `mine` is the side of the items, and the blocks [B, blocks, K, tile] that are
  read on it; `others` are those of the other side. `outs` has the width and the
  dtype of each result, `scratch` the shapes of accumulators.
  """

  def mask(b, step, *tables):
    return tables[CODES][step] >> mosaic_tables.SHIFT, 0, 0

  side, of_mine = mine
  arrays, masks = [*of_mine, *others], jnp.asarray(masks)
  in_specs = [
    *(_blocks(x, ITEMS) for x in of_mine),
    *(_blocks(x, OTHERS) for x in others),
    pl.BlockSpec((None, *masks.shape[1:]), mask),
  ]
  pieces = []
  for steps in launch.steps:
    shapes = [
      jax.ShapeDtypeStruct(
        (len(arrays[0]), steps.num_blocks, width, side.tile),
        dtype if len(launch.groups) == 1 else jnp.float32,
        manual_axis_type=jax.typeof(arrays[0]).manual_axis_type,
      )
      for width, dtype in outs
    ]
    run = pl.pallas_call(
      lambda items, others, *refs: kernel(*refs),  # the two choose blocks
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(len(arrays[0]), len(steps.items)),
        in_specs=in_specs,
        out_specs=[_blocks(x, ITEMS, steps.first) for x in shapes],
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
    pieces.append(run(*tables, *arrays, masks))
  return [
    jnp.stack(
      [side.restore(jnp.concatenate(x, 1), chosen) for chosen in launch.groups]
    )
    for x in zip(*pieces, strict=True)
  ]


def _blocks(x: Any, table: int, first: int = 0) -> pl.BlockSpec:
  """Blocks of [B, blocks, K, tile], by the numbers in one of the tables."""

  def index(b, step, *tables):
    return b, tables[table][step] - first, 0, 0

  return pl.BlockSpec((None, None, *x.shape[2:]), index)
