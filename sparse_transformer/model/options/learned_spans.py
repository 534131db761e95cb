"""Learned spans: each head learns how far back it attends."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_transformer.model.options.option import Inputs, Layer, Option

RAMP = 32  # positions over which weights fall to 0


class LearnedSpans(Option):
  """`model.max_span`, the longest span that a head can learn.

  For a head with a span of z positions, exp(score) of a key that is d positions
  away is multiplied by clip((RAMP + z - d) / RAMP, 0, 1). The logarithm of this
  weight is added to the score as a bias. Within the ramp, the weight has a
  gradient with respect to the span. Source: Sukhbaatar et al. 2019, arXiv
  1905.07799. In the paper, no head attends beyond the longest span, so a ramp
  that starts there is cut off.
  """

  stacked = ("spans",)
  losses = dict(span=1e-6)  # pushes spans to be short

  @property
  def is_used(self) -> bool:
    return self.config.max_span > 0

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    shape = self.config.num_layers, self.config.num_heads
    return dict(spans=jnp.zeros(shape, jnp.float32))

  @staticmethod
  def project(params: dict) -> dict:
    """Clips spans after an update, so a span at a bound keeps its gradient."""
    if "spans" not in params:
      return params
    return params | dict(spans=jnp.clip(params["spans"], 0, 1))

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    # The bias covers all distances of a full sequence, even when only a single
    # position runs.
    spans_H = self._spans(layer)
    return inputs.add(bias_HD=ramps(spans_H, self.config.length))

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """Measures `spans` [heads] and `span`, their mean.

    Both are numbers of positions; `span` is an auxiliary loss.
    """
    spans_H = self._spans(layer)
    return dict(
      span=spans_H.mean(),
      spans=spans_H,
    )

  def _spans(self, layer):
    # Parameters are shares of the longest span, so that one learning rate fits
    # spans of any length.
    shares_H = layer.arrays["spans"]
    return self.config.max_span * shares_H


def ramps(spans_H: jax.Array, n: int) -> jax.Array:
  """Computes the logarithm of each head's weight at each distance.

  Args:
    spans_H: the span z of each head, in positions.
    n: positions in a sequence.

  Returns:
    float32 [H, 2 n - 1]. Entries n - 1 - d and n - 1 + d are for keys that are
    d positions away. Entries are -inf where the weight is 0.
  """
  differences_D = np.arange(1 - n, n)
  distances_D = np.abs(differences_D)
  ends_H1 = spans_H[:, None] + RAMP
  room_HD = ends_H1 - distances_D[None]

  # `clamp` makes the derivative with respect to the span 0 at both ends of the
  # ramp.
  most = float(RAMP)
  room_HD = jax.lax.clamp(0.0, room_HD, most)
  weights_HD = room_HD / RAMP

  # Weights of 0 are replaced, because the gradient of the logarithm of 0 is not
  # finite.
  is_open_HD = weights_HD > 0
  weights_HD = jnp.where(is_open_HD, weights_HD, 1)
  logs_HD = jnp.log(weights_HD)
  return jnp.where(is_open_HD, logs_HD, -jnp.inf)
