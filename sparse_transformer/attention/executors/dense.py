"""The reference: softmax over all n x n scores, differentiated by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention.content import selection, spans as spans_lib
from sparse_transformer.attention.contract import Case, name_saved
from sparse_transformer.patterns import Pattern

MAX_MASK_BYTES = 2**32


def unsupported(case: Case) -> str | None:
  """Why a case cannot run, as the end of an error message; None if it can."""
  size = case.num_heads * case.length**2
  if size <= MAX_MASK_BYTES:
    return None
  return (
    f"its masks of {case.length:,} x {case.length:,} positions for"
    f" {case.num_heads} heads would take {size / 2**30:,.4g} GiB; use"
    " backend=auto"
  )


def tile_size(part: Pattern, case: Case) -> int:
  """One tile holds all pairs."""
  del part
  return case.length


def attend(
  q_BLHK: jax.Array,
  k_BMHK: jax.Array,
  v_BMHE: jax.Array,
  patterns: tuple[Pattern, ...],
  directions: selection.Directions,
  axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) of attention with one pattern per head.

  If positions are split over mesh axes, each device computes all of them.
  """
  if axes:
    own, first = q_BLHK.shape[1], lax.axis_index(axes) * q_BLHK.shape[1]
    q_BLHK, k_BMHK, v_BMHE = (
      lax.all_gather(x, axes, axis=1, tiled=True)
      for x in (q_BLHK, k_BMHK, v_BMHE)
    )
    results = attend(q_BLHK, k_BMHK, v_BMHE, patterns, directions)
    out, lse = (lax.dynamic_slice_in_dim(x, first, own, 1) for x in results)
    return out, lse
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  mask_BHLM = selection.realize(patterns, q_BLHK, k_BMHK, directions)
  q_BLHK, k_BMHK = q_BLHK.astype(dtype), k_BMHK.astype(dtype)
  scores_BHLM = jnp.einsum("blhk,bmhk->bhlm", q_BLHK, k_BMHK)
  scores_BHLM = jnp.where(
    mask_BHLM, scores_BHLM / np.sqrt(q_BLHK.shape[-1]), -jnp.inf
  )
  # A row without keys has only -inf: shift it by 0, and divide 0 by 1.
  max_BHL1 = scores_BHLM.max(-1, keepdims=True)
  max_BHL1 = jnp.where(jnp.isfinite(max_BHL1), max_BHL1, 0)
  weights_BHLM = jnp.exp(scores_BHLM - max_BHL1)
  i = np.arange(q_BLHK.shape[1])
  weights_HLM = spans_lib.weights(patterns, directions, i[:, None], i, dtype)
  if weights_HLM is not None:
    weights_BHLM = weights_BHLM * weights_HLM[None]
  sum_BHL1 = weights_BHLM.sum(-1, keepdims=True)
  empty_BHL1 = sum_BHL1 == 0
  weights_BHLM = weights_BHLM / jnp.where(empty_BHL1, 1, sum_BHL1)
  out_BLHE = jnp.einsum("bhlm,bmhe->blhe", weights_BHLM, v_BMHE.astype(dtype))
  log_BHL1 = jnp.log(jnp.where(empty_BHL1, 1, sum_BHL1))
  lse_BHL1 = jnp.where(empty_BHL1, -jnp.inf, max_BHL1 + log_BHL1)
  lse_BLH = lse_BHL1[..., 0].transpose(0, 2, 1)
  return name_saved(out_BLHE.astype(v_BMHE.dtype), lse_BLH)
