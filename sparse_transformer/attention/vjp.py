"""One backward pass for all plans: the custom derivatives of attention.

The results of plans are merged by log-sum-exp. In the backward pass each plan
recomputes its weights against the merged log-sum-exp, so nothing of size
n x keys is stored.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import (
  contract,
  heads as heads_lib,
  online_softmax,
  registry,
  sequence_parallel,
)
from sparse_transformer.attention.content import binding, found_tiles
from sparse_transformer.attention.executors import xla
from sparse_transformer.attention.orders import apply
from sparse_transformer.attention.shard_map import Split
from sparse_transformer.patterns import Pattern

# A plan, with what runs it and for which heads.
Planned = tuple[contract.Executor, contract.Plan, contract.Heads]


@dataclasses.dataclass(frozen=True)
class Call:
  """What is known of a call before it is traced."""

  patterns: tuple[Pattern, ...]  # one for each head of a device
  scores: contract.Scores
  tile: int  # that is asked for, 0 for none
  choice: registry.Choice  # what runs it
  split: Split  # over devices
  others: tuple[str, ...] = ()  # as in `contract.Case`

  def case(self, q_BLHK: jax.Array, v_BMGE: jax.Array) -> contract.Case:
    """The case of queries and values of a device."""
    known = dict(patterns=self.patterns, others=self.others)
    return contract.make_case(q_BLHK, v_BMGE, tile=self.tile, **known)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_plans(
  call: Call,
  queries: contract.Queries,
  keys: contract.Keys,
  spans_H: jax.Array | None,
  given: tuple,
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) of a device.

  `binding.prepare` finds spans_H and given[0]; given[1] is the position of the
  first query of a slice, or None for all queries.
  """
  return _forward(call, queries, keys, spans_H, given)[0]


def _forward(call, queries, keys, spans_H, given):
  arrays = queries, keys, spans_H
  out_BLHE, lse_BLH = forward(_plan(call, given, *arrays), *arrays)
  results = contract.name_saved(out_BLHE.astype(keys.v.dtype), lse_BLH)
  return results, (*arrays, given, *results)


def _backward(call, saved, cotangents):
  queries, keys, spans_H, given, *results = saved
  arrays = queries, keys, spans_H, *results, *cotangents
  dq, dk, dv, dspans_H = jax.tree.map(
    lambda g, x: g.astype(x.dtype),
    backward(_plan(call, given, *arrays), *arrays),
    (queries.q, keys.k, keys.v, spans_H),
  )
  # Segments and the tables of plans are integers.
  return contract.Queries(dq), contract.Keys(dk, dv), dspans_H, None


run_plans.defvjp(_forward, _backward)


def _plan(call, given, queries, keys, spans_H, *_):
  """All plans; the tables of content-based parts were found at run time."""
  (found, first), executor = given, call.choice.executor
  axes = call.split.over_positions
  static = binding.static_parts(call.patterns)
  case = call.case(queries.q, keys.v)
  plans: contract.Plans = ()
  if first is not None:
    executor, num = xla.ON_CPUS, queries.q.shape[1]
    plans = xla.slice_plans(static, num, case.length, first)
  elif axes:
    length = case.length * lax.axis_size(axes)
    whole = dataclasses.replace(case, length=length)
    plans = sequence_parallel.plan_device(executor, static, whole, axes)
  elif static:
    plans = executor.plans(static, case)
  later = binding.plan_found(
    call.patterns, found, spans_H, case.length, call.tile
  )
  at_run_time = found_tiles.FoundTiles(call.choice.platform)
  # Of some heads, or of devices, gradients of keys may be added.
  is_whole = not axes and [heads for _, heads in (*plans, *later)] == [None]
  known: Any = dict(scores=call.scores, is_whole=is_whole)
  return [
    (executor, dataclasses.replace(plan, **known), heads)
    for executor, plans in ((executor, plans), (at_run_time, later))
    for plan, heads in plans
  ]


def forward(
  plans: Sequence[Planned],
  queries: contract.Queries,
  keys: contract.Keys,
  spans_H: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) over the pairs of all plans, float32 or wider."""
  dtype = np.promote_types(queries.q.dtype, np.float32)
  shape = queries.q.shape[:3]
  out_BLHE = jnp.zeros((*shape, keys.v.shape[3]), dtype)
  lse_BLH = jnp.full(shape, -jnp.inf, dtype)
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
      at = heads_lib.index_of(heads)
      old = out_BLHE[:, :, at], lse_BLH[:, :, at]
      out, lse = online_softmax.merge(old, (out, lse))
    out_BLHE = heads_lib.put_heads(out_BLHE, heads, out)
    lse_BLH = heads_lib.put_heads(lse_BLH, heads, lse)
  return out_BLHE, lse_BLH


def backward(
  plans: Sequence[Planned],
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
  wide = lambda x: x.astype(lse_BLH.dtype)
  delta_BLH = (wide(out_BLHE) * wide(dout_BLHE)).sum(-1)
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
    of_keys = _key_heads(heads, queries, keys)
    grads = [*map(heads_lib.add_heads, grads, (heads, of_keys, of_keys), new)]
    for dspans in rest:
      dspans_H = dspans_H.at[heads_lib.index_of(heads)].add(dspans)
  return *grads, dspans_H


def _key_heads(heads, queries, keys):
  return heads_lib.key_heads(heads, queries.q.shape[2] // keys.k.shape[2])


def _arranged(plan, heads, queries, keys):
  """The queries of heads, and their keys, in the orders of a plan."""
  of_keys = _key_heads(heads, queries, keys)
  queries, keys = _take(heads, queries), _take(of_keys, keys)
  return apply(plan.queries.arrange, queries), apply(plan.keys.arrange, keys)


def _take(heads, arrays):
  """The arrays of heads; an array with one head, as segments, is of all."""
  take = lambda x: x if x.shape[2] == 1 else x[:, :, heads_lib.index_of(heads)]
  return jax.tree.map(take, arrays)
