"""Learned spans: parameters, as shares of the longest span."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_transformer import attention
from sparse_transformer.model.options.option import Inputs, Layer, Option


class LearnedSpans(Option):
  """The spans of patterns that learn them."""

  stacked = ("spans",)
  losses = dict(span=1e-6)  # shortens them

  @property
  def is_used(self) -> bool:
    heads = itertools.chain(*self.config.patterns)
    return any(attention.span_of(pattern) is not None for pattern in heads)

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    shape = self.config.num_layers, self.config.num_heads
    return dict(spans=jnp.zeros(shape, jnp.float32))

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    shares_H = layer.own["spans"]
    spans = {
      span: span.max * shares_H
      for span in map(attention.span_of, layer.patterns)
      if span is not None
    }
    return inputs.add_directions(spans)

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """`span`: the mean, in positions; `spans`: [heads], 0 without one."""
    directions = inputs.keywords["directions"]
    spans_H = attention.spans_of_heads(layer.patterns, directions)
    if spans_H is None:
      return {}
    spans = map(attention.span_of, layer.patterns)
    num = sum(span is not None for span in spans)
    return dict(span=spans_H.sum() / num, spans=spans_H)


def project(params: dict) -> dict:
  """The parameters of a network, moved into their bounds after an update."""
  # Not in the forward pass, so that spans have a gradient at a bound.
  spans = {k: jnp.clip(x, 0, 1) for k, x in params.items() if k == "spans"}
  return params | spans
