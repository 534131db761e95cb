"""Attention plan by plan, in linear memory, with one backward pass.

An executor plans which tiles it processes: those of one part of a pattern, in
the part's own orders of positions, in which its pairs fill whole tiles, or all
of them. The results of plans are merged by log-sum-exp. One custom VJP covers
all plans: each recomputes its weights against the merged log-sum-exp, so
nothing of size n x keys is stored.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_transformer.attention import contract, online_softmax, registry
from sparse_transformer.attention.content import (
  gathered,
  selection,
  spans as spans_lib,
)
from sparse_transformer.attention.distributed import exchange, spread
from sparse_transformer.attention.executors import streamed
from sparse_transformer.attention.heads import (
  add_heads,
  index_of,
  key_heads,
  put_heads,
)
from sparse_transformer.attention.orders import apply
from sparse_transformer.patterns import Pattern


def attend(
  queries: contract.Queries,
  keys: contract.Keys,
  patterns: tuple[Pattern, ...],
  directions: selection.Directions,
  scores: contract.Scores,
  tile: int,
  choices: tuple[tuple[str, str], ...],
  axes: contract.Axes = (),
  first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) of `attention.attend`, with one pattern per head.

  Executors are those of `registry.choose`. Within `jax.shard_map`, `axes` split
  positions; a ValueError says if the patterns cannot run so. Queries that are
  some of the positions, from `first` on, have static patterns, all positions
  on each device, and run in plain XLA.
  """
  if axes and any(pattern.contents() for pattern in patterns):
    few, own = spread.of_own_heads(patterns, keys.k.shape[2], directions, axes)
    to_heads = functools.partial(exchange.to_heads, axes)
    queries, keys = apply(to_heads, (queries, keys))
    results = attend(queries, keys, few, own, scores, tile, choices)
    out_BLHE, lse_BLH = exchange.to_positions(axes, *results)
    return out_BLHE, lse_BLH
  q_BLHK, k_BMGK = queries.q, keys.k
  segments = contract.segments_of(queries, keys)
  bound = selection.bind(patterns, q_BLHK, k_BMGK, directions, segments)
  given = bound, selection.lay_out(bound, tile), first
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  spans_H = spans_lib.of_heads(patterns, directions, dtype)
  work = _Work(choices, patterns, scores, tile, axes)
  return _attend(queries, keys, spans_H, given, work)


# Plans, each with its executor and heads.
Planned = Sequence[tuple[contract.Executor, contract.Plan, contract.Heads]]


class _Work(NamedTuple):
  """The static description of the work; see `attend`."""

  choices: tuple[tuple[str, str], ...]
  patterns: tuple[Pattern, ...]
  scores: contract.Scores
  tile: int
  axes: contract.Axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(queries, keys, spans_H, given, work):
  return _forward(queries, keys, spans_H, given, work)[0]


def _forward(queries, keys, spans_H, given, work):
  arrays = queries, keys, spans_H
  out_BLHE, lse_BLH = _by_platform(forward, work, given, *arrays)
  out_BLHE, lse_BLH = contract.name_saved(
    out_BLHE.astype(keys.v.dtype), lse_BLH
  )
  return (out_BLHE, lse_BLH), (*arrays, given, out_BLHE, lse_BLH)


def _backward(work, saved, cotangents):
  queries, keys, spans_H, given, *results = saved
  dq, dk, dv, dspans_H = _by_platform(
    backward, work, given, queries, keys, spans_H, *results, *cotangents
  )
  inputs = queries.q, keys.k, keys.v, spans_H
  dq, dk, dv, dspans_H = jax.tree.map(
    lambda g, x: g.astype(x.dtype), (dq, dk, dv, dspans_H), inputs
  )
  # Segments and the tables of plans are integers.
  return contract.Queries(dq), contract.Keys(dk, dv), dspans_H, None


_attend.defvjp(_forward, _backward)


def _by_platform(
  function: Callable, work: _Work, given: tuple, *arrays: Any
) -> Any:
  """function(plans, *arrays), with the plans for the platform.

  The platform is known only when the program is lowered, after tracing.
  """
  queries, keys, spans_H, *others = arrays
  case = contract.make_case(queries.q, keys.v, work.tile)

  def run(platform, name, given, queries, keys, spans_H, *others):
    n = queries.q.shape[1]
    plans = _plans(work, given, n, spans_H, platform, name, case)
    return function(plans, queries, keys, spans_H, *others)

  if len(work.choices) == 1:
    ((platform, name),) = work.choices
    q = registry.require(queries.q, name, case)
    queries = queries._replace(q=q)
    return run(platform, name, given, queries, keys, spans_H, *others)
  branches = {x[0]: functools.partial(run, *x) for x in work.choices}
  return lax.platform_dependent(given, *arrays, **branches)


def _plans(work, given, num_queries, spans_H, platform, name, case):
  """All plans, each with its executor and heads.

  Their tables are constants, except for content-based parts: those are `given`,
  with what patterns are bound to.
  """
  executor, (*found, first) = registry.EXECUTORS[name], given
  static = selection.static_parts(work.patterns)
  known: contract.Plans = ()
  if first is not None:
    executor = streamed
    known = streamed.slice_plans(static, num_queries, case.length, first)
  elif work.axes:
    known = spread.plans(executor, static, case, work.axes)
  elif static:
    known = executor.plans(static, case)
  found = selection.plans(work.patterns, *found)
  spans = spans_lib.plans(work.patterns, spans_H, case.length, work.tile)
  at_run_time = gathered.Gathered(platform == "cpu")
  planned = (
    *((executor, plan, heads) for plan, heads in known),
    *((at_run_time, plan, heads) for plan, heads in (*found, *spans)),
  )
  scores = work.scores
  return [
    (executor, dataclasses.replace(plan, scores=scores), heads)
    for executor, plan, heads in planned
  ]


def forward(
  plans: Planned,
  queries: contract.Queries,
  keys: contract.Keys,
  spans_H: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) over the pairs of all plans, float32 or wider."""
  del spans_H  # the plans have them
  dtype, shape = (
    jnp.promote_types(queries.q.dtype, jnp.float32),
    queries.q.shape,
  )
  out_BLHE = jnp.zeros((*shape[:3], keys.v.shape[3]), dtype)
  lse_BLH = jnp.full(shape[:3], -jnp.inf, dtype)
  for i, (executor, plan, heads) in enumerate(plans):
    if i:
      # In turn: parts that run at the same time evict each other's tiles from
      # the cache.
      queries, out_BLHE, lse_BLH = lax.optimization_barrier(
        (queries, out_BLHE, lse_BLH)
      )
    inputs = _arranged(plan, heads, queries, keys)
    out, lse = plan.queries.restore(*executor.forward(plan, *inputs))
    if i:
      at = index_of(heads)
      old = out_BLHE[:, :, at], lse_BLH[:, :, at]
      out, lse = online_softmax.merge(old, (out, lse))
    out_BLHE = put_heads(out_BLHE, heads, out)
    lse_BLH = put_heads(lse_BLH, heads, lse)
  return out_BLHE, lse_BLH


def backward(
  plans: Planned,
  queries: contract.Queries,
  keys: contract.Keys,
  spans_H: jax.Array | None,
  out_BLHE: jax.Array,
  lse_BLH: jax.Array,
  dout_BLHE: jax.Array,
  dlse_BLH: jax.Array,
) -> tuple[Any, ...]:
  """(dq, dk, dv, dspans_H), from the results over all plans."""
  # With p the merged weights: ds = p (dout v^T - delta), and lse adds p dlse.
  delta_BLH = (out_BLHE.astype(lse_BLH.dtype) * dout_BLHE).sum(-1)
  # A row without keys has no weights; 0 keeps its exp(-inf - lse) at 0.
  lse_BLH = jnp.where(jnp.isfinite(lse_BLH), lse_BLH, 0)
  queries = queries._replace(
    dout=dout_BLHE, lse=lse_BLH, delta=delta_BLH - dlse_BLH
  )
  arrays = queries.q, keys.k, keys.v
  grads = [jnp.zeros(x.shape, lse_BLH.dtype) for x in arrays]
  dspans_H = jax.tree.map(jnp.zeros_like, spans_H)
  for i, (executor, plan, heads) in enumerate(plans):
    if i:
      queries, grads = lax.optimization_barrier((queries, grads))
    inputs = _arranged(plan, heads, queries, keys)
    dq, dk, dv, *rest = executor.backward(plan, *inputs)
    new = *plan.queries.restore(dq), *plan.keys.restore(dk, dv)
    of_keys = key_heads(heads, _group(queries, keys))
    grads = [
      add_heads(total, at, x)
      for total, at, x in zip(
        grads, (heads, of_keys, of_keys), new, strict=True
      )
    ]
    for dspans in rest:
      dspans_H = dspans_H.at[index_of(heads)].add(dspans)
  return *grads, dspans_H


def _group(queries, keys):
  """The number of query heads of a key head."""
  return queries.q.shape[2] // keys.k.shape[2]


def _arranged(plan, heads, queries, keys):
  """The queries of heads, and their keys, in the orders of a plan."""
  of_keys = key_heads(heads, _group(queries, keys))
  return tuple(
    apply(order.arrange, arrays._replace(**_take_heads(at, arrays)))
    for order, at, arrays in (
      (plan.queries, heads, queries),
      (plan.keys, of_keys, keys),
    )
  )


def _take_heads(heads, arrays):
  """The arrays of heads, by field; segments are those of all."""
  return {
    name: x_BLH[:, :, index_of(heads)]
    for name, x_BLH in arrays._asdict().items()
    if name != "segments" and x_BLH is not None
  }
