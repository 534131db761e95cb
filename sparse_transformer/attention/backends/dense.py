"""The reference: softmax over all n x n scores, differentiated by JAX.

All other backends must agree with it. It is written to be easy to read: it uses
no tiles, no kernels and no derivatives by hand, and computes everything in
float32 or wider.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract
from sparse_transformer.attention.content import binding

MAX_MASK_BYTES = 2**32


def unsupported(request: contract.Request) -> str | None:
  """Returns why a request cannot run, or None, as `contract.Backend` does.

  This module is not a `Backend`, because it has no plans.
  """
  # A mask takes one byte for each pair; scores in float32 take four times as
  # much.
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
  bias_HD: jax.Array | None,
  first: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Computes (out_BLHE, lse_BLH) on one device.

  If positions are split over devices, each device computes all positions.

  Args:
    request: the request for this device.
    queries, keys: the arrays of this device.
    directions: as in `attend`.
    bias_HD: the bias of the device's heads, or None.
    first: the position of the first query if there are fewer queries than keys,
      which requires static patterns; otherwise None.
  """
  if axes := request.split.over_positions:
    num_own = queries.q.shape[1]
    start = lax.axis_index(axes) * num_own
    gather = functools.partial(
      lax.all_gather, axis_name=axes, axis=1, tiled=True
    )
    queries, keys = jax.tree.map(gather, (queries, keys))

    whole = dataclasses.replace(request, split=contract.Split())
    out, lse = attend(whole, queries, keys, directions, bias_HD, first=None)

    # Each device keeps the results of its own positions.
    return (
      lax.dynamic_slice_in_dim(out, start, num_own, 1),
      lax.dynamic_slice_in_dim(lse, start, num_own, 1),
    )

  # The mask includes the pairs of the pattern within segments, ...
  mask_BHLM = binding.realize(request.patterns, queries, keys, directions)
  if first is not None:
    num_queries = queries.q.shape[1]
    mask_BHLM = lax.dynamic_slice_in_dim(mask_BHLM, first, num_queries, 2)
  if queries.segments is not None and keys.segments is not None:
    segments_B11M = keys.segments[:, None, None, :, 0]
    mask_BHLM &= queries.segments[:, None] == segments_B11M

  # ... unless the bias masks them.
  scores_BHLM, v_BMHE = _scores(request, queries, keys)
  if bias_HD is not None:
    bias_HLM = _bias_of_pairs(bias_HD, queries, keys, first)
    # Only finite numbers are added, because -inf has no gradient.
    is_open_HLM = bias_HLM > -jnp.inf
    mask_BHLM &= is_open_HLM[None]
    scores_BHLM += jnp.where(is_open_HLM, bias_HLM, 0)[None]
  scores_BHLM = jnp.where(mask_BHLM, scores_BHLM, -jnp.inf)

  # All scores of a row without keys are -inf. It is shifted by 0, and its sum
  # of 0 is replaced by 1, so that its output is 0.
  max_BHL1 = scores_BHLM.max(-1, keepdims=True)
  max_BHL1 = jnp.where(jnp.isfinite(max_BHL1), max_BHL1, 0)
  weights_BHLM = jnp.exp(scores_BHLM - max_BHL1)
  sum_BHL1 = weights_BHLM.sum(-1, keepdims=True)
  is_empty_BHL1 = sum_BHL1 == 0
  sum_BHL1 = jnp.where(is_empty_BHL1, 1, sum_BHL1)
  weights_BHLM = weights_BHLM / sum_BHL1

  out_BLHE = jnp.einsum("bhlm,bmhe->blhe", weights_BHLM, v_BMHE)
  lse_BHL1 = max_BHL1 + jnp.log(sum_BHL1)
  lse_BHL1 = jnp.where(is_empty_BHL1, -jnp.inf, lse_BHL1)
  out_BLHE, lse_BLH = contract.name_saved(
    out_BLHE.astype(keys.v.dtype),
    lse_BHL1[..., 0].transpose(0, 2, 1),
  )
  return out_BLHE, lse_BLH


def _bias_of_pairs(bias_HD, queries, keys, first):
  """Returns the bias of all pairs, [H, L, M]."""
  q_at = np.arange(queries.q.shape[1])
  if first is not None:
    q_at = q_at + first
  k_at = np.arange(keys.k.shape[1])
  distances_LM = q_at[:, None] - k_at[None]
  return contract.bias_at(bias_HD, distances_LM)


def _scores(request, queries, keys):
  """Computes (scores_BHLM, v_BMHE of query heads), in float32 or wider.

  Scores are scaled and capped, but do not yet include the bias or the mask.
  """
  scores = request.scores
  dtype = np.promote_types(queries.q.dtype, np.float32)
  _, _, num_heads, width = queries.q.shape

  # Repeat keys and values for each query head.
  group = num_heads // keys.k.shape[2]
  q_BLHK = queries.q.astype(dtype)
  k_BMHK = jnp.repeat(keys.k.astype(dtype), group, 2)
  v_BMHE = jnp.repeat(keys.v.astype(dtype), group, 2)

  scores_BHLM = jnp.einsum("blhk,bmhk->bhlm", q_BLHK, k_BMHK)
  scores_BHLM *= scores.factor(width)
  if scores.softcap:
    scores_BHLM = scores.softcap * jnp.tanh(scores_BHLM / scores.softcap)
  return scores_BHLM, v_BMHE
