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

  @staticmethod
  def project(params: dict) -> dict:
    """Clips spans after an update, so that they have a gradient at a bound."""
    if "spans" not in params:
      return params
    return params | dict(spans=jnp.clip(params["spans"], 0, 1))

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    shares_H = layer.arrays["spans"]

    directions = {}
    for pattern in map(attention.span_of, layer.patterns):
      if pattern is not None:
        directions[pattern] = pattern.max * shares_H
    return inputs.add_directions(directions)

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """Measures `spans` [heads], 0 without one, and `span`, their mean.

    Both are in positions; `span` is an auxiliary loss.
    """
    directions = inputs.keywords["directions"]
    spans_H = attention.spans_of_heads(layer.patterns, directions)
    if spans_H is None:
      return {}
    spans = map(attention.span_of, layer.patterns)
    num = sum(span is not None for span in spans)
    return dict(span=spans_H.sum() / num, spans=spans_H)
