"""Decoding position by position, with a key-value cache that fits the patterns.

`cache_plan` says in which slot a key is kept, and how long. A group is the key
heads of which equally many query heads have one pattern; a key head whose query
heads have different patterns is in several. `cached_group` runs a step of one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import arguments, cached_group, contract
from sparse_transformer.attention.cache_plan import plan_cache
from sparse_transformer.attention.cached_group import Kept
from sparse_transformer.attention.content import selection
from sparse_transformer.patterns import Pattern, shorten


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Cache:
  """The keys and values that later positions may attend to; a pytree.

  Its sequences are at the same position, and each is one document.
  """

  groups: tuple[Kept, ...]
  count: jax.Array  # int32, the positions so far
  # One per query head.
  patterns: tuple[Pattern, ...] = dataclasses.field(metadata=contract.STATIC)
  num_key_heads: int = dataclasses.field(metadata=contract.STATIC)
  length: int = dataclasses.field(metadata=contract.STATIC)  # positions, n

  def __repr__(self) -> str:
    patterns = ", ".join(map(str, dict.fromkeys(self.patterns)))
    return f"Cache({shorten(patterns)}, length={self.length})"


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
    num_heads: number of query heads, H.
    num_key_heads: number of key heads, G, which divides H; by default H.
    qk_width: width of a head's queries and keys, K.
    value_width: width of a head's values, E; by default K.
    dtype: of the keys and values that are kept.
    layers: number of layers with these patterns.

  Raises:
    ValueError: if a pattern is invalid or not causal, a size or the dtype is,
      or G does not divide H.

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
  arguments.check_sizes(
    length=length,
    num_heads=num_heads,
    num_key_heads=num_key_heads,
    qk_width=qk_width,
    value_width=value_width,
    layers=layers,
  )
  if not jax.export.is_symbolic_dim(batch):
    arguments.check_sizes(batch=batch)
  if dtype is None or not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
    raise ValueError(f"{dtype=} must be one in floating point")
  if num_heads % num_key_heads:
    raise ValueError(
      f"{num_key_heads=} must divide {num_heads=}, the number of query heads"
    )
  heads = arguments.patterns_of_heads(patterns, num_heads, length)
  groups = []
  for pattern, heads_CR in _groups(heads, num_key_heads):
    size = plan_cache(pattern, length).size + 1
    shape = layers, batch, len(heads_CR), size
    k, v = (jnp.zeros((*shape, x), dtype) for x in (qk_width, value_width))
    labels = tuple(
      jnp.zeros((layers, batch, heads_CR.size, length, x), jnp.int32)
      for x in cached_group.num_labels(pattern, length, qk_width)
    )
    groups.append(Kept(k, v, jnp.full(size, -1, jnp.int32), labels))
  count = jnp.zeros((), jnp.int32)
  return Cache(tuple(groups), count, heads, num_key_heads, length)


def fill_cache(
  cache: Cache,
  q_BLHK: jax.Array | None,
  k_BLGK: jax.Array,
  v_BLGE: jax.Array,
  *,
  layer: jax.Array | int = 0,
  directions: selection.Directions | None = None,
) -> Cache:
  """Puts the first positions of sequences, the prompt, into an empty cache.

  The outputs at these positions are those of `attend`.

  Args:
    cache: from `init_cache`.
    q_BLHK: queries [batch, positions, heads, K]; may be None unless a pattern
      is content-based.
    k_BLGK, v_BLGE: keys and values [batch, positions, key heads, ..].
    layer: the layer of the cache; may be traced.
    directions: as in `attend`.

  Returns:
    The cache, with that layer filled.

  Raises:
    ValueError: if arrays do not fit the cache, directions are missing, or the
      cache is known to have other positions.

  See `init_cache` for an example.
  """
  count: Any = getattr(k_BLGK, "shape", ())[1:2] or ("positions",)
  _check(cache, layer, directions, q_BLHK, k_BLGK, v_BLGE, count)
  if not 0 < count[0] <= cache.length:
    raise ValueError(
      f"a prompt of {count[0]} positions must have between 1 and the"
      f" {cache.length} of the cache"
    )
  # Another layer may have it already.
  if _known(cache.count) not in (None, 0, count[0]):
    raise ValueError("a prompt needs an empty cache; see init_cache")
  groups = []
  for kept, (pattern, heads_CR) in _items(cache):
    positions = plan_cache(pattern, cache.length).held(count[0])
    keys = _key_heads(cache, heads_CR)
    # Slots that hold no key get an arbitrary one.
    k, v = (
      x.at[layer].set(
        jnp.take(new[:, :, keys], positions, axis=1, mode="clip")
        .swapaxes(1, 2)
        .astype(x.dtype)
      )
      for x, new in ((kept.k, k_BLGK), (kept.v, v_BLGE))
    )
    kept = Kept(k, v, jnp.asarray(positions), kept.labels)
    if kept.labels and q_BLHK is not None:
      q, given = q_BLHK[:, :, heads_CR.ravel()], _of_heads(directions, heads_CR)
      kept = cached_group.add_labels(kept, pattern, layer, 0, q, given)
    groups.append(kept)
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
  directions: selection.Directions | None = None,
  scale: float | None = None,
  softcap: float = 0.0,
  sinks_H: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
  """Attention at the next position: `attend` for one query per head.

  Args:
    cache: with all earlier positions, from `fill_cache` or `attend_next`.
    q_BHK: queries [batch, heads, K] at position t.
    k_BGK, v_BGE: keys and values [batch, key heads, ..] at position t.
    t: the position, an integer that may be traced; must be the next position
      after those in the cache, and less than its length. Steps of several
      layers at a position may follow one another.
    layer: the layer of the cache; may be traced.
    directions, scale, softcap, sinks_H: as in `attend`.

  Returns:
    (out_BHE in the dtype of the values, the cache with position t).

  Raises:
    ValueError: if arrays do not fit the cache, directions are missing, or `t`
      is known not to be the next position.

  See `init_cache` for an example.
  """
  _check(cache, layer, directions, q_BHK, k_BGK, v_BGE)
  t = arguments.check_index("t", t, cache.length)
  count, layers = _known(cache.count), len(cache.groups[0].k)
  if count is not None and isinstance(t, int):
    if t != count and not (layers > 1 and t == count - 1):
      raise ValueError(f"{t=} must be {count}, the next position of the cache")
  t = jnp.asarray(t, jnp.int32)
  scores = arguments.check_scores(scale, softcap)
  if sinks_H is not None:
    case = contract.make_case(q_BHK[:, None], v_BGE[:, None])
    sinks_H = arguments.check_sinks(sinks_H, case)
  outs, groups = [], []
  for kept, (pattern, heads_CR) in _items(cache):
    plan, keys = plan_cache(pattern, cache.length), _key_heads(cache, heads_CR)
    slot = jnp.asarray(plan.slots)[t]
    k, v = (
      x.at[layer, :, :, slot].set(new[:, keys].astype(x.dtype))
      for x, new in ((kept.k, k_BGK), (kept.v, v_BGE))
    )
    kept = Kept(k, v, kept.positions.at[slot].set(t), kept.labels)
    q_BCRK, given = q_BHK[:, heads_CR], _of_heads(directions, heads_CR)
    q_B1HK = q_BHK[:, None, heads_CR.ravel()]
    kept = cached_group.add_labels(kept, pattern, layer, t, q_B1HK, given)
    sinks = None if sinks_H is None else sinks_H[heads_CR]
    inputs = (layer, t), q_BCRK, given, scores, sinks
    out = cached_group.attend_group(kept, plan, *inputs)
    outs.append(out.astype(v_BGE.dtype))
    groups.append(kept)
  # The outputs are sorted by group: restore the order of the heads.
  order = np.concatenate([heads.ravel() for _, (_, heads) in _items(cache)])
  out_BHE = jnp.concatenate(outs, axis=1)[:, np.argsort(order)]
  cache = dataclasses.replace(cache, groups=tuple(groups), count=t + 1)
  return out_BHE, cache


def _known(count):
  """The number of positions in a cache, None if it is traced."""
  return None if isinstance(count, jax.core.Tracer) else int(count)


def _check(cache, layer, directions, q, k, v, count=()):
  """Raises a ValueError if the arguments of a step or a prompt do not fit."""
  if not isinstance(cache, Cache):
    raise ValueError(
      f"cache must be from init_cache, got {type(cache).__name__}"
    )
  kept, num_heads = cache.groups[0], len(cache.patterns)
  layers, batch, *_, width = kept.k.shape
  for name, x, shape in (
    ("k", k, (cache.num_key_heads, width)),
    ("v", v, (cache.num_key_heads, kept.v.shape[-1])),
    ("q", q, (num_heads, width)),
  ):
    has_content = any(group.labels for group in cache.groups)
    if name == "q" and x is None and count and not has_content:
      continue
    expected = batch, *count, *shape
    if not arguments.is_floating(x, expected):
      raise ValueError(
        f"{name} must be [{', '.join(map(str, expected))}] for this cache, in"
        f" floating point, got {arguments.describe(x)}"
      )
  arguments.check_index("layer", layer, layers)
  selection.check_directions(cache.patterns, directions or {}, width)


# Groups.


def _groups(patterns, num_key_heads):
  """[(pattern, the query heads [C, R] of a group)]."""
  group = len(patterns) // num_key_heads
  found: dict[tuple[Pattern, int], list[list[int]]] = {}
  for first in range(0, len(patterns), group):
    heads_of: dict[Pattern, list[int]] = {}
    for head in range(first, first + group):
      heads_of.setdefault(patterns[head], []).append(head)
    for pattern, heads in heads_of.items():
      found.setdefault((pattern, len(heads)), []).append(heads)
  return [(pattern, np.array(heads)) for (pattern, _), heads in found.items()]


def _items(cache):
  groups = _groups(cache.patterns, cache.num_key_heads)
  return list(zip(cache.groups, groups, strict=True))


def _key_heads(cache, heads_CR):
  return heads_CR[:, 0] // (len(cache.patterns) // cache.num_key_heads)


def _of_heads(directions, heads_CR):
  return {
    content: x if len(x) == 1 else jnp.asarray(x)[heads_CR.ravel()]
    for content, x in (directions or {}).items()
  }
