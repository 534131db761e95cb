"""Attention plan by plan, in linear memory, with one backward pass.

An executor plans which tiles it processes: those of one part of a pattern, in
the part's own orders of positions, in which its pairs fill whole tiles, or all
of them. The results of plans are merged by log-sum-exp. One custom VJP covers
all plans: each recomputes its weights against the merged log-sum-exp, so
nothing of size n x keys is stored.
"""

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
from sparse_transformer.patterns import Pattern


def attend(
  q_BLHK: jax.Array,
  k_BMHK: jax.Array,
  v_BMHE: jax.Array,
  patterns: tuple[Pattern, ...],
  directions: selection.Directions,
  tile: int,
  choices: tuple[tuple[str, str], ...],
  axes: contract.Axes = (),
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) of `attention.attend`, with one pattern per head.

  Executors are those of `registry.choose`. Within `jax.shard_map`, `axes` split
  positions; a ValueError says if the patterns cannot run so.
  """
  if axes and any(pattern.contents() for pattern in patterns):
    few, own = spread.of_own_heads(patterns, directions, axes)
    q, k, v = exchange.to_heads(axes, q_BLHK, k_BMHK, v_BMHE)
    results = attend(q, k, v, few, own, tile, choices)
    out_BLHE, lse_BLH = exchange.to_positions(axes, *results)
    return out_BLHE, lse_BLH
  bound = selection.bind(patterns, q_BLHK, k_BMHK, directions)
  given = bound, selection.lay_out(bound, tile)
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  spans_H = spans_lib.of_heads(patterns, directions, dtype)
  work = _Work(choices, patterns, tile, axes)
  return _attend(q_BLHK, k_BMHK, v_BMHE, spans_H, given, work)


# Plans, each with its executor and heads.
Planned = Sequence[tuple[contract.Executor, contract.Plan, contract.Heads]]


class _Work(NamedTuple):
  """The static description of the work; see `attend`."""

  choices: tuple[tuple[str, str], ...]
  patterns: tuple[Pattern, ...]
  tile: int
  axes: contract.Axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q_BLHK, k_BLHK, v_BLHE, spans_H, given, work):
  return _forward(q_BLHK, k_BLHK, v_BLHE, spans_H, given, work)[0]


def _forward(q_BLHK, k_BLHK, v_BLHE, spans_H, given, work):
  arrays = q_BLHK, k_BLHK, v_BLHE, spans_H
  out_BLHE, lse_BLH = _by_platform(forward, work, given, *arrays)
  out_BLHE, lse_BLH = contract.name_saved(
    out_BLHE.astype(v_BLHE.dtype), lse_BLH
  )
  return (out_BLHE, lse_BLH), (*arrays, given, out_BLHE, lse_BLH)


def _backward(work, saved, cotangents):
  *arrays, given, out_BLHE, lse_BLH = saved
  grads = _by_platform(
    backward, work, given, *arrays, out_BLHE, lse_BLH, *cotangents
  )
  grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, tuple(arrays))
  return *grads, None  # the tables of plans are integers


_attend.defvjp(_forward, _backward)


def _by_platform(
  function: Callable, work: _Work, given: tuple, *arrays: jax.Array
) -> Any:
  """function(plans, *arrays), with the plans for the platform.

  The platform is known only when the program is lowered, after tracing.
  """
  case = contract.make_case(arrays[0], arrays[2], work.tile)

  def run(platform, name, given, *arrays):
    plans = _plans(work, given, arrays[3], platform, name, case)
    return function(plans, *arrays)

  if len(work.choices) == 1:
    ((platform, name),) = work.choices
    q_BLHK = registry.require(arrays[0], name, case)
    return run(platform, name, given, q_BLHK, *arrays[1:])
  branches = {x[0]: functools.partial(run, *x) for x in work.choices}
  return lax.platform_dependent(given, *arrays, **branches)


def _plans(work, given, spans_H, platform, name, case):
  """All plans, each with its executor and heads.

  Their tables are constants, except for content-based parts: those are `given`,
  with what patterns are bound to.
  """
  executor = registry.EXECUTORS[name]
  static = selection.static_parts(work.patterns)
  known: contract.Plans = ()
  if work.axes:
    known = spread.plans(executor, static, case, work.axes)
  elif static:
    known = executor.plans(static, case)
  found = selection.plans(work.patterns, *given)
  spans = spans_lib.plans(work.patterns, spans_H, case.length, work.tile)
  at_run_time = gathered.Gathered(platform == "cpu")
  return [
    *((executor, plan, heads) for plan, heads in known),
    *((at_run_time, plan, heads) for plan, heads in (*found, *spans)),
  ]


def forward(
  plans: Planned,
  q_BLHK: jax.Array,
  k_BLHK: jax.Array,
  v_BLHE: jax.Array,
  spans_H: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) over the pairs of all plans, float32 or wider."""
  del spans_H  # the plans have them
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  out_BLHE = jnp.zeros(v_BLHE.shape, dtype)
  lse_BLH = jnp.full(v_BLHE.shape[:3], -jnp.inf, dtype)
  for i, (executor, plan, heads) in enumerate(plans):
    if i:
      # In turn: parts that run at the same time evict each other's tiles from
      # the cache.
      q_BLHK, out_BLHE, lse_BLH = lax.optimization_barrier(
        (q_BLHK, out_BLHE, lse_BLH)
      )
    out, lse = executor.forward(
      plan,
      *plan.queries.arrange(*_take_heads(heads, q_BLHK)),
      *plan.keys.arrange(*_take_heads(heads, k_BLHK, v_BLHE)),
    )
    out, lse = plan.queries.restore(out, lse)
    if i:
      old = _take_heads(heads, out_BLHE, lse_BLH)
      out, lse = online_softmax.merge(old, (out, lse))
    out_BLHE = _put_heads(out_BLHE, heads, out)
    lse_BLH = _put_heads(lse_BLH, heads, lse)
  return out_BLHE, lse_BLH


def backward(
  plans: Planned,
  q_BLHK: jax.Array,
  k_BLHK: jax.Array,
  v_BLHE: jax.Array,
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
  queries = contract.Queries(q_BLHK, dout_BLHE, lse_BLH, delta_BLH - dlse_BLH)
  keys = contract.Keys(k_BLHK, v_BLHE)
  grads = [jnp.zeros(x.shape, lse_BLH.dtype) for x in (q_BLHK, *keys)]
  dspans_H = jax.tree.map(jnp.zeros_like, spans_H)
  for i, (executor, plan, heads) in enumerate(plans):
    if i:
      queries, grads = lax.optimization_barrier((queries, grads))
    dq, dk, dv, *rest = executor.backward(
      plan,
      contract.Queries(*plan.queries.arrange(*_take_heads(heads, *queries))),
      contract.Keys(*plan.keys.arrange(*_take_heads(heads, *keys))),
    )
    new = *plan.queries.restore(dq), *plan.keys.restore(dk, dv)
    at = contract.index_of(heads)
    grads = [
      total + x if heads is None else total.at[:, :, at].add(x)
      for total, x in zip(grads, new, strict=True)
    ]
    for dspans in rest:
      dspans_H = dspans_H.at[at].add(dspans)
  return *grads, dspans_H


def _take_heads(heads, *arrays):
  return tuple(x_BLH[:, :, contract.index_of(heads)] for x_BLH in arrays)


def _put_heads(x_BLH, heads, new_BLH):
  if heads is None:  # without a scatter, whose indices would be empty
    return new_BLH.astype(x_BLH.dtype)
  return x_BLH.at[:, :, contract.index_of(heads)].set(new_BLH)
