"""The fused kernels of the `mosaic` executor, in Pallas for TPUs.

They know nothing of patterns. Each step of the grid processes one tile of
pairs, see `mosaic_tables`: the block of an item stays in VMEM from its first
step to its last, which writes its results.

A block holds a column for each position, so that widths below 128 waste no
lanes. Scores are [keys, queries]: values per query, such as the log-sum-exp,
are a row. Only blocks are transposed, never scores.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_transformer.attention.contract import Keys, Plan, Queries
from sparse_transformer.attention.executors import mosaic_tables
from sparse_transformer.attention.executors.mosaic_tables import Steps

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


def _step(code, masks, segments, start, body, finish):
  """Runs a step, `start` and `finish` in the first and last one of an item.

  body(pairs) gets the pairs [keys, queries] of a tile, None for all. Tiles of
  segments that cannot meet are skipped.
  """
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

  pl.when(code & mosaic_tables.FIRST != 0)(start)
  pl.when(code & mosaic_tables.PARTIAL != 0)(lambda: run(_unpack(masks)))
  pl.when(code & mosaic_tables.FULL != 0)(lambda: run(None))
  pl.when(code & mosaic_tables.LAST != 0)(finish)


def _scores(q, k, scores):
  """(scores in base 2 [keys, queries], the slope of the soft cap)."""
  s, factor = _dot(k[...], q[...], (0, 0)), scores.factor(len(q))
  if not scores.softcap:
    return s * (LOG2_E * factor), None
  share = jnp.tanh(s * (factor / scores.softcap))
  return share * (LOG2_E * scores.softcap), 1 - share * share


def _forward(scores, code, queries, keys, masks, out, lse, *scratch):
  """Output and log-sum-exp of the queries of an item, by an online softmax."""
  out_EL, max_1L, sum_1L = scratch

  def start():
    out_EL[...] = jnp.zeros_like(out_EL)
    max_1L[...] = jnp.full_like(max_1L, -jnp.inf)
    sum_1L[...] = jnp.zeros_like(sum_1L)

  def body(pairs):
    s, _ = _scores(queries.q, keys.k, scores)
    if pairs is not None:
      s = jnp.where(pairs, s, -jnp.inf)
    old, v = max_1L[...], keys.v
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

  _step(code, masks, (queries.segments, keys.segments), start, body, finish)


def _gradients_of_scores(scores, queries, keys, pairs):
  """(weights, gradients of the scores before scaling): [keys, queries]."""
  s, slope = _scores(queries.q, keys.k, scores)
  p = jnp.exp2(s - queries.lse[...] * LOG2_E)
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


def forward(
  plan: Plan, queries: Queries, keys: Keys, interpret: bool
) -> tuple[jax.Array, jax.Array]:
  """See `triton_kernels.forward`."""
  tile, v = plan.tables.queries.tile, keys.v
  out, lse = _launch(
    _forward,
    plan,
    False,
    _blocks_of(plan, queries, keys),
    [(v.shape[-1], v.dtype), (1, jnp.float32)],
    [(v.shape[-1], tile), (1, tile), (1, tile)],
    interpret,
  )
  return out, lse[..., 0]


def backward(
  plan: Plan, queries: Queries, keys: Keys, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(dq_SBLHK, dk_SBMGK, dv_SBMGE) of each slot, see `forward`."""
  tile, blocks = plan.tables.queries.tile, _blocks_of(plan, queries, keys)
  of_dq, *of_dk_dv = (
    (x.shape[-1], x.dtype) for x in (queries.q, keys.k, keys.v)
  )
  run = functools.partial(_launch, plan=plan, blocks=blocks)
  (dq,) = run(
    _backward_of_queries,
    is_by_key=False,
    outs=[of_dq],
    scratch=[(of_dq[0], tile)],
    interpret=interpret,
  )
  dk, dv = run(
    _backward_of_keys,
    is_by_key=True,
    outs=of_dk_dv,
    scratch=[(tile, width) for width, _ in of_dk_dv],
    interpret=interpret,
  )
  return dq, dk, dv


def _blocks_of(plan, queries, keys):
  """The blocks [B, blocks, K, tile] of queries and keys."""
  tables = plan.tables
  return (
    jax.tree.map(tables.queries.take, queries),
    jax.tree.map(tables.keys.take, keys),
  )


def _launch(kernel, plan, is_by_key, blocks, outs, scratch, interpret):
  """[slots, B, L, H, K] of a kernel, in float32 if there are several slots.

  Its items are tiles of keys if `is_by_key`. `outs` has the width and the dtype
  of each result, `scratch` the shapes of accumulators.
  """
  tables = plan.tables
  launch = tables.by_key if is_by_key else tables.by_query
  side = tables.keys if is_by_key else tables.queries

  masks, first = jnp.asarray(tables.masks), blocks[0].q
  queries, keys = blocks
  of_sides = (OTHERS, ITEMS) if is_by_key else (ITEMS, OTHERS)
  pieces = []
  for steps in launch.steps:
    shapes = [
      jax.ShapeDtypeStruct(
        (len(first), steps.num_blocks, width, side.tile),
        dtype if len(launch.groups) == 1 else jnp.float32,
        manual_axis_type=jax.typeof(first).manual_axis_type,
      )
      for width, dtype in outs
    ]
    run = pl.pallas_call(
      # The first two tables choose blocks.
      lambda items, others, codes, *refs, steps=steps: kernel(
        plan.scores,
        codes[steps.place(pl.program_id(0), pl.program_id(1))],
        *refs,
      ),
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(len(first) * steps.cores, steps.per_core),
        in_specs=[
          *(
            jax.tree.map(
              functools.partial(_blocks, steps=steps, table=table), x
            )
            for x, table in zip(blocks, of_sides, strict=True)
          ),
          _masks(masks, steps),
        ],
        out_specs=[_blocks(x, steps, ITEMS, steps.first) for x in shapes],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
      ),
      out_shape=shapes,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary")
      ),
      interpret=interpret,
      name=kernel.__name__.strip("_"),
    )
    of_steps = map(jnp.asarray, (steps.items, steps.others, steps.codes))
    pieces.append(run(*of_steps, queries, keys, masks))
  return [
    jnp.stack(
      [side.restore(jnp.concatenate(x, 1), chosen) for chosen in launch.groups]
    )
    for x in zip(*pieces, strict=True)
  ]


def _blocks(x: Any, steps: Steps, table: int, first: int = 0) -> pl.BlockSpec:
  """Blocks of [B, blocks, K, tile], by the numbers in one of the tables."""

  def index(program, step, *tables):
    number = tables[table][steps.place(program, step)] - first
    return program // steps.cores, number, 0, 0

  return pl.BlockSpec((None, None, *x.shape[2:]), index)


def _masks(masks: jax.Array, steps: Steps) -> pl.BlockSpec:
  """The mask of a step, of [masks, tile // 32, tile]."""

  def index(program, step, *tables):
    code = tables[CODES][steps.place(program, step)]
    return code >> mosaic_tables.SHIFT, 0, 0

  return pl.BlockSpec((None, *masks.shape[1:]), index)
