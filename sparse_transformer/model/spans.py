"""The learned spans of heads: parameters, their loss and their bounds.

A parameter is a span as a share of the longest one. It starts at 0 and is
brought back into [0, 1] after each update, as in the code of Sukhbaatar et al.
2019. The forward pass does not clip it: at a bound it still has its gradient.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparse_transformer.attention.spans import of_heads, span_of
from sparse_transformer.model.config import Config
from sparse_transformer.patterns import Pattern

NAME = "spans"  # of the parameter


def init(config: Config) -> jax.Array | None:
  """The parameter [layers, heads]; None if no pattern needs one."""
  if not any(map(any_span, config.patterns)):
    return None
  return jnp.zeros((config.num_layers, config.num_heads))


def any_span(heads: Sequence[Pattern]) -> bool:
  """Whether any head of a layer has a span."""
  return any(span_of(pattern) is not None for pattern in heads)


def by_pattern(
  heads: Sequence[Pattern], shares_H: jax.Array | None
) -> dict[Pattern, jax.Array]:
  """The spans [heads] in positions, for each pattern that needs them."""
  if shares_H is None:
    return {}
  spans = map(span_of, heads)
  return {span: span.max * shares_H for span in spans if span is not None}


def measure(
  heads: Sequence[Pattern], spans: dict[Pattern, jax.Array]
) -> dict[str, jax.Array]:
  """The auxiliary loss of the spans of a layer, if it has any.

  Returns:
    `span`: the mean span, in positions.
    `spans`: [heads], each of them, 0 for heads without.
  """
  # Stubs of NumPy and JAX disagree on whether jnp.float32 is a dtype.
  spans_H = of_heads(heads, spans, jnp.float32)  # type: ignore[arg-type]
  if spans_H is None:
    return {}
  num = sum(span_of(pattern) is not None for pattern in heads)
  return dict(span=spans_H.sum() / num, spans=spans_H)


def clip_spans(params: dict) -> dict:
  """The parameters of a network, with its spans brought back into bounds."""
  if NAME not in params:
    return params
  return params | {NAME: jnp.clip(params[NAME], 0, 1)}
