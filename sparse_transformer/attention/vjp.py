"""The custom derivatives of attention: one backward pass for all plans.

The results of plans are merged by log-sum-exp. In the backward pass, each plan
recomputes its weights from the merged log-sum-exp, so no array with the weights
of all pairs is stored. The merge itself needs no derivatives: the gradients of
queries, keys and values are sums over all pairs, and do not depend on how pairs
are divided into plans.
"""

import dataclasses
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
  sequence_parallel,
)
from sparse_transformer.attention.backends import diagonals, xla
from sparse_transformer.attention.content import binding, found_tiles

# A plan with its runner and its heads.
Planned = tuple[contract.Runner, contract.Plan, contract.Heads]


def _run_plans(
  backend: contract.Backend | None,
  request: contract.Request,
  queries: contract.Queries,
  keys: contract.Keys,
  bias_HD: jax.Array | None,
  runtime_tables: Any,
  first: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Computes (out_BLHE, lse_BLH) on one device.

  Args:
    backend: the backend that runs static pairs.
    request: the request for this device.
    queries, keys: the arrays of this device.
    bias_HD: the bias of the device's heads, or None.
    runtime_tables: the tables that `binding.prepare` returns.
    first: the position of the first query of a slice; None for all queries.

  Returns:
    out in the dtype of the values, and lse in float32 or wider. A query without
    keys gets 0 and -inf.
  """
  num_queries = queries.q.shape[1]
  plans = _plan(backend, request, num_queries, bias_HD, runtime_tables, first)
  out_BLHE, lse_BLH = forward(plans, queries, keys)
  out_BLHE = out_BLHE.astype(keys.v.dtype)

  # Results are named outside the loops, so that `jax.checkpoint` can save them.
  out_BLHE, lse_BLH = contract.name_saved(out_BLHE, lse_BLH)
  return out_BLHE, lse_BLH


def _forward(backend, request, queries, keys, bias_HD, runtime_tables, first):
  results = _run_plans(
    backend, request, queries, keys, bias_HD, runtime_tables, first
  )
  inputs = queries, keys, bias_HD, runtime_tables, first
  return results, (inputs, results)


def _backward(backend, request, saved, cotangents):
  """Computes the gradients of the arrays of `_run_plans`."""
  inputs, (out_BLHE, lse_BLH) = saved
  queries, keys, bias_HD, runtime_tables, first = inputs
  dout_BLHE, dlse_BLH = cotangents
  num_queries = queries.q.shape[1]
  plans = _plan(backend, request, num_queries, bias_HD, runtime_tables, first)
  grads = backward(
    plans,
    queries,
    keys,
    bias_HD,
    out_BLHE,
    lse_BLH,
    dout_BLHE,
    dlse_BLH,
  )

  # Gradients are summed in float32 or wider, and then converted to the dtypes
  # of their arrays.
  dq, dk, dv, dbias_HD = jax.tree.map(
    lambda g, x: g.astype(x.dtype),
    grads,
    (queries.q, keys.k, keys.v, bias_HD),
  )

  # Segments, tables and the first position are integers, which have no
  # gradients.
  no_tables = no_first = None
  return (
    contract.Queries(dq),
    contract.Keys(dk, dv),
    dbias_HD,
    no_tables,
    no_first,
  )


run_plans = jax.custom_vjp(_run_plans, nondiff_argnums=(0, 1))
run_plans.defvjp(_forward, _backward)


def _plan(backend, request, num_queries, bias_HD, runtime_tables, first):
  """Makes all plans of a device.

  The forward and the backward pass both call this function, because plans,
  unlike arrays, cannot be passed from one to the other. Backends cache their
  plans, so a second call costs nothing.

  Args:
    backend: the backend that `registry.choose` chose for static pairs.
    request: the request for this device.
    num_queries: number of queries on this device, L.
    bias_HD, runtime_tables, first: as in `_run_plans`.

  Returns:
    A list of `Planned`, (runner, plan, heads).
  """
  # The tables of static pairs are known while the program is traced.
  static = binding.static_parts(request.patterns)
  static_request = dataclasses.replace(request, patterns=static)
  plans: contract.Plans = ()

  # The chosen backend supports neither a bias nor a slice of the queries,
  # because both are known only at run time.
  if bias_HD is not None:
    backend = diagonals
    plans = diagonals.plans(static_request, bias_HD, num_queries, first)
  elif first is not None:
    # Plans of `slice_plans` do not depend on the backend's tiles, so either
    # plain XLA backend could run them on any device.
    backend = xla.ON_CPUS
    plans = xla.slice_plans(static, num_queries, request.length, first)
  elif static and request.split.over_positions:
    plans = sequence_parallel.plan_device(backend, static_request)
  elif static:
    plans = backend.plans(static_request)
  planned = [(backend, plan, heads) for plan, heads in plans]

  # The tables of content-based parts are found at run time.
  runner = found_tiles.FoundTiles(request.platform)
  runtime_plans = binding.plan_found(request.patterns, runtime_tables)
  planned += [(runner, plan, heads) for plan, heads in runtime_plans]

  # A plan may round its results only if it is the only plan, of all heads, on
  # one share of positions. Otherwise, its outputs and its gradients of keys are
  # merged with those of other plans, heads or devices.
  is_whole = (
    len(planned) == 1
    and len(planned[0][-1]) == request.num_heads
    and not request.split.over_positions
  )
  return [
    (
      runner,
      dataclasses.replace(plan, scores=request.scores, is_whole=is_whole),
      heads,
    )
    for runner, plan, heads in planned
  ]


def forward(
  plans: Sequence[Planned], queries: contract.Queries, keys: contract.Keys
) -> tuple[jax.Array, jax.Array]:
  """Computes (out_BLHE, lse_BLH) over all plans, in float32 or wider.

  Args:
    plans: plans with disjoint pairs, each with its runner and its heads.
    queries, keys: the arrays of all heads, in natural order.
  """
  # Heads without a plan have no keys, so results start at 0 and -inf.
  dtype = np.promote_types(queries.q.dtype, np.float32)
  shape = queries.q.shape[:3]
  out_BLHE = jnp.zeros((*shape, keys.v.shape[3]), dtype)
  lse_BLH = jnp.full(shape, -jnp.inf, dtype)
  for i, (runner, plan, heads) in enumerate(plans):
    if i:
      # Plans run one after another, because plans that run at the same time
      # evict each other's tiles from the cache.
      queries, out_BLHE, lse_BLH = lax.optimization_barrier(
        (queries, out_BLHE, lse_BLH)
      )

    # Sort the arrays into the plan's orders, and sort the results back.
    own_queries, own_keys = _arranged(plan, heads, queries, keys)
    results = runner.forward(plan, own_queries, own_keys)
    out, lse = plan.queries.restore(results)

    # The first plan has no earlier results to merge with.
    if i:
      index = heads_lib.index_of(heads, shape[2])
      earlier = out_BLHE[:, :, index], lse_BLH[:, :, index]
      out, lse = online_softmax.merge([earlier, (out, lse)])
    out_BLHE = heads_lib.put_heads(out_BLHE, heads, out)
    lse_BLH = heads_lib.put_heads(lse_BLH, heads, lse)
  return out_BLHE, lse_BLH


def backward(
  plans: Sequence[Planned],
  queries: contract.Queries,
  keys: contract.Keys,
  bias_HD: jax.Array | None,
  out_BLHE: jax.Array,
  lse_BLH: jax.Array,
  dout_BLHE: jax.Array,
  dlse_BLH: jax.Array,
) -> tuple[Any, ...]:
  """Sums the gradients of all plans.

  Args:
    plans: as in `forward`.
    queries, keys: as in `forward`.
    bias_HD: the bias of all heads, or None.
    out_BLHE, lse_BLH: the merged results of `forward`.
    dout_BLHE, dlse_BLH: the gradients of the loss with respect to these.

  Returns:
    (dq_BLHK, dk_BMGK, dv_BMGE, dbias_HD), in the dtype of lse.
  """
  # With merged weights p, the gradients of scores are ds = p (dout v^T - delta)
  # from the outputs, plus p dlse from the log-sum-exp.
  dtype = lse_BLH.dtype
  delta_BLH = (out_BLHE.astype(dtype) * dout_BLHE.astype(dtype)).sum(-1)
  queries = queries._replace(
    dout=dout_BLHE,
    # A row without keys has no weights. With lse = 0, its exp(-inf - lse) is 0.
    lse=jnp.where(jnp.isfinite(lse_BLH), lse_BLH, 0),
    delta=delta_BLH - dlse_BLH,
  )

  grads = [jnp.zeros(x.shape, dtype) for x in (queries.q, keys.k, keys.v)]
  dbias_HD = jax.tree.map(jnp.zeros_like, bias_HD)
  for i, (runner, plan, heads) in enumerate(plans):
    if i:
      queries, grads = lax.optimization_barrier((queries, grads))

    own_queries, own_keys = _arranged(plan, heads, queries, keys)
    dq, dk, dv, *dbias = runner.backward(plan, own_queries, own_keys)
    dq = plan.queries.restore(dq)
    dk, dv = plan.keys.restore((dk, dv))

    key_heads = _key_heads(heads, queries, keys)
    grads = [
      heads_lib.add_heads(grads[0], heads, dq),
      heads_lib.add_heads(grads[1], key_heads, dk),
      heads_lib.add_heads(grads[2], key_heads, dv),
    ]

    # Only the runner `diagonals` has a bias, and returns its gradient.
    for gradient in dbias:
      index = heads_lib.index_of(heads, len(dbias_HD))
      dbias_HD = dbias_HD.at[index].add(gradient)
  return *grads, dbias_HD


def _key_heads(heads, queries, keys):
  group = queries.q.shape[2] // keys.k.shape[2]
  return heads_lib.key_heads(heads, group)


def _arranged(plan, heads, queries, keys):
  """Returns the queries of heads, and their keys, in a plan's orders."""
  own_queries = _take(heads, queries)
  own_keys = _take(_key_heads(heads, queries, keys), keys)
  return (
    plan.queries.arrange(own_queries),
    plan.keys.arrange(own_keys),
  )


def _take(heads, arrays):
  """Selects heads of arrays, except of arrays with only one head."""

  def take(x_BLH):
    num_heads = x_BLH.shape[2]
    if num_heads == 1:
      return x_BLH
    return x_BLH[:, :, heads_lib.index_of(heads, num_heads)]

  return jax.tree.map(take, arrays)
