"""The mathematics of the fused kernels, with exponentials to base 2.

GPUs and TPUs compute 2^x in one instruction.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from sparse_transformer.attention.contract import Scores

LOG2_E = math.log2(math.e)


def scale_products(
  products: jax.Array,
  scores: Scores,
  width: int,
) -> tuple[jax.Array, float, jax.Array | None]:
  """Scores to base 2, from products of queries and keys of a width.

  Returns:
    x, of the shape of the products; a factor above 0; and the slope of the soft
    cap, or None without one. The scores are factor * x: the factor may be
    applied to the largest x alone, and where x is -inf, they are.
  """
  factor = scores.factor(width)
  cap = scores.softcap

  if cap:
    share = jnp.tanh(products * (factor / cap))
    slope = 1 - share * share
    return share, LOG2_E * cap, slope
  if factor <= 0:
    return products * (LOG2_E * factor), 1.0, None
  return products, LOG2_E * factor, None


def raise_max(
  running_max: jax.Array, tile_max: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(the larger maximum, what to subtract, the decay of earlier sums)."""
  new_max = jnp.maximum(running_max, tile_max)
  # A query may have no keys yet: exp2(-inf - 0) is 0, not NaN.
  shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
  return new_max, shift, jnp.exp2(running_max - shift)


def finish_softmax(
  running_max: jax.Array, normalizer: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(what to divide the accumulator by, the log-sum-exp in nats)."""
  is_empty = normalizer == 0
  total = jnp.where(is_empty, 1.0, normalizer)
  lse = (running_max + jnp.log2(total)) / LOG2_E
  return total, jnp.where(is_empty, -jnp.inf, lse)


def keep_pairs(
  x: jax.Array,
  pairs: jax.Array | None,
  fill: float,
) -> jax.Array:
  """x where there are pairs, and `fill` elsewhere; None for all pairs."""
  return x if pairs is None else jnp.where(pairs, x, fill)


def unpack(words: jax.Array, axis: int) -> jax.Array:
  """A mask, bool, from its bits: each word of int32 is 32 places on an axis."""
  tile = max(words.shape)
  shape = list(words.shape)
  shape.insert(axis + 1, 32)

  words = jnp.expand_dims(words, axis + 1)
  words = jnp.broadcast_to(words, shape)
  place = lax.broadcasted_iota(jnp.int32, shape, axis + 1)
  bits = lax.shift_right_logical(words, place) & 1
  return bits.reshape(tile, tile) != 0
