"""`attend` as the attention function of Flax's modules."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparse_transformer.attention.arguments import patterns_of_heads
from sparse_transformer.attention.dispatch import attend
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.patterns.catalogue import Causal


def as_attention_fn(
  patterns: Pattern | str | Sequence[Pattern | str], **settings: Any
) -> Callable[..., jax.Array]:
  """An `attention_fn` for Flax, which runs `attend` with given patterns.

  It is for `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention`,
  also with `decode=True`: then the mask is that of their cache. Whatever else
  they may pass is either honoured (`dtype`, `is_causal`) or rejected: any other
  mask, a bias, dropout of weights, a `precision`, weights to be stored.

  Args:
    patterns, settings: as in `attend`.

  Returns:
    A function (query, key, value, ...) -> outputs, of arrays [batch..., n,
    heads, width], which raises a ValueError for what it cannot honour.

  >>> from flax import nnx
  >>> layer = nnx.MultiHeadAttention(
  ...   num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0),
  ...   attention_fn=as_attention_fn("Local(16) | Strided(16, 1)"))
  >>> layer(jnp.ones((1, 64, 8))).shape
  (1, 64, 8)
  """

  # Linen passes only the arguments that it finds in the signature.
  def attention_fn(
    query,
    key,
    value,
    bias=None,
    mask=None,
    broadcast_dropout=True,
    dropout_rng=None,
    dropout_rate=0.0,
    deterministic=False,
    dtype=None,
    precision=None,
    module=None,
    is_causal=False,
    input_positions=None,
    force_fp32_for_softmax=True,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
  ):
    del broadcast_dropout, dropout_rng, force_fp32_for_softmax  # it always is
    given = dict(
      bias=bias,
      precision=precision,
      sow_weights=module,
      input_positions=input_positions,
      qk_attn_weights_einsum=qk_attn_weights_einsum,
      attn_weights_value_einsum=attn_weights_value_einsum,
    )
    if unknown := [name for name, x in given.items() if x is not None]:
      raise ValueError(f"attend cannot honour {unknown[0]}; leave it out")
    if dropout_rate > 0 and not deterministic:
      raise ValueError(
        f"attend has no dropout of weights: set dropout_rate={dropout_rate} to"
        " 0, or deterministic=True"
      )
    if dtype is not None:
      query, key, value = (x.astype(dtype) for x in (query, key, value))
    *batch, num_queries, num_heads, _ = query.shape
    q, k, v = (
      x.reshape(-1, *x.shape[len(batch) :]) for x in (query, key, value)
    )
    heads, n = patterns_of_heads(patterns, num_heads, k.shape[1]), k.shape[1]
    if is_causal:
      heads = tuple(map(functools.partial(_causal, n=n), heads))
    if mask is None:
      out = attend(q, k, v, heads, **settings)
    elif num_queries == 1 and jnp.shape(mask)[-3:] == (1, 1, n):
      first, segments = _of_cache(mask.reshape(-1, n), len(q))
      options = dict(first=first, segments_BL=segments)
      out = attend(q, k, v, heads, **options | settings)
    else:
      raise ValueError(
        "attend cannot honour a mask: say which pairs there are by a pattern,"
        " or call attend with segments_BL for padding and packed documents"
      )
    return out.reshape(*batch, *out.shape[1:])

  return attention_fn


def _causal(pattern, n):
  """A pattern without pairs whose key is later."""
  is_causal = analysis.is_causal(pattern.support(), n)
  return pattern if is_causal else pattern & Causal()


def _of_cache(mask_BM, batch):
  """(position of the query, segments [B, M]), from the mask of a cache."""
  # The last position that any sequence may see is the one just written.
  at = jnp.arange(mask_BM.shape[1])[None]
  first = jnp.where(mask_BM, at, 0).max()
  segments = jnp.where(mask_BM, 0, -1 - at)  # a masked key is alone
  return first, jnp.broadcast_to(segments, (batch, mask_BM.shape[1]))
