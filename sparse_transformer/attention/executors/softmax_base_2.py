"""The softmax of the fused kernels, with exponentials to base 2.

GPUs and TPUs compute 2^x in one instruction. Scores to base 2 are products
times a factor, which a kernel applies where it costs least.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_transformer.attention.contract import Scores

LOG2_E = math.log2(math.e)


def scaled(
  s: jax.Array, scores: Scores, width: int, tanh: Callable = jnp.tanh
) -> tuple[jax.Array, float, jax.Array | None]:
  """(scores, their factor, the slope of the soft cap or None).

  Args:
    s: products of queries and keys of a width.
    scores: how scores follow from products.
    width: K.
    tanh: of float32.

  The factor is above 0, so that it may be applied to the largest score, and
  -inf stays -inf.
  """
  factor, cap = scores.factor(width), scores.softcap
  if cap:
    share = tanh(s * (factor / cap))
    return share, LOG2_E * cap, 1 - share * share
  if factor <= 0:
    return s * (LOG2_E * factor), 1.0, None
  return s, LOG2_E * factor, None


def raise_max(
  old: jax.Array, found: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(the larger maximum, what to subtract, the decay of earlier sums)."""
  new = jnp.maximum(old, found)
  # A row may have no keys yet: exp2(-inf - 0) is 0, not NaN.
  shift = jnp.where(new == -jnp.inf, 0.0, new)
  return new, shift, jnp.exp2(old - shift)


def total_and_lse(
  max_: jax.Array, sum_: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(what to divide the output by, the log-sum-exp in nats)."""
  is_empty = sum_ == 0
  total = jnp.where(is_empty, 1.0, sum_)
  lse = (max_ + jnp.log2(total)) / LOG2_E
  return total, jnp.where(is_empty, -jnp.inf, lse)
