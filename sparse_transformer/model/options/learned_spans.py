"""Learned spans: parameters, as shares of the longest span."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_transformer.attention.content import spans
from sparse_transformer.model.options.option import Inputs, Layer, Option


class LearnedSpans(Option):
  """The spans of patterns that learn them."""

  stacked = ("spans",)
  losses = dict(span=1e-6)  # shortens them

  @property
  def is_used(self) -> bool:
    return any(map(spans.any_span, self.config.patterns))

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    shape = self.config.num_layers, self.config.num_heads
    return dict(spans=jnp.zeros(shape, jnp.float32))

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    found, shares_H = map(spans.span_of, layer.patterns), layer.own["spans"]
    of_heads = {x: x.max * shares_H for x in found if x is not None}
    return inputs.add_directions(of_heads)

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """`span`: the mean, in positions; `spans`: [heads], 0 without one."""
    directions = inputs.keywords["directions"]
    spans_H = spans.of_heads(layer.patterns, directions)
    if spans_H is None:
      return {}
    num = sum(spans.span_of(pattern) is not None for pattern in layer.patterns)
    return dict(span=spans_H.sum() / num, spans=spans_H)


def project(params: dict) -> dict:
  """The parameters of a network, moved into their bounds after an update."""
  # Not in the forward pass, so that spans have a gradient at a bound.
  spans = {k: jnp.clip(x, 0, 1) for k, x in params.items() if k == "spans"}
  return params | spans
