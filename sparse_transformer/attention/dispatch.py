"""Sparse attention: one contract, several executors, a plain reference."""

import functools

import jax.numpy as jnp
import numpy as np

from sparse_transformer import patterns as patterns_lib
from sparse_transformer.attention import merged as blocked


def attend(
  q_BLHK,
  k_BMHK,
  v_BMHE,
  patterns,
  *,
  backend="auto",
  tile=0,
  return_lse=False,
):
  """softmax(q k^T / sqrt(K), over the pairs of a pattern) v.

  B = batch, L = M = n positions, H = heads, K = width of queries and keys of
  a head, E = width of its values. A query without a key gets output 0 and
  log-sum-exp -inf, forward and backward.

  patterns: one pattern for all heads, or a tuple with one per head.
  backend: "dense" (the reference, n x n memory), "blocked" (tiles, linear
    memory), or "auto", which takes the first one that can do the case.
  tile: positions in a tile of the blocked backend; 0 chooses.

  Returns out_BLHE in the dtype of the values, and with `return_lse` also
  lse_BLH, the log-sum-exp of each query's scores in nats, float32 or wider.
  """
  patterns = _check(q_BLHK, k_BMHK, v_BMHE, patterns, tile)
  if backend not in ("auto", *BACKENDS):
    raise ValueError(
      f"unknown attention.backend {backend!r}; known: auto,"
      f" {', '.join(BACKENDS)}"
    )
  for name in AUTO if backend == "auto" else (backend,):
    try:
      out, lse = BACKENDS[name](q_BLHK, k_BMHK, v_BMHE, patterns, tile)
      return (out, lse) if return_lse else out
    except NotImplementedError:
      if name == backend or name == AUTO[-1]:
        raise
  raise AssertionError("AUTO is empty")


def dense(q_BLHK, k_BMHK, v_BMHE, patterns, tile=0):
  """The reference: all n x n scores, those off the pattern thrown away."""
  del tile
  n, dtype = q_BLHK.shape[1], jnp.promote_types(q_BLHK.dtype, jnp.float32)
  mask_BHLM = np.stack([pattern.matrix(n) for pattern in patterns])[None]
  q_BLHK, k_BMHK = q_BLHK.astype(dtype), k_BMHK.astype(dtype)
  scores_BHLM = jnp.einsum("blhk,bmhk->bhlm", q_BLHK, k_BMHK)
  scores_BHLM = jnp.where(
    mask_BHLM, scores_BHLM / np.sqrt(q_BLHK.shape[-1]), -jnp.inf
  )
  # A row without keys has only -inf: shift it by 0, and divide 0 by 1.
  max_BHL1 = scores_BHLM.max(-1, keepdims=True)
  max_BHL1 = jnp.where(jnp.isfinite(max_BHL1), max_BHL1, 0)
  weights_BHLM = jnp.exp(scores_BHLM - max_BHL1)
  sum_BHL1 = weights_BHLM.sum(-1, keepdims=True)
  empty_BHL1 = sum_BHL1 == 0
  weights_BHLM = weights_BHLM / jnp.where(empty_BHL1, 1, sum_BHL1)
  out_BLHE = jnp.einsum("bhlm,bmhe->blhe", weights_BHLM, v_BMHE.astype(dtype))
  log_BHL1 = jnp.log(jnp.where(empty_BHL1, 1, sum_BHL1))
  lse_BHL1 = jnp.where(empty_BHL1, -jnp.inf, max_BHL1 + log_BHL1)
  return out_BLHE.astype(v_BMHE.dtype), lse_BHL1[..., 0].transpose(0, 2, 1)


BACKENDS = {
  "dense": dense,
  "blocked": blocked.attend,
  "blocked_sequential": functools.partial(
    blocked.attend, schedule="sequential"
  ),
  "blocked_parallel": functools.partial(blocked.attend, schedule="parallel"),
}
AUTO = ("blocked", "dense")


def _check(q_BLHK, k_BMHK, v_BMHE, patterns, tile):
  """The patterns as a tuple, one per head, once the arguments fit."""
  shapes = f"q {q_BLHK.shape}, k {k_BMHK.shape}, v {v_BMHE.shape}"
  if not q_BLHK.ndim == k_BMHK.ndim == v_BMHE.ndim == 4:
    raise ValueError(f"q, k, v must be [batch, n, heads, width], got {shapes}")
  if q_BLHK.shape != k_BMHK.shape or k_BMHK.shape[:3] != v_BMHE.shape[:3]:
    raise ValueError(
      f"q and k must have one shape, v may differ in width only, got {shapes}"
    )
  if tile < 0:
    raise ValueError(f"{tile=} must be positive, or 0 to choose one")
  num_heads = q_BLHK.shape[2]
  if isinstance(patterns, patterns_lib.Pattern):
    return (patterns,) * num_heads
  if len(patterns) != num_heads:
    raise ValueError(
      f"{len(patterns)} patterns for {num_heads} heads; give one for each,"
      " or a single pattern for all"
    )
  return tuple(patterns)
