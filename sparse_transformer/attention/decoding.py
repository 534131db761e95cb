"""Decoding step by step, with a key-value cache that fits the patterns."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import (
  arguments,
  cached_group,
  contract,
  online_softmax,
)
from sparse_transformer.attention.content import binding
from sparse_transformer.attention.heads import group_heads, key_heads
from sparse_transformer.patterns import Pattern


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Cache:
  """The keys and values that later positions may attend to; a pytree.

  All sequences are at the same position, and each one is a single document.
  """

  groups: tuple[cached_group.Group, ...]
  # One pattern per query head.
  patterns: tuple[Pattern, ...] = dataclasses.field(metadata=contract.STATIC)
  num_key_heads: int = dataclasses.field(metadata=contract.STATIC)
  length: int = dataclasses.field(metadata=contract.STATIC)  # positions, n


def init_cache(
  patterns: Pattern | str | Sequence[Pattern | str],
  *,
  length: int,
  batch: int,
  num_heads: int,
  num_key_heads: int | None = None,
  qk_width: int,
  value_width: int | None = None,
  dtype: Any,
  layers: int = 1,
) -> Cache:
  """Makes an empty cache, with as many slots as the patterns need.

  Args:
    patterns: as in `attend`; they must be causal.
    length: number of positions of a sequence including the prompt, n.
    batch: number of sequences, B.
    num_heads, num_key_heads: number of query heads, H, and of KV heads, G,
      which is H by default.
    qk_width, value_width: width of queries and keys, K, and of values, E, which
      is K by default.
    dtype: dtype of the cached keys and values.
    layers: number of layers with these patterns.

  Returns:
    An empty `Cache`. Pass it to `fill_cache`, or to `attend_next` at t = 0.

  Raises:
    ValueError: a pattern is invalid or not causal, or G does not divide H.

  >>> from sparse_transformer.attention import attend
  >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 8))
  >>> pattern = "Local(4) | Strided(4)"
  >>> cache = init_cache(
  ...   pattern, length=16, batch=1, num_heads=2, qk_width=8, dtype=q.dtype)
  >>> cache = fill_cache(cache, q[:, :5], k[:, :5], v[:, :5])
  >>> def step(cache, t):
  ...   out, cache = attend_next(cache, q[:, t], k[:, t], v[:, t], t)
  ...   return cache, out
  >>> _, outs = jax.lax.scan(step, cache, jnp.arange(5, 16))
  >>> expected = attend(q, k, v, pattern)[:, 5:]
  >>> bool(jnp.allclose(outs.swapaxes(0, 1), expected, atol=1e-5))
  True
  """
  num_key_heads = num_heads if num_key_heads is None else num_key_heads
  value_width = qk_width if value_width is None else value_width
  if num_key_heads < 1 or num_heads % num_key_heads:
    raise ValueError(
      f"{num_key_heads=} must divide {num_heads=}, the number of query heads"
    )
  patterns_H = arguments.patterns_of_heads(patterns, num_heads, length)

  # Heads with the same pattern keep the same keys, so they share a plan of
  # slots.
  groups = []
  by_pattern = group_heads([(pattern,) for pattern in patterns_H])
  for pattern, heads in by_pattern.items():
    own_key_heads = key_heads(heads, num_heads // num_key_heads)
    # The last slot receives keys that no query reads.
    size = cached_group.plan_cache(pattern, length).size + 1
    slots = layers, batch, len(own_key_heads), size

    buckets = []
    for content in pattern.contents():
      num_buckets = cached_group.num_buckets(content, length, qk_width)
      bucket_shape = layers, batch, len(heads), length, num_buckets
      buckets.append(jnp.zeros(bucket_shape, jnp.int32))
    group = cached_group.Group(
      k=jnp.zeros(slots + (qk_width,), dtype),
      v=jnp.zeros(slots + (value_width,), dtype),
      positions=jnp.full(size, -1, jnp.int32),
      buckets=tuple(buckets),
      pattern=pattern,
      heads=heads,
      key_heads=own_key_heads,
      length=length,
    )
    groups.append(group)
  return Cache(
    groups=tuple(groups),
    patterns=patterns_H,
    num_key_heads=num_key_heads,
    length=length,
  )


def fill_cache(
  cache: Cache,
  q_BLHK: jax.Array | None,
  k_BLGK: jax.Array,
  v_BLGE: jax.Array,
  *,
  layer: jax.Array | int = 0,
  directions: binding.Directions | None = None,
) -> Cache:
  """Writes the first positions of sequences, the prompt, to an empty cache.

  This computes no outputs for the prompt; call `attend` for these.

  See `init_cache` for an example.

  Args:
    cache: a cache from `init_cache`, without positions in this layer.
    q_BLHK, k_BLGK, v_BLGE: queries, keys and values [batch, positions, heads,
      ..]. The queries may be None unless a pattern is content-based.
    layer: index of the layer to fill; it may be traced.
    directions: as in `attend`.

  Returns:
    The cache with these positions; the arrays of the old cache do not change.

  Raises:
    ValueError: an argument does not fit the cache.
  """
  arrays = q_BLHK, k_BLGK, v_BLGE
  # The number of positions, if the array has this axis.
  new = jnp.shape(k_BLGK)[1:2]
  directions = _check(cache, layer, directions, arrays, new)
  (num,) = new
  if not 0 < num <= cache.length:
    raise ValueError(
      f"a prompt of {num} positions does not fit: it must have from 1 to"
      f" {cache.length} positions, the length of the cache"
    )

  # Each slot is written only once, with the key that it contains after the
  # prompt.
  groups = tuple(
    group.write(
      layer,
      0,
      arrays,
      slots=np.arange(group.plan.size + 1),
      positions=group.plan.held(num),
      directions=directions,
    )
    for group in cache.groups
  )
  return dataclasses.replace(cache, groups=groups)


def attend_next(
  cache: Cache,
  q_BHK: jax.Array,
  k_BGK: jax.Array,
  v_BGE: jax.Array,
  t: jax.Array | int,
  *,
  layer: jax.Array | int = 0,
  directions: binding.Directions | None = None,
  scale: float | None = None,
  softcap: float = 0.0,
  sinks_H: jax.Array | None = None,
  bias_HD: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
  """Computes attention at the next position, for one query per head.

  See `init_cache` for an example.

  Args:
    cache: a cache with all earlier positions, from `fill_cache` or
      `attend_next`.
    q_BHK, k_BGK, v_BGE: queries, keys and values [batch, heads, ..] at t.
    t: the position, an integer that may be traced. It must be the position
      after the last one in this layer of the cache. This is not checked, and
      outputs are wrong otherwise.
    layer: index of the layer of the cache; it may be traced.
    directions: as in `attend`, except that block indices are given for position
      t only, with shape [batch, heads, num].
    scale, softcap, sinks_H, bias_HD: as in `attend`.

  Returns:
    (out_BHE in the dtype of the values, the cache with position t).

  Raises:
    ValueError: an argument does not fit the cache.
  """
  directions = _check(cache, layer, directions, (q_BHK, k_BGK, v_BGE))
  t = arguments.check_index("t", t, cache.length)

  scores = arguments.check_scores(scale, softcap)
  if bias_HD is not None:
    bias_HD = arguments.check_bias(
      bias_HD, cache.patterns, cache.length, q_BHK.dtype
    )
  # an array, so that one program serves all positions
  t = jnp.asarray(t, jnp.int32)

  arrays = [x[:, None] for x in (q_BHK, k_BGK, v_BGE)]
  groups, outs, lses = [], [], []
  for group in cache.groups:
    # Keys are written before attention, because a query may attend to its own
    # position.
    slot = jnp.asarray(group.plan.slots)[t]
    group = group.write(layer, t, arrays, slot, t, directions)
    out, lse = group.attend(layer, t, q_BHK, directions, scores, bias_HD)
    groups.append(group)
    outs.append(out)
    lses.append(lse)

  # The results are sorted by group. Restore the order of the heads.
  order = np.argsort([head for group in groups for head in group.heads])
  out_BHE = jnp.concatenate(outs, 1)[:, order]
  lse_BH = jnp.concatenate(lses, 1)[:, order]

  if sinks_H is not None:
    sinks_H = arguments.check_sinks(sinks_H, len(cache.patterns))
    out_BHE, _ = online_softmax.add_sinks(out_BHE, lse_BH, sinks_H)
  cache = dataclasses.replace(cache, groups=tuple(groups))
  return out_BHE.astype(v_BGE.dtype), cache


def _check(cache, layer, directions, arrays, new=()):
  """Checks that arguments fit the cache, and returns the directions.

  The arrays must have shape [B, *new, heads, ...].
  """
  group = cache.groups[0]
  layers, batch, *_, qk_width = group.k.shape
  value_width = group.v.shape[-1]
  expected = dict(
    q=(batch, *new, len(cache.patterns), qk_width),
    k=(batch, *new, cache.num_key_heads, qk_width),
    v=(batch, *new, cache.num_key_heads, value_width),
  )
  has_buckets = any(group.buckets for group in cache.groups)

  # Queries of a prompt are needed only to find buckets.
  for (name, shape), x in zip(expected.items(), arrays, strict=True):
    if name == "q" and x is None and new and not has_buckets:
      continue
    if not arguments.is_floating(x, shape):
      raise ValueError(
        f"{name} must be a floating-point array of shape"
        f" [{', '.join(map(str, shape))}] for this cache, got"
        f" {arguments.type_of(x)}"
      )
  arguments.check_index("layer", layer, layers)
  return binding.take_directions(
    cache.patterns,
    directions,
    batch=batch,
    length=new[0] if new else 1,
    width=qk_width,
    lacks=() if new else 2,
  )
