"""`attend` as the attention function of Flax's modules."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparse_transformer.attention import arguments
from sparse_transformer.attention.dispatch import attend
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.patterns.catalogue import Causal

# What Flax may pass that changes nothing: the softmax is in float32 anyway.
HARMLESS = "broadcast_dropout", "dropout_rng", "force_fp32_for_softmax"


def as_attention_fn(
  patterns: Pattern | str | Sequence[Pattern | str], **settings: Any
) -> Callable[..., jax.Array]:
  """An `attention_fn` for Flax, which runs `attend` with given patterns.

  The function is for `nnx.MultiHeadAttention` and
  `linen.MultiHeadDotProductAttention`. With `decode=True`, these layers pass
  one query and the mask of their cache, [batch..., 1, 1, n]. The query's
  position is that of the last key that the mask shows in any sequence.
  Therefore at least one sequence must see the newest key. `dtype` and
  `is_causal` are supported. Any other mask, a bias, attention dropout, a
  `precision`, and storing the weights raise a ValueError.

  Args:
    patterns: as in `attend`.
    settings: as in `attend`, except `first` and `return_lse`.

  Returns:
    A function (query, key, value, ...) -> outputs, of arrays [batch..., n,
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

  # Linen passes only the arguments that it finds in the signature.
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
        raise ValueError(f"attend cannot honour {name}; leave it out")
    if dropout_rate > 0 and not deterministic:
      raise ValueError(
        f"attend has no attention dropout: set dropout_rate={dropout_rate} to"
        " 0, or deterministic=True"
      )

    batch = query.shape[:-3]
    num_queries, num_heads, _ = query.shape[-3:]
    # All axes of the batch become one.
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
          "attend cannot honour a mask: say which pairs there are by a"
          " pattern, or call attend with segments_BL for padding and packed"
          " documents"
        )
      mask_BM = jnp.broadcast_to(mask, batch + (1, 1, n)).reshape(-1, n)
      options = settings | _of_cache(mask_BM)
    out_BLHE = attend(q, k, v, heads, **options)
    return out_BLHE.reshape(query.shape[:-1] + (-1,))

  return attention_fn


def _of_cache(mask_BM):
  """The position and the segments of a query, from the mask of a cache.

  Args:
    mask_BM: the keys that each sequence may see.

  Returns:
    Arguments of `attend`: `first`, and segments that are 0 for these keys and
    for the query, and -1 for others.
  """
  # The last position that any sequence may see is the one just written.
  first = jnp.where(mask_BM, jnp.arange(mask_BM.shape[1])[None], 0).max()
  of_keys = jnp.where(mask_BM, 0, -1).astype(jnp.int32)
  segments = arguments.Segments(0 * of_keys[:, :1], of_keys)
  return dict(first=first, segments_BL=segments)
