"""The arithmetic of tiles of queries against tiles of keys.

Shared by the two schedules of the blocked backend. Tiles carry A (tiles side
by side), B (batch) and H (heads) in front: queries [A, B, H, T, K], scores
[A, B, H, T, S]; positions are [A, T] and [A, S], -1 where there is padding.
"""

import jax.numpy as jnp
import numpy as np

# A softmax under way is (out, max, sum): weighted values, running maximum of
# the scores and sum of exp(score - max), the last two [A, B, H, T, 1].


def visit(pattern, query, key):
  """The softmax under way over one tile of keys.

  query: (scaled queries, positions); key: (keys, values, positions).
  """
  (q, q_at), (k, v, k_at) = query, key
  s = _scores(pattern, q, k, q_at, k_at)
  max_ = s.max(-1, keepdims=True)
  p = jnp.exp(s - _finite(max_))
  out = dot("abhts,abhse->abhte", p.astype(v.dtype), v)
  return out, max_, p.sum(-1, keepdims=True)


def combine(first, second):
  """The softmax under way over the keys of both."""
  (out_1, max_1, sum_1), (out_2, max_2, sum_2) = first, second
  max_ = jnp.maximum(max_1, max_2)
  decay_1, decay_2 = (jnp.exp(m - _finite(max_)) for m in (max_1, max_2))
  out = out_1 * decay_1 + out_2 * decay_2
  return out, max_, sum_1 * decay_1 + sum_2 * decay_2


def finish(out, max_, sum_):
  """(out, log-sum-exp): 0 and -inf where there was no key."""
  return out / jnp.where(sum_ == 0, 1, sum_), max_ + jnp.log(sum_)


def weights(pattern, query, key):
  """(p, ds): weights against the merged lse, gradients of the scores.

  query: (scaled queries, dout, lse, delta, positions), lse and delta with a
  last axis of 1; key: (keys, values, positions).
  """
  (q, dout, lse, delta, q_at), (k, v, k_at) = query, key
  p = jnp.exp(_scores(pattern, q, k, q_at, k_at) - lse)
  ds = p * (dot("abhte,abhse->abhts", dout, v) - delta)
  return p.astype(q.dtype), ds.astype(q.dtype)


def _scores(pattern, q, k, q_at, k_at):
  """Scores, -inf off the pattern."""
  q_at, k_at = q_at[:, :, None], k_at[:, None]
  mask = pattern.mask(q_at, k_at) & (q_at >= 0) & (k_at >= 0)
  s = dot("abhtk,abhsk->abhts", q, k)
  return jnp.where(mask[:, None, None], s, -jnp.inf)


def _finite(max_):
  """0 while no key was seen: exp(-inf - 0) is 0, not NaN."""
  return jnp.where(max_ == -jnp.inf, 0, max_)


def dot(spec, a, b):
  """A product that adds up in float32 or wider."""
  dtype = jnp.promote_types(a.dtype, jnp.float32)
  return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def scale(q):
  """What scores are multiplied with, 1 / sqrt(K), in the queries' dtype."""
  return np.asarray(1 / np.sqrt(q.shape[-1]), q.dtype)


def pad(order, length):
  """The first `length` of an order of positions, filled up with -1."""
  order = order[:length]
  return np.pad(order, (0, length - len(order)), constant_values=-1)
