"""Attention of tiles of queries to tiles of keys, shared by the executors.

The leading axes of tiles are A (tiles computed together), B (batch) and H
(heads), in any order: queries are [A, B, H, T, K], scores [A, B, H, T, S].

A running softmax is a triple (out, max, sum): the weighted sum of values
[A, B, H, T, E], and the maximum of the scores and the sum of exp(score - max)
so far [A, B, H, T, 1].
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.patterns import Pattern

Running = tuple[jax.Array, jax.Array, jax.Array]


def pairs(pattern: Pattern, q_at: jax.Array, k_at: jax.Array) -> jax.Array:
  """Which pairs of a pattern are in tiles: booleans [..., T, S].

  Args:
    pattern: its mask decides.
    q_at, k_at: positions [..., T] and [..., S], -1 for padding.
  """
  q_at, k_at = q_at[..., None], k_at[..., None, :]
  return pattern.mask(q_at, k_at) & (q_at >= 0) & (k_at >= 0)


def softmax_of_tile(
  mask: jax.Array,
  q: jax.Array,
  key: tuple[jax.Array, jax.Array],
  bias: jax.Array | int = 0,
) -> Running:
  """The running softmax over one tile of keys.

  Args:
    mask: which scores count.
    q: scaled queries.
    key: (keys, values).
    bias: is added to the scores.
  """
  k, v = key
  s = _masked_scores(mask, q, k) + bias
  max_ = s.max(-1, keepdims=True)
  p = jnp.exp(s - _finite(max_))
  out = dot("abhts,abhse->abhte", p.astype(v.dtype), v)
  return out, max_, p.sum(-1, keepdims=True)


def combine(first: Running, second: Running) -> Running:
  """The running softmax over the keys of both."""
  (out_1, max_1, sum_1), (out_2, max_2, sum_2) = first, second
  max_ = jnp.maximum(max_1, max_2)
  decay_1, decay_2 = (jnp.exp(m - _finite(max_)) for m in (max_1, max_2))
  out = out_1 * decay_1 + out_2 * decay_2
  return out, max_, sum_1 * decay_1 + sum_2 * decay_2


def finish(
  out: jax.Array, max_: jax.Array, sum_: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(out, log-sum-exp) of a running softmax: 0 and -inf without any keys."""
  return out / jnp.where(sum_ == 0, 1, sum_), max_ + jnp.log(sum_)


def weights_and_gradients(
  mask: jax.Array, query: tuple[Any, ...], key: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """(p, ds): the weights relative to a given lse, the gradients of the scores.

  Both in float32 or wider: round them for products. Those with queries and keys
  take ds times `scale_of_scores`.

  Args:
    mask: which scores count.
    query: (scaled queries, dout, lse, delta); the last axis of lse and delta
      has size 1.
    key: (keys, values).
  """
  (q, dout, lse, delta), (k, v) = query, key
  p = jnp.exp(_masked_scores(mask, q, k) - lse)
  ds = p * (dot("abhte,abhse->abhts", dout, v) - delta)
  return p, ds


def transpose_first(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """The arrays with their last two axes swapped, before any product.

  Otherwise the compiler transposes within products, and one whose left side is
  transposed runs at half the rate.
  """
  return lax.optimization_barrier(tuple(x.swapaxes(-1, -2) for x in arrays))


def _masked_scores(mask, q, k):
  """The scores, -inf where the mask is not."""
  s = dot("abhtk,abhsk->abhts", q, k) * scale_of_scores(q)
  return jnp.where(mask, s, -jnp.inf)


def _finite(max_):
  """0 while no key has been seen: exp(-inf - 0) is 0, not NaN."""
  return jnp.where(max_ == -jnp.inf, 0, max_)


def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """An einsum that accumulates in float32 or wider."""
  dtype = jnp.promote_types(a.dtype, jnp.float32)
  return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def scale(q: jax.Array) -> np.ndarray:
  """The factor of the queries: 1 / sqrt(K), or 1 where that would round them.

  In 16 bits, scaled queries are exact for powers of 4 only; for others, such as
  K = 32, the log-sum-exp would be off by 0.005.
  """
  return np.asarray(1 / np.sqrt(q.shape[-1]) / scale_of_scores(q), q.dtype)


def scale_of_scores(q: jax.Array) -> float:
  """The factor of the scores: what `scale` leaves of 1 / sqrt(K)."""
  return 1 / math.sqrt(q.shape[-1]) if q.dtype.itemsize == 2 else 1.0
