"""The spans of heads: the weights of pairs, and the parts that have them."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention.contract import Heads, group_heads
from sparse_transformer.patterns import AdaptiveSpan, Pattern


def span_of(pattern: Pattern) -> AdaptiveSpan | None:
  """The `AdaptiveSpan` that a head's pattern contains; it has one at most."""
  found = (c for c in pattern.contents() if isinstance(c, AdaptiveSpan))
  return next(found, None)


def of_heads(
  patterns: Sequence[Pattern],
  directions: Mapping[Pattern, jax.Array],
  dtype: jnp.dtype,
) -> jax.Array | None:
  """The spans [H] of heads, 0 for those without; None if none has any.

  Args:
    patterns: one per head.
    directions: as in `attention.attend`.
    dtype: of the result.
  """
  spans = [span_of(pattern) for pattern in patterns]
  if all(span is None for span in spans):
    return None

  def of_head(head, span):
    if span is None:
      return jnp.zeros((), dtype)
    given = jnp.asarray(directions[span], dtype)
    return given[head if len(given) > 1 else 0]

  return jnp.stack([of_head(*item) for item in enumerate(spans)])


def parts(patterns: tuple[Pattern, ...]) -> dict[Pattern, Heads]:
  """The parts of heads' patterns that have spans, each with its heads."""

  def of_head(pattern):
    return () if span_of(pattern) is None else pattern.split()[1]

  return group_heads([of_head(pattern) for pattern in patterns])


def weights_of(
  pattern: AdaptiveSpan, spans: jax.Array, distance: jax.Array | np.ndarray
) -> jax.Array:
  """The weights of pairs within the support of a pattern.

  At the ends of the ramp, the derivative by the span is 0.

  Args:
    pattern: its ramp counts.
    spans: in positions.
    distance: q - k, of a shape that broadcasts.
  """
  room = spans + pattern.ramp - distance
  first, last = (jnp.asarray(end, room.dtype) for end in (0, pattern.ramp))
  return lax.clamp(first, room, last) / pattern.ramp


def weights(
  patterns: tuple[Pattern, ...],
  spans_H: jax.Array,
  q: jax.Array | np.ndarray,
  k: jax.Array | np.ndarray,
) -> jax.Array:
  """The weights [H, ...] of pairs, 1 for those of static patterns.

  Args:
    patterns: one per head.
    spans_H: in positions.
    q, k: positions of shapes that broadcast to [...].
  """
  rows = []
  for head, pattern in enumerate(patterns):
    row = jnp.ones((q - k).shape, spans_H.dtype)
    if (span := span_of(pattern)) is not None:
      ramp = weights_of(span, spans_H[head], q - k)
      for part in pattern.split()[1]:
        row = jnp.where(part.support().mask(q, k), ramp, row)
    rows.append(row)
  return jnp.stack(rows)
