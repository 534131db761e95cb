"""The mathematics of the fused kernels, which use exponentials to base 2.

GPUs and TPUs compute 2^x in one instruction, and e^x as 2^(x log2 e). Kernels
multiply the factor of the scores by log2 e, which costs nothing because they
apply the factor anyway. Inside a kernel, scores and maxima are therefore to
base 2; log-sum-exps that a kernel returns are in nats.

The online softmax is that of Dao et al. 2022, arXiv 2205.14135, section 3.1.
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
  """Converts products of queries and keys to scores to base 2.

  The factor is returned rather than applied, so that a kernel can apply it in
  the instruction that also subtracts the maximum. The factor is always
  positive. To find the largest score, a kernel can therefore take the maximum
  of x first, and then multiply only this maximum by the factor. Scores are -inf
  where x is -inf.

  Args:
    products: q · k of each pair, float32.
    scores: the scale and the soft cap of the request.
    width: width of queries and keys, K, which determines the default scale.

  Returns:
    (x, factor, slope). x has the shape of the products, and the scores are
    factor * x. The slope is the derivative of the soft cap, or None if there is
    none.
  """
  factor = scores.factor(width)
  cap = scores.softcap

  # c tanh(s / c) has the derivative 1 - tanh(s / c)^2.
  if cap:
    share = jnp.tanh(products * (factor / cap))
    slope = 1 - share * share
    return share, LOG2_E * cap, slope

  # A negative factor would turn the maximum into a minimum, and 0 * -inf is
  # NaN.
  if factor <= 0:
    return products * (LOG2_E * factor), 1.0, None

  return products, LOG2_E * factor, None


def raise_max(
  running_max: jax.Array, tile_max: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Updates the running maximum of an online softmax with one more tile.

  Args:
    running_max: the maximum of the scores so far, to base 2; -inf before the
      first tile.
    tile_max: the maximum of the tile's scores, of the same shape.

  Returns:
    (new_max, shift, decay): subtract `shift` from scores before `exp2`, and
    multiply sums over earlier tiles by `decay`.
  """
  new_max = jnp.maximum(running_max, tile_max)

  # A query may have no keys yet. With a shift of 0, exp2(-inf - 0) is 0 rather
  # than NaN.
  shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
  return new_max, shift, jnp.exp2(running_max - shift)


def finish_softmax(
  running_max: jax.Array, normalizer: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Finishes an online softmax.

  Args:
    running_max: the maximum of all scores, to base 2.
    normalizer: the sum of exp2(score - maximum), 0 for a query without keys.

  Returns:
    (total, lse): divide the accumulator by `total`; `lse` is in nats. A query
    without keys gets output 0 and lse -inf, and no NaN.
  """
  is_empty = normalizer == 0
  total = jnp.where(is_empty, 1.0, normalizer)

  # Values are converted to base e only here, because everything outside kernels
  # is in nats.
  lse = (running_max + jnp.log2(total)) / LOG2_E
  return total, jnp.where(is_empty, -jnp.inf, lse)


def keep_pairs(
  x: jax.Array,
  pairs: jax.Array | None,
  fill: float,
) -> jax.Array:
  """Returns x where `pairs` is True or None, and `fill` elsewhere."""
  return x if pairs is None else jnp.where(pairs, x, fill)


def unpack(words: jax.Array, axis: int) -> jax.Array:
  """Unpacks a mask from its bits.

  Args:
    words: int32 [T, T / 32] or [T / 32, T]; the lowest bit comes first.
    axis: the axis of `words` whose entries contain 32 positions each.

  Returns:
    bool [T, T].
  """
  # Masks are stored as bits, because bytes would need eight times the
  # bandwidth.
  tile = max(words.shape)
  shape = list(words.shape)
  shape.insert(axis + 1, 32)

  words = jnp.expand_dims(words, axis + 1)
  words = jnp.broadcast_to(words, shape)

  # The shift must be logical, because an arithmetic shift would copy the sign,
  # bit 31.
  place = lax.broadcasted_iota(jnp.int32, shape, axis + 1)
  bits = lax.shift_right_logical(words, place) & 1
  return bits.reshape(tile, tile) != 0
