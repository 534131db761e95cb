"""Inputs of content-based patterns: directions and queries used as keys."""

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
  """Provides directions, centroids, and normalized queries as keys."""

  stacked = ("centroids",)
  losses = dict(codebook=0.01)

  @property
  def _contents(self) -> list[Content]:
    return [
      content
      for content in self.config.contents
      if content.num_directions > 0 or content.blocks_from
    ]

  @property
  def is_used(self) -> bool:
    return bool(self._contents)

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    """Draws centroids [layers, heads, clusters, K] of about unit length.

    Patterns with the same number of clusters share their centroids.
    """
    config = self.config
    rng = rngs.params()

    # Centroids are named by their number, so that a pattern with a different
    # window can load them too.
    centroids = {}
    for content in self._contents:
      num = content.num_directions
      # The random numbers depend only on the number of centroids, so they do
      # not change if other patterns are added.
      if content.is_learned:
        centroids[str(num)] = jax.random.normal(
          jax.random.fold_in(rng, num),
          (config.num_layers, config.num_heads, num, config.head_width),
          jnp.float32,
        ) / math.sqrt(config.head_width)
    return dict(centroids=centroids) if centroids else {}

  def arrays(self, params: dict) -> dict[str, Any]:
    """Maps each pattern to directions [layers, heads or 1, directions, K]."""
    return {
      str(content): self._directions(content, params)
      for content in self._contents
      if not content.blocks_from
    }

  def _directions(self, content, params):
    """Returns a pattern's directions, which are parameters or constants."""
    if content.is_learned:
      return params["centroids"][str(content.num_directions)]
    width = self.config.head_width
    layers = range(self.config.num_layers)
    return jnp.stack([content.directions(width, layer) for layer in layers])

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    # Only directions of the layer's own patterns are passed, because attention
    # rejects others.
    directions = {}
    for content in self._contents:
      if any(content in pattern.contents() for pattern in layer.patterns):
        if content.blocks_from:
          directions[content] = content.select(layer.symbols_BL)
        else:
          directions[content] = layer.arrays[str(content)]

    keys = _share_queries(layer.patterns, inputs.q_BLHK, inputs.k_BLGK)
    return inputs._replace(k_BLGK=keys).add(directions=directions)

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """Measures how far centroids are from the queries of their clusters.

    `codebook` is the mean of 1 minus the cosine between a query and the
    centroid of its cluster. Its gradient reaches only the centroids, so they
    move toward the queries.
    """
    # Queries are converted as in attention, so that they are in the same
    # buckets.
    q_BLHK = lax.stop_gradient(inputs.q_BLHK).astype(jnp.float32)

    # Heads with the same pattern are measured together.
    losses = []
    by_pattern = group_heads([(pattern,) for pattern in layer.patterns])
    for pattern, heads in by_pattern.items():
      index = index_of(heads, q_BLHK.shape[2])
      for content in pattern.contents():
        if content.is_learned and content in self._contents:
          centroids_HCK = inputs.keywords["directions"][content]
          loss_H = _codebook(
            content,
            q_BLHK[:, :, index],
            centroids_HCK[index],
          )
          losses.append(loss_H)
    return dict(codebook=jnp.concatenate(losses).mean()) if losses else {}


def _share_queries(patterns, q_BLHK, k_BLHK):
  """Replaces keys with unit-length queries in heads whose patterns need this.

  Source: Kitaev et al. 2020, arXiv 2001.04451.
  """
  is_shared_H = np.array(
    [any(c.keys_are_queries for c in p.contents()) for p in patterns]
  )
  if not is_shared_H.any():
    return k_BLHK
  unit_BLHK = _unit(q_BLHK.astype(jnp.float32)).astype(k_BLHK.dtype)
  return jnp.where(is_shared_H[None, None, :, None], unit_BLHK, k_BLHK)


def _codebook(content, q_BLHK, centroids_HCK):
  """Returns the loss of each head, 1 minus the mean cosine."""
  # The buckets are computed as in attention, so that the compiler computes them
  # only once.
  constant_HCK = lax.stop_gradient(centroids_HCK)
  known = Known(
    q_BLHK=q_BLHK,
    k_BMGK=q_BLHK,
    directions_HDK=constant_HCK,
  )
  buckets_BHL1 = content.find_buckets(known)
  clusters_BHL = buckets_BHL1[..., 0]

  # Queries are summed by cluster, instead of looking up a centroid for each
  # position. The gradient of a lookup is a scatter, whose order of additions is
  # not fixed on GPUs.
  is_in_BHLC = jax.nn.one_hot(clusters_BHL, content.num_directions)
  sums_HCK = jnp.einsum("bhlc,blhk->hck", is_in_BHLC, _unit(q_BLHK))
  sums_HCK = checkpoint_name(sums_HCK, NOT_RECOMPUTED)

  # The product of a centroid with the sum of queries is the sum of its products
  # with each query.
  cosines_H = (sums_HCK * _unit(centroids_HCK)).sum((1, 2))
  batch, length = q_BLHK.shape[:2]
  return 1 - cosines_H / (batch * length)


def _unit(x):
  """Scales vectors to unit length; zero vectors stay zero."""
  squares = (x**2).sum(-1, keepdims=True)
  return x * lax.rsqrt(jnp.maximum(squares, 1e-12))
