"""The fused kernels of the `mosaic` executor, in Pallas for TPUs.

The block of an item stays in VMEM from its first step to its last. It holds a
column for each position, so that widths below 128 waste no lanes. Scores are
[keys, queries]: values per query are a row. Only blocks are transposed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_transformer.attention.contract import Plan
from sparse_transformer.attention.executors import block_tables, kernel_math
from sparse_transformer.attention.executors.kernel_math import LOG2_E

ITEMS, OTHERS, CODES = range(3)  # tables of `block_tables.Grid`


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


def _step(code, masks, segments, start, body, finish):
  """Runs a step: body(pairs) unless its segments cannot meet; None for all."""
  of_queries, of_keys = segments

  def run(pairs):
    if of_queries is None:
      return body(pairs)
    q, k = of_queries[...], of_keys[...]
    meet = (q.min() <= k.max()) & (k.min() <= q.max())
    # A column of keys, from a row: blocks are transposed in whole tiles.
    tile = q.shape[1]
    same = jnp.broadcast_to(k, (tile, tile)).T == q
    pl.when(meet)(lambda: body(same if pairs is None else pairs & same))

  pl.when(code & block_tables.FIRST != 0)(start)
  pl.when(code & block_tables.PARTIAL != 0)(lambda: run(_unpack(masks)))
  pl.when(code & block_tables.FULL != 0)(lambda: run(None))
  pl.when(code & block_tables.LAST != 0)(finish)


def _scores(q, k, scores):
  """The scores [keys, queries], see `kernel_math.scaled`."""
  return kernel_math.scaled(_dot(k[...], q[...], (0, 0)), scores, len(q))


def _forward(scores, code, queries, keys, masks, out, lse, *scratch):
  """Output and log-sum-exp of the queries of an item, by an online softmax."""
  out_EL, max_1L, sum_1L = scratch

  def start():
    out_EL[...] = jnp.zeros_like(out_EL)
    max_1L[...] = jnp.full_like(max_1L, -jnp.inf)
    sum_1L[...] = jnp.zeros_like(sum_1L)

  def body(pairs):
    s, factor, _ = _scores(queries.q, keys.k, scores)
    if pairs is not None:
      s = jnp.where(pairs, s, -jnp.inf)
    v, found = keys.v, s.max(0, keepdims=True) * factor
    new, shift, decay = kernel_math.raise_max(max_1L[...], found)
    p = jnp.exp2(s * factor - shift)
    sum_1L[...] = sum_1L[...] * decay + p.sum(0, keepdims=True)
    out_EL[...] = out_EL[...] * decay + _dot(v[...], p.astype(v.dtype), (1, 0))
    max_1L[...] = new

  def finish():
    total, lse[...] = kernel_math.total_and_lse(max_1L[...], sum_1L[...])
    out[...] = (out_EL[...] / total).astype(out.dtype)

  _step(code, masks, (queries.segments, keys.segments), start, body, finish)


def _gradients_of_scores(scores, queries, keys, pairs):
  """(weights, gradients of the scores before scaling): [keys, queries]."""
  s, factor, slope = _scores(queries.q, keys.k, scores)
  p = jnp.exp2(s * factor - queries.lse[...] * LOG2_E)
  if pairs is not None:
    p = jnp.where(pairs, p, 0.0)
  dp = _dot(keys.v[...], queries.dout[...], (0, 0)) - queries.delta[...]
  ds = p * dp
  return p, ds if slope is None else ds * slope


def _backward_of_queries(scores, code, queries, keys, masks, dq, dq_KL):
  """dq of the queries of an item."""

  def start():
    dq_KL[...] = jnp.zeros_like(dq_KL)

  def body(pairs):
    _, ds = _gradients_of_scores(scores, queries, keys, pairs)
    dq_KL[...] += _dot(keys.k[...], ds.astype(keys.k.dtype), (1, 0))

  def finish():
    factor = scores.factor(len(queries.q))
    dq[...] = (dq_KL[...] * factor).astype(dq.dtype)

  _step(code, masks, (queries.segments, keys.segments), start, body, finish)


def _backward_of_keys(scores, code, queries, keys, masks, dk, dv, dk_MK, dv_ME):
  """dk and dv of the keys of an item."""

  def start():
    dk_MK[...] = jnp.zeros_like(dk_MK)
    dv_ME[...] = jnp.zeros_like(dv_ME)

  def body(pairs):
    p, ds = _gradients_of_scores(scores, queries, keys, pairs)
    q, dout = queries.q, queries.dout
    dk_MK[...] += _dot(ds.astype(q.dtype), q[...], (1, 1))
    dv_ME[...] += _dot(p.astype(dout.dtype), dout[...], (1, 1))

  def finish():
    factor = scores.factor(len(queries.q))
    dk[...] = (dk_MK[...] * factor).T.astype(dk.dtype)
    dv[...] = dv_ME[...].T.astype(dv.dtype)

  _step(code, masks, (queries.segments, keys.segments), start, body, finish)


def launch(
  name: str, plan: Plan, blocks: Any, outs: Any, interpret: bool
) -> list[jax.Array]:
  """Runs one of "forward", "backward_of_queries", "backward_of_keys" on blocks.

  Returns the blocks of each result; `outs` has their widths (0: none) and
  dtypes.
  """
  (queries, keys), tables, tile = blocks, plan.tables, plan.tile
  widths, row = [max(1, width) for width, _ in outs], (1, tile)
  of_sides = (ITEMS, OTHERS)
  if name == "forward":
    kernel, scratch = _forward, [(widths[0], tile), row, row]
  elif name == "backward_of_queries":
    kernel, scratch = _backward_of_queries, [(widths[0], tile)]
  else:
    kernel, scratch = _backward_of_keys, [(tile, width) for width in widths]
    of_sides = (OTHERS, ITEMS)
  masks = jnp.asarray(tables.masks)
  pieces = []
  for steps in tables.by_query if of_sides[0] == ITEMS else tables.by_key:
    shapes = [
      jax.ShapeDtypeStruct(
        (len(queries.q), steps.num_blocks, width, tile),
        dtype,
        manual_axis_type=jax.typeof(queries.q).manual_axis_type,
      )
      for width, (_, dtype) in zip(widths, outs, strict=True)
    ]
    run = pl.pallas_call(
      # The first two tables choose blocks.
      lambda items, others, codes, *refs: kernel(
        plan.scores, codes[pl.program_id(1)], *refs
      ),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(len(queries.q), len(steps.items)),
        in_specs=[
          *(
            jax.tree.map(functools.partial(_blocks, table=table), x)
            for x, table in zip(blocks, of_sides, strict=True)
          ),
          _masks(masks),
        ],
        out_specs=[_blocks(x, ITEMS, steps.first) for x in shapes],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
      ),
      out_shape=shapes,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary")
      ),
      interpret=interpret,
      name=name,
    )
    of_steps = map(jnp.asarray, (steps.items, steps.others, steps.codes))
    pieces.append(run(*of_steps, queries, keys, masks))
  return [jnp.concatenate(x, 1) for x in zip(*pieces, strict=True)]


def _blocks(x: Any, table: int, first: int = 0) -> pl.BlockSpec:
  """Blocks of [B, blocks, K, tile], by the numbers in one of the tables."""

  def index(batch, step, *tables):
    return batch, tables[table][step] - first, 0, 0

  return pl.BlockSpec((None, None, *x.shape[2:]), index)


def _masks(masks: jax.Array) -> pl.BlockSpec:
  """The mask of a step, of [masks, tile // 32, tile]."""

  def index(batch, step, *tables):
    return tables[CODES][step] >> block_tables.SHIFT, 0, 0

  return pl.BlockSpec((None, *masks.shape[1:]), index)
