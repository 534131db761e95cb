"""Inputs that content-based patterns need from the network.

They project queries onto directions: random vectors of each layer, or centroids
of clusters, which are parameters. Some take the queries as keys.

Spans are parameters, as shares of the longest one, that start at 0 and are
clipped to [0, 1] after each update, as in the code of Sukhbaatar et al. 2019.
The forward pass does not clip them: at a bound they still have a gradient.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_transformer.attention.content import spans
from sparse_transformer.attention.content.selection import (
  LABELS_NAME,
  with_content,
)
from sparse_transformer.attention.heads import index_of
from sparse_transformer.model.hyperparameters import Config
from sparse_transformer.patterns import AdaptiveSpan, Pattern
from sparse_transformer.patterns.content import Content

# Rematerialization keeps the labels: recomputed queries may round differently,
# and give other labels.
SAVED_NAMES = LABELS_NAME, "codebook"

SPANS = "spans"  # the parameter of the spans

# {pattern: [heads or 1, directions, K], or spans [heads]} of a layer.
Directions = Mapping[Pattern, jax.Array]
# (centroids by number of clusters: [layers, heads, clusters, K], shares
# [layers, heads] or None); one layer has no first axis.
Learned = tuple[Mapping[str, jax.Array], jax.Array | None]


def init_spans(config: Config) -> jax.Array | None:
  """The shares of all layers and heads; None if no pattern has a span."""
  if not any(map(spans.any_span, config.patterns)):
    return None
  return jnp.zeros((config.num_layers, config.num_heads))


def clip_spans(params: dict) -> dict:
  """The parameters of a network, with its spans clipped to their bounds."""
  if SPANS not in params:
    return params
  return params | {SPANS: jnp.clip(params[SPANS], 0, 1)}


def init_centroids(config: Config, rng: jax.Array) -> dict[str, jax.Array]:
  """Draws the centroids of all layers and heads, of about unit length."""
  contents = {c for heads in config.patterns for c in _contents(heads)}
  width = config.qk_width // config.num_heads
  of_layers = config.num_layers, config.num_heads
  return {
    str(num): jax.random.normal(
      jax.random.fold_in(rng, num), (*of_layers, num, width)
    )
    / np.sqrt(width)
    for num in sorted(c.num_directions for c in contents if has_centroids(c))
  }


def learned_patterns(config: Config) -> list[list[set[Content]]]:
  """By layer and head: its patterns whose parameters are of the network."""
  return [
    [
      {
        content
        for content in pattern.contents()
        if isinstance(content, AdaptiveSpan) or has_centroids(content)
      }
      for pattern in heads
    ]
    for heads in config.patterns
  ]


def has_centroids(content: Content) -> bool:
  """Returns whether a pattern's directions are parameters."""
  return content.num_directions > 0 and content.directions(1) is None


def directions(
  heads: Sequence[Pattern],
  layers: Sequence[int],
  index: jax.Array | int,
  learned: Learned,
  width: int,
) -> Directions:
  """The directions of a layer, and the spans of its heads in positions.

  Args:
    heads: the patterns of its heads.
    layers: the layers of its stack, see `transformer.stacks`.
    index: which of them it is; may be traced.
    learned: of the layer.
    width: of a head's queries, K.
  """
  centroids, shares_H = learned

  def of(content):
    if isinstance(content, AdaptiveSpan):
      assert shares_H is not None
      return content.max * shares_H
    if has_centroids(content):
      return centroids[str(content.num_directions)]
    drawn = np.stack([content.directions(width, layer) for layer in layers])
    return jnp.asarray(drawn)[index]

  return {
    c: of(c)
    for c in _contents(heads)
    if c.num_directions or isinstance(c, AdaptiveSpan)
  }


def share(
  heads: Sequence[Pattern], q_BLHK: jax.Array, k_BLHK: jax.Array
) -> jax.Array:
  """The keys; in heads whose pattern `shares`, the queries at unit length."""
  shares = [
    any(c.keys_are_queries for c in pattern.contents()) for pattern in heads
  ]
  if not any(shares):
    return k_BLHK
  unit_BLHK = _unit(q_BLHK.astype(jnp.float32)).astype(k_BLHK.dtype)
  if all(shares):
    return unit_BLHK
  return jnp.where(np.array(shares)[None, None, :, None], unit_BLHK, k_BLHK)


def measure(
  heads: Sequence[Pattern], q_BLHK: jax.Array, directions: Directions
) -> dict[str, jax.Array]:
  """The auxiliary losses of the parameters of a layer.

  Returns:
    With centroids, `codebook`: the mean of 1 minus the cosine between a query
      and the centroid of its cluster, which moves to the queries: they get no
      gradient.
    With spans, `span`: the mean, in positions; and `spans`: [heads], else 0.
  """
  spans_H = spans.of_heads(heads, directions)
  found = {}
  if spans_H is not None:
    num = sum(spans.span_of(pattern) is not None for pattern in heads)
    found = dict(span=spans_H.sum() / num, spans=spans_H)
  q_BLHK = lax.stop_gradient(q_BLHK).astype(jnp.float32)
  losses = [
    _codebook(
      content,
      q_BLHK[:, :, index_of(using)],
      directions[content][index_of(using)],
    )
    for pattern, using in with_content(heads).items()
    for content in filter(has_centroids, pattern.contents())
  ]
  if losses:
    found["codebook"] = jnp.concatenate(losses).mean()
  return found


def _codebook(content, q_BLHK, centroids_HCK):
  """The loss of each head."""
  # As in attention, so that the compiler finds them once.
  given = lax.stop_gradient(centroids_HCK)
  labels_BHL = content.labels(q_BLHK, q_BLHK, given)[..., 0]
  # Sums by cluster, not centroids by position: their gradient needs no
  # scatter, whose order of additions GPUs do not fix.
  is_in_BHLC = jax.nn.one_hot(labels_BHL, content.num_directions)
  sums_HCK = jnp.einsum("bhlc,blhk->hck", is_in_BHLC, _unit(q_BLHK))
  sums_HCK = checkpoint_name(sums_HCK, SAVED_NAMES[1])
  cosines_H = (sums_HCK * _unit(centroids_HCK)).sum((1, 2))
  return 1 - cosines_H / (q_BLHK.shape[0] * q_BLHK.shape[1])


def _contents(heads: Sequence[Pattern]) -> list[Content]:
  """The content-based patterns in those of heads."""
  return list(dict.fromkeys(c for pattern in heads for c in pattern.contents()))


def _unit(x: jax.Array) -> jax.Array:
  """Vectors at unit length; zeros stay zeros."""
  squares = (x**2).sum(-1, keepdims=True)
  return x * lax.rsqrt(jnp.maximum(squares, 1e-12))
