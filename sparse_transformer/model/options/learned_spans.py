"""Learned spans: how far back heads attend, as shares of the longest span."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_transformer.model.options.option import Inputs, Layer, Option

RAMP = 32  # positions over which weights fall to 0


class LearnedSpans(Option):
  """`model.max_span`, the longest span of a head.

  With a span of z positions, exp(score) of a key that is d positions away has
  the weight clip((RAMP + z - d) / RAMP, 0, 1), whose logarithm is a bias. The
  ramp gives the span its gradient. Source: Sukhbaatar et al. 2019, arXiv
  1905.07799, where the ramp of the longest span is cut off.
  """

  stacked = ("spans",)
  losses = dict(span=1e-6)  # shortens them

  @property
  def is_used(self) -> bool:
    return self.config.max_span > 0

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
    # All distances of a full sequence, also where a single position runs.
    spans_H = self._spans(layer)
    return inputs.add(bias_HD=ramps(spans_H, self.config.length))

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """Measures `spans` [heads] and `span`, their mean.

    Both are in positions; `span` is an auxiliary loss.
    """
    spans_H = self._spans(layer)
    return dict(
      span=spans_H.mean(),
      spans=spans_H,
    )

  def _spans(self, layer):
    # Parameters are shares, so that one learning rate fits spans of any length.
    shares_H = layer.arrays["spans"]
    return self.config.max_span * shares_H


def ramps(spans_H: jax.Array, n: int) -> jax.Array:
  """Computes the logarithms of weights by distance.

  Args:
    spans_H: z of each head, in positions.
    n: positions in a sequence.

  Returns:
    float32 [H, 2 n - 1], in which entry n - 1 + d is for keys that are d
    positions away, on either side; -inf where the weight is 0.
  """
  differences_D = np.arange(1 - n, n)
  distances_D = np.abs(differences_D)
  ends_H1 = spans_H[:, None] + RAMP
  room_HD = ends_H1 - distances_D[None]

  # At the ends of the ramp, the derivative with respect to the span is 0.
  most = float(RAMP)
  room_HD = jax.lax.clamp(0.0, room_HD, most)
  weights_HD = room_HD / RAMP

  # The logarithm of 0 would have gradients that are not finite.
  is_open_HD = weights_HD > 0
  weights_HD = jnp.where(is_open_HD, weights_HD, 1)
  logs_HD = jnp.log(weights_HD)
  return jnp.where(is_open_HD, logs_HD, -jnp.inf)
