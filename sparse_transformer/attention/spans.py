"""The spans of heads: the weights of pairs, and the parts that have them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention.contract import Heads
from sparse_transformer.patterns import AdaptiveSpan, Pattern


def span_of(pattern: Pattern) -> AdaptiveSpan | None:
  """The `AdaptiveSpan` that a head's pattern contains; it has one at most."""
  found = (c for c in pattern.contents() if isinstance(c, AdaptiveSpan))
  return next(found, None)


def check_spans(patterns: Sequence[Pattern], spans: Any) -> None:
  """Checks that heads whose patterns need spans have them.

  Args:
    patterns: one per head.
    spans: as in `attention.attend`.

  Raises:
    ValueError: they are missing, superfluous, or of another shape or dtype.
  """
  needed = next((p for p in patterns if span_of(p) is not None), None)
  num = len(patterns)
  if needed is None:
    if spans is not None:
      raise ValueError("spans are given, but no head's pattern has any")
  elif spans is None:
    raise ValueError(
      f"{needed} needs the spans of its heads, an array [{num}] in positions:"
      " pass attend(..., spans=array)"
    )
  elif np.shape(spans) not in ((num,), (1,)):
    raise ValueError(
      f"spans must be [{num}], one per head, or [1] for all, got"
      f" {list(np.shape(spans))}"
    )
  elif not jnp.issubdtype(jnp.result_type(spans), jnp.floating):
    raise ValueError(
      f"spans must be floating-point numbers, got {jnp.result_type(spans)}"
    )


def of_heads(spans: jax.Array | None, q_BLHK: jax.Array) -> jax.Array | None:
  """The spans, one per head, in float32 or wider."""
  if spans is None:
    return None
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  return jnp.broadcast_to(jnp.asarray(spans, dtype), q_BLHK.shape[2:3])


def parts(patterns: tuple[Pattern, ...]) -> list[tuple[Pattern, Heads]]:
  """The parts of heads' patterns that have spans, each with its heads."""
  heads: dict[Pattern, list[int]] = {}
  for head, pattern in enumerate(patterns):
    if span_of(pattern) is not None:
      for part in pattern.split()[1]:
        heads.setdefault(part, []).append(head)
  everyone = list(range(len(patterns)))
  return [
    (part, None if found == everyone else tuple(found))
    for part, found in heads.items()
  ]


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
  return _room(pattern, spans, distance) / pattern.ramp


def slopes_of(
  pattern: AdaptiveSpan, spans: jax.Array, distance: jax.Array | np.ndarray
) -> jax.Array:
  """The derivatives of `weights_of` by the spans."""
  room = _room(pattern, spans, distance)
  return jnp.where((room > 0) & (room < pattern.ramp), 1 / pattern.ramp, 0)


def _room(pattern, spans, distance):
  """What is left of the ramp at a distance, in positions."""
  left = spans + pattern.ramp - distance
  return lax.clamp(jnp.zeros((), left.dtype), left, 1.0 * pattern.ramp)


def weights(
  patterns: tuple[Pattern, ...], spans_H: jax.Array, n: int
) -> jax.Array:
  """The weights [H, L, M] of pairs, 1 for those of static patterns."""
  i = np.arange(n)
  distance = i[:, None] - i
  rows = []
  for head, pattern in enumerate(patterns):
    row = jnp.ones((n, n), spans_H.dtype)
    if (span := span_of(pattern)) is not None:
      ramp = weights_of(span, spans_H[head], distance)
      for part in pattern.split()[1]:
        row = jnp.where(part.support().matrix(n), ramp, row)
    rows.append(row)
  return jnp.stack(rows)
