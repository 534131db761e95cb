"""The reference: softmax over all n x n scores, differentiated by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract
from sparse_transformer.attention.content import binding, spans
from sparse_transformer.patterns import Pattern

MAX_MASK_BYTES = 2**32


def unsupported(case: contract.Case) -> str | None:
  """See `contract.Executor`."""
  size = case.num_heads * case.length**2
  if size <= MAX_MASK_BYTES:
    return None
  return (
    f"its masks of {case.length:,} x {case.length:,} positions for"
    f" {case.num_heads} heads would take {size / 2**30:,.4g} GiB; use"
    " backend=auto"
  )


def tile_size(part: Pattern, case: contract.Case) -> int:
  """One tile holds all pairs."""
  del part
  return case.length


def attend(
  queries: contract.Queries,
  keys: contract.Keys,
  patterns: tuple[Pattern, ...],
  directions: binding.Directions,
  scores: contract.Scores,
  axes: tuple[str, ...] = (),
  first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) of attention with one pattern per head.

  If positions are split over mesh axes, each device computes all of them. With
  `first`, the queries start at that position, and patterns are static.
  """
  if axes:
    own = queries.q.shape[1]
    first = lax.axis_index(axes) * own
    queries, keys = jax.tree.map(
      lambda x: lax.all_gather(x, axes, axis=1, tiled=True), (queries, keys)
    )
    results = attend(queries, keys, patterns, directions, scores)
    out, lse = (lax.dynamic_slice_in_dim(x, first, own, 1) for x in results)
    return out, lse
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
