"""What content-based patterns need: directions, and keys that are queries."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_transformer.attention import group_heads, index_of
from sparse_transformer.model.block import NOT_RECOMPUTED
from sparse_transformer.model.options.option import Inputs, Layer, Option
from sparse_transformer.patterns import Content, Known


class Directions(Option):
  """Random directions, centroids, and keys that are queries."""

  stacked = ("centroids",)
  losses = dict(codebook=0.01)

  @property
  def _contents(self) -> list[Content]:
    return [c for c in self.config.contents if c.num_directions > 0]

  @property
  def is_used(self) -> bool:
    return bool(self._contents)

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    """Centroids [layers, heads, clusters, K], of about unit length.

    Patterns with equally many clusters share them.
    """
    config, rng = self.config, rngs.params()
    nums = {c.num_directions for c in self._contents if c.is_learned}
    shape = config.num_layers, config.num_heads

    def draw(num):
      rng_of_num = jax.random.fold_in(rng, num)
      size = *shape, num, config.head_width
      drawn = jax.random.normal(rng_of_num, size, jnp.float32)
      return drawn / math.sqrt(config.head_width)

    centroids = {str(num): draw(num) for num in nums}
    return dict(centroids=centroids) if nums else {}

  def own(self, params: dict) -> dict[str, Any]:
    return {str(c): self._directions(c, params) for c in self._contents}

  def _directions(self, content, params):
    """Directions of a pattern: [layers, heads or 1, directions, K]."""
    if content.is_learned:
      return params["centroids"][str(content.num_directions)]
    layers, width = range(self.config.num_layers), self.config.head_width
    return jnp.stack([content.directions(width, layer) for layer in layers])

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    keys = _share(layer.patterns, inputs.q_BLHK, inputs.k_BLGK)
    contents = {c for pattern in layer.patterns for c in pattern.contents()}
    given = {c: layer.own[str(c)] for c in self._contents if c in contents}
    return inputs._replace(k_BLGK=keys).add_directions(given)

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """With centroids, `codebook`: how far they are from the queries.

    The mean of 1 minus the cosine between a query and the centroid of its
    cluster. Only centroids get a gradient: they move to the queries.
    """
    q_BLHK = lax.stop_gradient(inputs.q_BLHK).astype(jnp.float32)
    losses = []
    by_pattern = group_heads([(pattern,) for pattern in layer.patterns])
    for pattern, heads in by_pattern.items():
      index = index_of(heads, q_BLHK.shape[2])
      for content in pattern.contents():
        if content.is_learned and content in self._contents:
          centroids = inputs.keywords["directions"][content][index]
          losses.append(_codebook(content, q_BLHK[:, :, index], centroids))
    return dict(codebook=jnp.concatenate(losses).mean()) if losses else {}


def _share(heads, q_BLHK, k_BLHK):
  """The keys; in heads whose keys are queries, these at unit length."""
  contents = (pattern.contents() for pattern in heads)
  shares = [any(c.keys_are_queries for c in x) for x in contents]
  if not any(shares):
    return k_BLHK
  unit_BLHK = _unit(q_BLHK.astype(jnp.float32)).astype(k_BLHK.dtype)
  if all(shares):
    return unit_BLHK
  return jnp.where(np.array(shares)[None, None, :, None], unit_BLHK, k_BLHK)


def _codebook(content, q_BLHK, centroids_HCK):
  """The loss of each head."""
  # As in attention, so that the compiler finds them once.
  given = lax.stop_gradient(centroids_HCK)
  labels_BHL = content.find_buckets(Known(q_BLHK, q_BLHK, given))[..., 0]
  # Sums by cluster, not centroids by position: their gradient needs no
  # scatter, whose order of additions GPUs do not fix.
  is_in_BHLC = jax.nn.one_hot(labels_BHL, content.num_directions)
  sums_HCK = jnp.einsum("bhlc,blhk->hck", is_in_BHLC, _unit(q_BLHK))
  sums_HCK = checkpoint_name(sums_HCK, NOT_RECOMPUTED)
  cosines_H = (sums_HCK * _unit(centroids_HCK)).sum((1, 2))
  return 1 - cosines_H / (q_BLHK.shape[0] * q_BLHK.shape[1])


def _unit(x):
  """Vectors at unit length; zeros stay zeros."""
  squares = (x**2).sum(-1, keepdims=True)
  return x * lax.rsqrt(jnp.maximum(squares, 1e-12))
