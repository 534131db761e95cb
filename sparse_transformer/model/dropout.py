"""Dropout with masks that are drawn as packed bits, 32 values per word."""

import fractions
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

WORD = 32  # bits
# The largest error of the share of dropped values, relative to the rate, or to
# the share of kept values if that is smaller.
TOLERANCE = fractions.Fraction(1, 200)


def share(rate: float) -> fractions.Fraction:
  """Rounds a dropout rate to the share of values that is actually dropped.

  For each value, one random bit must be drawn per binary digit of the share.
  The share is therefore rounded to as few digits as `TOLERANCE` permits.

  Args:
    rate: the rate of dropout, at least 0 and below 1.

  Example: 0.25 is exact, 0.4 is rounded to 51/128, and 0.1 to 51/512.
  """
  exact = fractions.Fraction(rate)
  largest_error = TOLERANCE * min(exact, 1 - exact)

  # The loop ends, because a float has finitely many binary digits.
  denominator = 1
  rounded = fractions.Fraction(round(exact))
  while abs(rounded - exact) > largest_error:
    denominator *= 2
    rounded = fractions.Fraction(round(exact * denominator), denominator)
  return rounded


@jax.named_scope("dropout")
def draw(key: jax.Array, shape: Sequence[int], rate: float) -> jax.Array:
  """Draws a bit mask of values to drop, each with probability `share(rate)`.

  The mask depends on the key, the shape and the rate, but not on how arrays are
  sharded over devices.

  A value is dropped if a random number in [0, 1) is less than the share. The
  denominator of the share is a power of two. The random numbers of 32 values
  are compared with the share at once, one binary digit after another. Each
  random word contains one digit of each of these numbers.

  Args:
    key: the PRNG key.
    shape: the shape of the values, [..., B, L, D].
    rate: the dropout rate, which `share` rounds.

  Returns:
    A bit mask of the dropped values, packed along L into words, uint32 [..., B,
    ceil(L / 32), D]: bit i of word w is set if the value at position 32 w + i
    is dropped.
  """
  dropped = share(rate)
  *leading, batch, length, width = shape
  digits = dropped.denominator.bit_length() - 1
  # The bits of a word belong to neighboring positions of a single feature,
  # because features are contiguous in memory, and are therefore processed as
  # vectors of words.
  num_words = -(-length // WORD)
  # Draw three axes instead of five or six, because XLA's compile time on CPUs
  # doubles with each axis. Axes that a mesh may split stay the major ones.
  drawn = jax.random.bits(
    key, (digits * math.prod(leading), batch, num_words * width), jnp.uint32
  )
  words = *leading, batch, num_words, width
  drawn = drawn.reshape(digits, *words)

  # Digits are compared from the last to the first, so that earlier digits
  # override later ones unless they are equal to the digit of `dropped`. If the
  # digit of `dropped` is 1, a number with the digit 0 is less. If it is 0, a
  # number with the digit 1 is not less. A drawn bit of 1 represents the digit 0
  # of the number.
  is_less = jnp.zeros(words, jnp.uint32)
  for place in range(digits):
    if dropped.numerator >> place & 1:
      is_less |= drawn[place]
    else:
      is_less &= drawn[place]

  # Kept in memory: it would be fused with what follows, and be drawn again for
  # each bit of a word.
  return lax.optimization_barrier(is_less)


@jax.named_scope("dropout")
def drop(
  x_BLD: jax.Array, words_BWD: jax.Array | None, rate: float
) -> jax.Array:
  """Sets dropped values to 0, and divides the others by `1 - share(rate)`.

  Args:
    x_BLD: floating-point values.
    words_BWD: a bit mask of the values to drop, as `draw` returns it; None
      drops no values.
    rate: the dropout rate that was passed to `draw`.

  Returns an array of the same shape and dtype; its expected value is `x_BLD`.
  Source: Srivastava et al. 2014, "Dropout".
  """
  if words_BWD is None:
    return x_BLD

  batch, length, width = x_BLD.shape
  num_words = words_BWD.shape[1]
  bits = jnp.arange(WORD, dtype=jnp.uint32)[None, None, :, None]
  is_dropped = words_BWD[:, :, None] >> bits & 1
  mask = is_dropped.astype(bool).reshape(batch, num_words * WORD, width)

  # XLA would move the zeros of a `jnp.where` out of the scan over layers, and
  # each layer would read them from memory.
  return lax.select(
    mask[:, :length],
    jnp.zeros_like(x_BLD),
    x_BLD / float(1 - share(rate)),
  )
