"""`attend` as the attention function of Flax's modules."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparse_transformer.attention import arguments
from sparse_transformer.attention.dispatch import attend
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.patterns.catalogue import Causal

# Arguments that Flax may pass and that are ignored, because they change
# nothing. For example, the softmax is always in float32 or wider.
HARMLESS = "broadcast_dropout", "dropout_rng", "force_fp32_for_softmax"


def as_attention_fn(
  patterns: Pattern | str | Sequence[Pattern | str], **settings: Any
) -> Callable[..., jax.Array]:
  """Returns an `attention_fn` for Flax that calls `attend` with these patterns.

  The function is for `nnx.MultiHeadAttention` and
  `linen.MultiHeadDotProductAttention`. With `decode=True`, these layers pass
  one query and the mask of their cache, [batch..., 1, 1, n]. The function then
  assumes that the query is at the last position that the mask allows for any
  sequence. Therefore, the mask of at least one sequence must allow the newest
  key. `dtype` and `is_causal` are supported. The function raises a ValueError
  for any other mask, a bias, attention dropout, a `precision`, or a request to
  store the weights.

  Args:
    patterns: as in `attend`.
    settings: as in `attend`, except `first` and `return_lse`.

  Returns:
    A function (query, key, value, ...) -> outputs. All arrays are [batch..., n,
    heads, width]. It raises a ValueError for an argument that it does not
    support.

  Raises:
    ValueError: a pattern is invalid.

  >>> from flax import nnx
  >>> layer = nnx.MultiHeadAttention(
  ...   num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0),
  ...   attention_fn=as_attention_fn("Local(16) | Strided(16, 1)"))
  >>> layer(jnp.ones((1, 64, 8))).shape
  (1, 64, 8)
  """
  patterns_read = arguments.read_patterns(patterns)

  # Linen passes only arguments that are in the signature, so all are listed.
  def attention_fn(
    query,
    key,
    value,
    mask=None,
    dropout_rate=0.0,
    deterministic=False,
    dtype=None,
    is_causal=False,
    precision=None,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
    **keywords,
  ):
    refused = dict(
      precision=precision,
      qk_attn_weights_einsum=qk_attn_weights_einsum,
      attn_weights_value_einsum=attn_weights_value_einsum,
    )
    for name, x in (keywords | refused).items():
      if x is not None and name not in HARMLESS:
        raise ValueError(f"attend does not support {name}; leave it out")
    if dropout_rate > 0 and not deterministic:
      raise ValueError(
        f"attend has no attention dropout: set dropout_rate={dropout_rate} to"
        " 0, or deterministic=True"
      )

    batch = query.shape[:-3]
    num_queries, num_heads, _ = query.shape[-3:]
    # All batch axes are merged into one.
    merged = (-1,) if batch else ()
    q, k, v = (
      x.astype(dtype or x.dtype).reshape(merged + x.shape[-3:])
      for x in (query, key, value)
    )

    n = k.shape[-3]
    heads = arguments.patterns_of_heads(patterns_read, num_heads, n)
    if is_causal:
      heads = tuple(
        x if analysis.is_causal(x, n) else x & Causal() for x in heads
      )

    options = settings
    if mask is not None:
      is_of_cache = num_queries == 1 and jnp.shape(mask)[-3:] == (1, 1, n)
      if not is_of_cache or "segments_BL" in settings:
        raise ValueError(
          "attend does not support a mask: describe the pairs by a pattern, or"
          " call attend with segments_BL for padding and packed documents"
        )
      mask_BM = jnp.broadcast_to(mask, batch + (1, 1, n)).reshape(-1, n)
      options = settings | _of_cache(mask_BM)
    out_BLHE = attend(q, k, v, heads, **options)
    return out_BLHE.reshape(query.shape[:-1] + (-1,))

  return attention_fn


def _of_cache(mask_BM):
  """Finds the position and the segments of a query from a cache's mask.

  Args:
    mask_BM: bool [B, M], the keys that each sequence may see.

  Returns:
    The arguments `first` and `segments_BL` of `attend`. Segments are 0 for the
    query and for the keys that it may see, and -1 for other keys.
  """
  # The last position that any sequence may see is the one that was just
  # written.
  first = jnp.where(mask_BM, jnp.arange(mask_BM.shape[1])[None], 0).max()
  of_keys = jnp.where(mask_BM, 0, -1).astype(jnp.int32)
  segments = arguments.Segments(0 * of_keys[:, :1], of_keys)
  return dict(first=first, segments_BL=segments)
