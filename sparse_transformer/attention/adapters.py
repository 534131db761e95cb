"""`attend` as the attention function of Flax's modules."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparse_transformer.attention.arguments import (
  Segments,
  patterns_of_heads,
  read_patterns,
)
from sparse_transformer.attention.dispatch import attend
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.patterns.catalogue import Causal


def as_attention_fn(
  patterns: Pattern | str | Sequence[Pattern | str], **settings: Any
) -> Callable[..., jax.Array]:
  """An `attention_fn` for Flax, which runs `attend` with given patterns.

  It is for `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention`,
  also with `decode=True`: a mask [batch..., 1, 1, n] of one query is that of
  their cache, and says which keys it has. Whatever else they may pass is either
  honoured (`dtype`, `is_causal`) or rejected: any other mask, a bias, attention
  dropout, a `precision`, weights to be stored.

  The position of the one query is the last that the mask leaves to a sequence:
  it must leave the newest key to at least one. Cross-attention of a single
  query with a mask is read as decoding.

  Args:
    patterns: as in `attend`.
    settings: as in `attend`, but for `first` and `return_lse`.

  Returns:
    A function (query, key, value, ...) -> outputs, of arrays [batch..., n,
    heads, width], which raises a ValueError for what it cannot honour.

  Raises:
    ValueError: a pattern is invalid, or a setting is unknown.

  >>> from flax import nnx
  >>> layer = nnx.MultiHeadAttention(
  ...   num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0),
  ...   attention_fn=as_attention_fn("Local(16) | Strided(16, 1)"))
  >>> layer(jnp.ones((1, 64, 8))).shape
  (1, 64, 8)
  """

  given = read_patterns(patterns)
  known = {*inspect.signature(attend).parameters} - {"first", "return_lse"}
  if unknown := settings.keys() - known:
    raise ValueError(
      f"as_attention_fn takes no {min(unknown)}; its settings are those of"
      " attend but for first and return_lse"
    )

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
    _reject(
      bias=bias,
      precision=precision,
      sow_weights=module,
      input_positions=input_positions,
      qk_attn_weights_einsum=qk_attn_weights_einsum,
      attn_weights_value_einsum=attn_weights_value_einsum,
    )
    if dropout_rate > 0 and not deterministic:
      raise ValueError(
        f"attend has no attention dropout: set dropout_rate={dropout_rate} to"
        " 0, or deterministic=True"
      )
    if dtype is not None:
      query, key, value = (x.astype(dtype) for x in (query, key, value))
    *batch, num_queries, num_heads, _ = query.shape
    q, k, v = (
      x.reshape(-1, *x.shape[len(batch) :]) for x in (query, key, value)
    )
    n = k.shape[1]
    heads = patterns_of_heads(given, num_heads, n)
    if is_causal:
      heads = tuple(map(functools.partial(_causal, n=n), heads))
    options = settings
    is_of_cache = num_queries == 1 and jnp.shape(mask)[-3:] == (1, 1, n)
    if mask is not None and is_of_cache and "segments_BL" not in settings:
      mask_BM = jnp.broadcast_to(mask, (*batch, 1, 1, n)).reshape(-1, n)
      options = settings | _of_cache(mask_BM)
    elif mask is not None:
      raise ValueError(
        "attend cannot honour a mask: say which pairs there are by a pattern,"
        " or call attend with segments_BL for padding and packed documents"
      )
    out = attend(q, k, v, heads, **options)
    return out.reshape(*batch, *out.shape[1:])

  return attention_fn


def _reject(**arguments):
  """Raises a ValueError for what Flax passes and `attend` has not."""
  for name, x in arguments.items():
    if x is not None:
      raise ValueError(f"attend cannot honour {name}; leave it out")


def _causal(pattern, n):
  """A pattern without pairs whose key is later."""
  is_causal = analysis.is_causal(pattern.support(), n)
  return pattern if is_causal else pattern & Causal()


def _of_cache(mask_BM):
  """The position and the segments of a query, from the mask of a cache."""
  # The last position that any sequence may see is the one just written.
  first = jnp.where(mask_BM, jnp.arange(mask_BM.shape[1])[None], 0).max()
  of_keys = jnp.where(mask_BM, 0, -1).astype(jnp.int32)
  return dict(first=first, segments_BL=Segments(0 * of_keys[:, :1], of_keys))
