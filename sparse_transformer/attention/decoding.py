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
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Cache:
  """The keys and values that later positions may attend to; a pytree.

  Its sequences are at the same position, and each is one document.
  """

  groups: tuple[cached_group.Group, ...]
  count: jax.Array  # int32, the positions so far
  # One per query head.
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
    patterns: as in `attend`; causal.
    length: positions of a sequence, prompt included, n.
    batch: number of sequences, B.
    num_heads, num_key_heads: of queries, H, and of keys, G; by default H.
    qk_width, value_width: of queries and keys, K, and values, E; by default K.
    dtype: of the keys and values that are kept.
    layers: number of layers with these patterns.

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
  of_heads = arguments.patterns_of_heads(patterns, num_heads, length)

  def group_of(pattern, heads):
    heads = heads or tuple(range(num_heads))
    of_keys = key_heads(heads, num_heads // num_key_heads) or ()
    size = cached_group.plan_cache(pattern, length).size + 1
    shape = layers, batch, len(of_keys), size
    k, v = (jnp.zeros((*shape, x), dtype) for x in (qk_width, value_width))
    labels = tuple(
      jnp.zeros((layers, batch, len(heads), length, x), jnp.int32)
      for x in cached_group.num_labels(pattern, length, qk_width)
    )
    positions = jnp.full(size, -1, jnp.int32)
    static = pattern, heads, of_keys, length
    return cached_group.Group(k, v, positions, labels, *static)

  by_pattern = group_heads([(pattern,) for pattern in of_heads])
  groups = (group_of(*x) for x in by_pattern.items())
  count = jnp.zeros((), jnp.int32)
  return Cache(tuple(groups), count, of_heads, num_key_heads, length)


def fill_cache(
  cache: Cache,
  q_BLHK: jax.Array | None,
  k_BLGK: jax.Array,
  v_BLGE: jax.Array,
  *,
  layer: jax.Array | int = 0,
  directions: binding.Directions | None = None,
) -> Cache:
  """Puts the first positions of sequences, the prompt, into an empty cache.

  For the outputs of the prompt, call `attend`.

  See `init_cache` for an example.

  Args:
    cache: from `init_cache`.
    q_BLHK, k_BLGK, v_BLGE: queries, which may be None unless a pattern is
      content-based, keys and values [batch, positions, heads, ..].
    layer: the layer of the cache that is filled; may be traced.
    directions: as in `attend`.

  Raises:
    ValueError: an argument does not fit the cache, or the cache is known not to
      be empty.
  """
  arrays, count = (q_BLHK, k_BLGK, v_BLGE), jnp.shape(k_BLGK)[1:2]
  _check(cache, layer, directions, arrays, count)
  if not 0 < count[0] <= cache.length:
    raise ValueError(
      f"a prompt of {count[0]} positions must have between 1 and"
      f" {cache.length}, the length of the cache"
    )
  # Another layer may have it already.
  if _known(cache.count) not in (None, 0, count[0]):
    raise ValueError("a prompt needs an empty cache; see init_cache")
  groups = []
  for group in cache.groups:
    slots, held = np.arange(group.plan.size + 1), group.plan.held(count[0])
    given = slots, held, arrays, directions or {}
    groups.append(group.write((layer, 0), *given))
  filled = jnp.full_like(cache.count, count[0])
  return dataclasses.replace(cache, groups=tuple(groups), count=filled)


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
) -> tuple[jax.Array, Cache]:
  """Attention at the next position: `attend` for one query per head.

  See `init_cache` for an example.

  Args:
    cache: with all earlier positions, from `fill_cache` or `attend_next`.
    q_BHK, k_BGK, v_BGE: queries, keys and values [batch, heads, ..] at t.
    t: the position after the last in the cache, an integer that may be traced.
      Several layers may each take a step at one position.
    layer: the layer of the cache; may be traced.
    directions, scale, softcap, sinks_H: as in `attend`.

  Returns:
    (out_BHE in the dtype of the values, the cache with position t).

  Raises:
    ValueError: an argument does not fit the cache, or `t` is known not to be
      the next position.
  """
  _check(cache, layer, directions, (q_BHK, k_BGK, v_BGE))
  t = arguments.check_index("t", t, cache.length)
  count, layers = _known(cache.count), len(cache.groups[0].k)
  if count is not None and isinstance(t, int):
    if t != count and not (layers > 1 and t == count - 1):
      raise ValueError(f"{t=} must be {count}, the next position of the cache")
  place, given = (layer, jnp.asarray(t, jnp.int32)), directions or {}
  scores = arguments.check_scores(scale, softcap)
  arrays = tuple(x[:, None] for x in (q_BHK, k_BGK, v_BGE))
  groups, found = [], []
  for group in cache.groups:
    slot = jnp.asarray(group.plan.slots)[t]
    group = group.write(place, slot, place[1], arrays, given)
    found.append(group.attend(place, q_BHK, given, scores))
    groups.append(group)
  # The results are sorted by group: restore the order of the heads.
  order = np.argsort([head for group in groups for head in group.heads])
  out_BHE, lse_BH = (
    jnp.concatenate(x, 1)[:, order] for x in zip(*found, strict=True)
  )
  if sinks_H is not None:
    sinks_H = arguments.check_sinks(sinks_H, len(cache.patterns))
    out_BHE, _ = online_softmax.add_sinks(out_BHE, lse_BH, sinks_H)
  cache = dataclasses.replace(cache, groups=tuple(groups), count=place[1] + 1)
  return out_BHE.astype(v_BGE.dtype), cache


def _known(count):
  """The number of positions in a cache, None if it is traced."""
  return None if isinstance(count, jax.core.Tracer) else int(count)


def _check(cache, layer, directions, arrays, count=()):
  (layers, batch, *_, width), v = cache.groups[0].k.shape, cache.groups[0].v
  num_heads, of_keys = len(cache.patterns), cache.num_key_heads
  shapes = (num_heads, width), (of_keys, width), (of_keys, v.shape[-1])
  is_optional = count and not any(group.labels for group in cache.groups)
  for name, shape, x in zip("qkv", shapes, arrays, strict=True):
    if name == "q" and x is None and is_optional:
      continue
    expected = batch, *count, *shape
    if not arguments.is_floating(x, expected):
      raise ValueError(
        f"{name} must be [{', '.join(map(str, expected))}] for this cache, in"
        f" floating point, got {arguments.describe(x)}"
      )
  arguments.check_index("layer", layer, layers)
  binding.check_directions(cache.patterns, directions or {}, width)
