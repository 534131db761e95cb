"""Sinks: each head's learned logit takes a share of its attention weights.

This allows a head to attend to nothing at all.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from sparse_transformer.model.options.option import Inputs, Layer, Option


class Sinks(Option):
  """`model.sinks`. Initially, each sink acts like a key with a score of 0."""

  stacked = ("sinks",)

  @property
  def is_used(self) -> bool:
    return self.config.sinks

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    shape = self.config.num_layers, self.config.num_heads
    return dict(sinks=jnp.zeros(shape, jnp.float32))

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    return inputs.add(sinks_H=layer.arrays["sinks"])
