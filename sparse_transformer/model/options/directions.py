"""What patterns that follow the content need: directions, and their keys.

Queries are projected onto directions: random vectors of each layer, or
centroids of clusters, which are parameters. Some patterns take the queries as
keys.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_transformer.attention.content.selection import with_content
from sparse_transformer.attention.heads import index_of
from sparse_transformer.model.block import NOT_RECOMPUTED
from sparse_transformer.model.options.option import Inputs, Layer, Option
from sparse_transformer.patterns import Pattern, shorten
from sparse_transformer.patterns.content import Content


class Directions(Option):
  """Random directions, centroids, and keys that are queries."""

  stacked = ("centroids",)
  losses = dict(codebook=0.01)

  @property
  def _contents(self) -> set[Content]:
    return set().union(*map(_contents, self.config.patterns))

  @property
  def is_used(self) -> bool:
    return any(map(_projects, self._contents))

  def check(self) -> None:
    config = self.config
    is_grouped = config.num_key_heads < config.num_heads
    for content in self._contents:
      if content.keys_are_queries and (
        is_grouped or config.positions != "learned"
      ):
        raise ValueError(
          f"{shorten(content)} has queries for keys, whatever their positions:"
          " it needs model.key_heads=0 and model.positions=learned, not"
          f" {config.key_heads} and {config.positions}"
        )

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    """Centroids [layers, heads, clusters, K], of about unit length.

    Those with the same number of clusters are shared by all patterns.
    """
    config, rng = self.config, rngs.params()
    learned = filter(has_centroids, self._contents)
    nums = sorted({content.num_directions for content in learned})
    shape = config.num_layers, config.num_heads

    def draw(num):
      rng_of_num = jax.random.fold_in(rng, num)
      drawn = jax.random.normal(rng_of_num, (*shape, num, config.head_width))
      return drawn / np.sqrt(config.head_width)

    return dict(centroids={str(n): draw(n) for n in nums}) if nums else {}

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    contents = filter(_projects, _contents(layer.patterns))
    keys = _share(layer.patterns, inputs.q_BLHK, inputs.k_BLGK)
    inputs = inputs._replace(k_BLGK=keys)
    return inputs.add_directions({c: self._of(c, layer) for c in contents})

  def _of(self, content, layer):
    """The directions of a pattern: [heads or 1, directions, K]."""
    if has_centroids(content):
      return layer.params["centroids"][str(content.num_directions)]
    width = self.config.head_width
    drawn = [content.directions(width, number) for number in layer.stack]
    return jnp.asarray(np.stack(drawn))[layer.place]

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """With centroids, `codebook`: how far they are from the queries.

    The mean of 1 minus the cosine between a query and the centroid of its
    cluster, which moves to the queries: they get no gradient.
    """
    q_BLHK = lax.stop_gradient(inputs.q_BLHK).astype(jnp.float32)
    losses = [
      _codebook(
        content,
        q_BLHK[:, :, index_of(using)],
        inputs.keywords["directions"][content][index_of(using)],
      )
      for pattern, using in with_content(layer.patterns).items()
      for content in filter(has_centroids, pattern.contents())
    ]
    return dict(codebook=jnp.concatenate(losses).mean()) if losses else {}


def _projects(content):
  return content.num_directions > 0


def has_centroids(content: Content) -> bool:
  """Returns whether a pattern's directions are parameters."""
  return content.num_directions > 0 and content.directions(1) is None


def _share(
  heads: Sequence[Pattern], q_BLHK: jax.Array, k_BLHK: jax.Array
) -> jax.Array:
  """The keys; the queries at unit length in heads that have these for keys."""
  shares = [
    any(c.keys_are_queries for c in pattern.contents()) for pattern in heads
  ]
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
  labels_BHL = content.labels(q_BLHK, q_BLHK, given)[..., 0]
  # Sums by cluster, not centroids by position: their gradient needs no
  # scatter, whose order of additions GPUs do not fix.
  is_in_BHLC = jax.nn.one_hot(labels_BHL, content.num_directions)
  sums_HCK = jnp.einsum("bhlc,blhk->hck", is_in_BHLC, _unit(q_BLHK))
  sums_HCK = checkpoint_name(sums_HCK, NOT_RECOMPUTED)
  cosines_H = (sums_HCK * _unit(centroids_HCK)).sum((1, 2))
  return 1 - cosines_H / (q_BLHK.shape[0] * q_BLHK.shape[1])


def _contents(heads: Sequence[Pattern]) -> dict[Content, None]:
  """The content-based patterns in those of heads, in their order."""
  return dict.fromkeys(c for pattern in heads for c in pattern.contents())


def _unit(x: jax.Array) -> jax.Array:
  """Vectors at unit length; zeros stay zeros."""
  squares = (x**2).sum(-1, keepdims=True)
  return x * lax.rsqrt(jnp.maximum(squares, 1e-12))
