"""The reference: softmax over all n x n scores, differentiated by JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract
from sparse_transformer.attention.content import binding, spans

MAX_MASK_BYTES = 2**32


def unsupported(request: contract.Request) -> str | None:
  """See `contract.Executor`, which this is not: it has no plans."""
  size = request.num_heads * request.length**2
  if size <= MAX_MASK_BYTES:
    return None
  return (
    f"its masks of {request.length:,} x {request.length:,} positions for"
    f" {request.num_heads} heads would take {size / 2**30:,.4g} GiB; use"
    " backend=auto"
  )


def attend(
  request: contract.Request,
  queries: contract.Queries,
  keys: contract.Keys,
  directions: binding.Directions,
  first: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) of a device.

  Where positions are split over devices, each computes all of them. With
  `first`, the queries start at that position, and patterns are static.
  """
  if axes := request.split.over_positions:
    num_queries = queries.q.shape[1]
    queries, keys = jax.tree.map(
      lambda x: lax.all_gather(x, axes, axis=1, tiled=True), (queries, keys)
    )
    whole = dataclasses.replace(request, split=contract.Split())
    results = attend(whole, queries, keys, directions, first=None)
    first = lax.axis_index(axes) * num_queries
    out, lse = (
      lax.dynamic_slice_in_dim(x, first, num_queries, 1) for x in results
    )
    return out, lse

  patterns = request.patterns
  scores = request.scores
  q_BLHK, k_BMGK, v_BMGE = queries.q, keys.k, keys.v
  dtype = np.promote_types(q_BLHK.dtype, np.float32)
  _, n, num_heads, width = q_BLHK.shape
  mask_BHLM = binding.realize(patterns, queries, keys, directions)
  if first is not None:
    mask_BHLM = lax.dynamic_slice_in_dim(mask_BHLM, first, n, 2)
  if queries.segments is not None and keys.segments is not None:
    of_keys_B11M = keys.segments[:, None, None, :, 0]
    mask_BHLM &= queries.segments[:, None] == of_keys_B11M
  k_BMHK, v_BMHE = (
    jnp.repeat(x.astype(dtype), num_heads // x.shape[2], 2)
    for x in (k_BMGK, v_BMGE)
  )
  scores_BHLM = jnp.einsum("blhk,bmhk->bhlm", q_BLHK.astype(dtype), k_BMHK)
  scores_BHLM *= scores.factor(width)
  if scores.softcap:
    scores_BHLM = scores.softcap * jnp.tanh(scores_BHLM / scores.softcap)
  scores_BHLM = jnp.where(mask_BHLM, scores_BHLM, -jnp.inf)
  # A row without keys has only -inf: shift it by 0, and divide 0 by 1.
  max_BHL1 = scores_BHLM.max(-1, keepdims=True)
  max_BHL1 = jnp.where(jnp.isfinite(max_BHL1), max_BHL1, 0)
  weights_BHLM = jnp.exp(scores_BHLM - max_BHL1)
  i = np.arange(k_BMGK.shape[1])
  weights_HLM = spans.weights(patterns, directions, i[:, None], i, dtype)
  if weights_HLM is not None:
    weights_BHLM = weights_BHLM * weights_HLM[None]
  sum_BHL1 = weights_BHLM.sum(-1, keepdims=True)
  empty_BHL1 = sum_BHL1 == 0
  weights_BHLM = weights_BHLM / jnp.where(empty_BHL1, 1, sum_BHL1)
  out_BLHE = jnp.einsum("bhlm,bmhe->blhe", weights_BHLM, v_BMHE)
  log_BHL1 = jnp.log(jnp.where(empty_BHL1, 1, sum_BHL1))
  lse_BHL1 = jnp.where(empty_BHL1, -jnp.inf, max_BHL1 + log_BHL1)
  lse_BLH = lse_BHL1[..., 0].transpose(0, 2, 1)
  out_BLHE, lse_BLH = contract.name_saved(
    out_BLHE.astype(v_BMGE.dtype), lse_BLH
  )
  return out_BLHE, lse_BLH
