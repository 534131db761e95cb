"""Decoding position by position, with a key-value cache that fits the patterns.

A key is kept in a slot from its own position to that of the last query that
attends to it; then the slot is free for another key. Local keeps the last keys;
Block and Summary keep the current block and the summaries; Strided keeps all
keys. A step finds the keys of its query among the positions that the slots hold
by the pattern's `mask`. If they are few, it gathers their slots, which a static
pattern of moderate length has in a table; otherwise it reads all slots.

For content-based pairs, all keys and labels are kept: a step adds the labels of
its position, and the mask is that of the pattern bound to them. With learned
spans, a key is kept as long as the longest span reaches.

A group is the key heads of which equally many query heads have one pattern. A
key head whose query heads have different patterns is in several groups.

Axes: C key heads of a group, each with R of its query heads, or C R heads each
with one; S slots and one more, which takes the keys without a reader.
"""

import dataclasses
import functools
import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import arguments, contract
from sparse_transformer.attention.content import selection, spans as spans_lib
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.patterns.catalogue import Causal

TABLE = 2**22  # the most numbers in a table of slots
ROWS = 256  # queries whose mask is made at once


class Kept(NamedTuple):
  """What is kept for a group."""

  k: jax.Array  # [layers, B, C, S + 1, K]
  v: jax.Array  # [layers, B, C, S + 1, E]
  positions: jax.Array  # int32 [S + 1], of the key in each slot, -1 for none
  labels: tuple[jax.Array, ...]  # int32 [layers, B, C R, n, labels]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
  """The keys and values that later positions may attend to; a pytree.

  Its sequences are at the same position, and each is one document.
  """

  groups: tuple[Kept, ...]
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
  >>> _, outs = lax.scan(step, cache, jnp.arange(5, 16))
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
    size = make_plan(pattern, length).size + 1
    shape = layers, batch, len(heads_CR), size
    k, v = (jnp.zeros((*shape, x), dtype) for x in (qk_width, value_width))
    labels = tuple(
      jnp.zeros((layers, batch, heads_CR.size, length, x), jnp.int32)
      for x in num_labels(pattern, length, qk_width)
    )
    groups.append(Kept(k, v, jnp.full(size, -1, jnp.int32), labels))
  return Cache(tuple(groups), heads, num_key_heads, length)


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
  groups = []
  for kept, (pattern, heads_CR) in _items(cache):
    positions = make_plan(pattern, cache.length).held(count[0])
    is_known = not isinstance(kept.positions, jax.core.Tracer)
    if is_known and kept.positions.max() >= 0:  # with another layer's prompt
      if not np.array_equal(kept.positions, positions):
        raise ValueError("a prompt needs an empty cache; see init_cache")
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
      kept = _add_labels(kept, pattern, layer, 0, q, given)
    groups.append(kept)
  return dataclasses.replace(cache, groups=tuple(groups))


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
      after those in the cache, and less than its length.
    layer: the layer of the cache; may be traced.
    directions, scale, softcap, sinks_H: as in `attend`.

  Returns:
    (out_BHE in the dtype of the values, the cache with position t).

  Raises:
    ValueError: if arrays do not fit the cache, or directions are missing.

  See `init_cache` for an example.
  """
  _check(cache, layer, directions, q_BHK, k_BGK, v_BGE)
  t = jnp.asarray(arguments.check_index("t", t, cache.length), jnp.int32)
  scores = arguments.check_scores(scale, softcap)
  if sinks_H is not None:
    case = contract.make_case(q_BHK[:, None], v_BGE[:, None])
    sinks_H = arguments.check_sinks(sinks_H, case)
  outs, groups = [], []
  for kept, (pattern, heads_CR) in _items(cache):
    plan, keys = make_plan(pattern, cache.length), _key_heads(cache, heads_CR)
    slot = jnp.asarray(plan.slots)[t]
    k, v = (
      x.at[layer, :, :, slot].set(new[:, keys].astype(x.dtype))
      for x, new in ((kept.k, k_BGK), (kept.v, v_BGE))
    )
    kept = Kept(k, v, kept.positions.at[slot].set(t), kept.labels)
    q_BCRK, given = q_BHK[:, heads_CR], _of_heads(directions, heads_CR)
    q_B1HK = q_BHK[:, None, heads_CR.ravel()]
    kept = _add_labels(kept, pattern, layer, t, q_B1HK, given)
    dtype = jnp.promote_types(q_BHK.dtype, jnp.float32)
    bias = _bias(plan, kept, layer, t, heads_CR, given, dtype)
    sinks = None if sinks_H is None else sinks_H[heads_CR]
    out = _attend_row(plan, kept, layer, t, q_BCRK, bias, scores, sinks)
    outs.append(out.astype(v_BGE.dtype))
    groups.append(kept)
  # The outputs are sorted by group: restore the order of the heads.
  order = np.concatenate([heads.ravel() for _, (_, heads) in _items(cache)])
  out_BHE = jnp.concatenate(outs, axis=1)[:, np.argsort(order)]
  return out_BHE, dataclasses.replace(cache, groups=tuple(groups))


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


# Slots.


@dataclasses.dataclass(frozen=True, eq=False)
class CachePlan:
  """Where the keys of one causal pattern are kept over n steps."""

  pattern: Pattern
  # int32 [n], the slot of each key; `size` for keys without a reader.
  slots: np.ndarray
  # int [n], the last query that may attend to each key, -1 for none.
  last: np.ndarray
  size: int  # number of slots
  width: int  # the largest number of keys of a query

  @functools.cached_property
  def table(self) -> np.ndarray | None:
    """int32 [n, width], the slots of each query's keys; None if too large.

    The last slot, `size`, follows those of a query with fewer keys.
    """
    n = len(self.slots)
    if self.pattern.contents() or n * self.width > TABLE:
      return None
    table = np.full((n, self.width), self.size, np.int32)
    for start in range(0, n, ROWS):
      at = np.arange(min(n, start + ROWS), dtype=np.int32)
      query, key = np.nonzero(self.pattern.mask(at[start:, None], at))
      place = np.arange(len(query)) - np.searchsorted(query, query)
      table[start + query, place] = self.slots[key]
    return table

  def held(self, stop: int) -> np.ndarray:
    """The key in each slot before step `stop`, -1 for none, [size + 1]."""
    keys = np.flatnonzero(self.last[:stop] >= stop)
    held = np.full(self.size + 1, -1, np.int32)
    held[self.slots[keys]] = keys
    return held


@functools.lru_cache(maxsize=256)
def make_plan(pattern: Pattern, n: int) -> CachePlan:
  """Makes the plan with the fewest slots.

  >>> from sparse_transformer.patterns import Local
  >>> make_plan(Local(2), 5).slots.tolist()
  [0, 1, 0, 1, 0]

  Raises:
    ValueError: if the pattern is not causal.
  """
  kept = kept_pairs(pattern)
  if not analysis.is_causal(kept, n):
    raise ValueError(
      f"{pattern} lets queries see later keys, so it cannot be decoded step by"
      " step; use a causal pattern"
    )
  last = analysis.last_readers(kept, n)
  slots, size = _assign_slots(last)
  width = analysis.most_keys(pattern, n)
  return CachePlan(pattern, slots, last, size, width)


def _assign_slots(last: np.ndarray) -> tuple[np.ndarray, int]:
  """(slot of each key, number of slots); the last reader frees a slot."""
  slots, size = np.full(len(last), -1, np.int32), 0
  freed: list[tuple[int, int]] = []  # heap: (position, slot free from there on)
  for key in np.flatnonzero(last >= np.arange(len(last))).tolist():
    if freed and freed[0][0] <= key:
      slot = heapq.heappop(freed)[1]
    else:
      slot, size = size, size + 1
    slots[key] = slot
    heapq.heappush(freed, (int(last[key]) + 1, slot))
  slots[slots < 0] = size
  return slots, size


def kept_pairs(pattern: Pattern) -> Pattern:
  """The pairs for which keys are kept: labels may depend on any earlier key."""
  return Causal() if selection.labelled(pattern) else pattern.support()


# Labels.


def num_labels(pattern: Pattern, n: int, width: int) -> list[int]:
  """The labels of one of n positions, by `labelled`; width is K."""

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  def of(content):
    directions = array(1, content.num_directions, width)
    q, k = array(1, 1, 1, width), array(1, n, 1, width)
    return jax.eval_shape(content.labels, q, k, directions).shape[-1]

  return [of(content) for content in selection.labelled(pattern)]


def _add_labels(kept, pattern, layer, start, q_BLHK, directions):
  """A group, with the labels of one layer from position `start` on.

  The slots of that layer have the keys of all positions so far.
  """
  first, found = [jnp.int32(i) for i in (layer, 0, 0, start, 0)], []
  contents = selection.labelled(pattern)
  for content, x in zip(contents, kept.labels, strict=True):
    k_BMCK = kept.k[layer][:, :, : x.shape[3]].swapaxes(1, 2)
    given = directions.get(content)
    new = selection.labels(content, q_BLHK, k_BMCK, given, start)
    found.append(lax.dynamic_update_slice(x, new[None], first))
  return kept._replace(labels=tuple(found))


# Steps.


def _bias(plan, kept, layer, t, heads_CR, directions, dtype):
  """What step t adds to scores: [B or 1, C R or 1, S], -inf for no pair."""
  pattern, bound = plan.pattern, plan.pattern.support()
  if kept.labels:
    contents = zip(selection.labelled(pattern), kept.labels, strict=True)
    sets = tuple(content.sets(x[layer]) for content, x in contents)
    bound = pattern.bind(selection.unions(pattern, sets))
  k_at = kept.positions
  mask = bound.mask(t.reshape(1, 1, 1, 1), k_at.reshape(1, 1, 1, -1))
  mask &= (k_at >= 0).reshape(1, 1, 1, -1)
  bias = jnp.where(mask, 0.0, jnp.asarray(-jnp.inf, dtype))[:, :, 0]
  heads = (pattern,) * heads_CR.size
  weights_HS = spans_lib.weights(heads, directions, t, k_at, dtype)
  if weights_HS is not None:
    bias = bias + jnp.log(weights_HS)[None]
  return lax.optimization_barrier(bias)  # else it is computed for each use


def _attend_row(plan, kept, layer, t, q_BCRK, bias, scores, sinks_CR):
  """Attention of one query per head, [B, C R, E]; 0 without keys."""
  b, c, r, width = q_BCRK.shape
  if 2 * plan.width > plan.size:
    k, v = kept.k[layer], kept.v[layer]
  else:
    if plan.table is None:
      bias, slots = lax.top_k(bias, plan.width)
    else:
      slots = jnp.asarray(plan.table)[t][None, None]
      bias = bias[:, :, slots[0, 0]]
    if bias.shape[:2] == (1, 1):
      at = slots[0, 0]
      k, v = (jnp.moveaxis(x[layer, :, :, at], 0, 2) for x in kept[:2])
    else:  # each query head has its own keys
      heads = np.arange(c).repeat(r)[None, :, None]
      own = layer, np.arange(b)[:, None, None], heads, slots
      k, v = (x.at[own].get(mode="promise_in_bounds") for x in kept[:2])
  shape = k.shape[1], c * r // k.shape[1]  # C and R, or C R and 1
  of_bias = shape if bias.shape[1] > 1 else (1, 1)
  bias = bias.reshape(len(bias), *of_bias, -1)
  dtype = bias.dtype
  q = q_BCRK.reshape(b, *shape, width).astype(dtype) * scores.factor(width)
  s_BCRS = jnp.einsum("bcrk,bcsk->bcrs", q, k.astype(dtype))
  if scores.softcap:
    s_BCRS = scores.softcap * jnp.tanh(s_BCRS / scores.softcap)
  s_BCRS = s_BCRS + bias
  max_BCR1 = s_BCRS.max(-1, keepdims=True, initial=jnp.finfo(dtype).min)
  sum_of_sinks: Any = 0.0
  if sinks_CR is not None:
    sinks = sinks_CR.reshape(1, *shape, 1).astype(dtype)
    max_BCR1 = jnp.maximum(max_BCR1, sinks)
    sum_of_sinks = jnp.exp(sinks - max_BCR1)
  p_BCRS = jnp.exp(s_BCRS - max_BCR1)
  sum_BCR1 = p_BCRS.sum(-1, keepdims=True) + sum_of_sinks
  out_BCRE = jnp.einsum("bcrs,bcse->bcre", p_BCRS, v.astype(dtype))
  out_BCRE = out_BCRE / jnp.where(sum_BCR1 == 0, 1, sum_BCR1)
  return out_BCRE.reshape(b, c * r, -1)
