"""Finds the pairs of content-based patterns for given queries and keys.

A content-based pattern defines how to find buckets from queries and keys.
Binding the pattern to queries and keys replaces its `contents` by sets of
pairs. A set is a pattern over positions like any other, except that it contains
arrays.

In all functions, `patterns` contains one pattern per head, `directions` is as
in `attention.attend`, and `bound` is the result of `bind`.
"""

import collections
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_transformer.attention import contract
from sparse_transformer.attention.content import found_tiles
from sparse_transformer.attention.contract import Keys, Queries
from sparse_transformer.attention.heads import group_heads, index_of, key_heads
from sparse_transformer.patterns import Pattern, shorten
from sparse_transformer.patterns.content import Content, Known

Directions = Mapping[Pattern, jax.Array]


def with_content(patterns: Sequence[Pattern]) -> dict[Pattern, contract.Heads]:
  """Maps each distinct pattern that has content-based parts to its heads."""
  return group_heads([(p,) if p.contents() else () for p in patterns])


def static_parts(patterns: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
  """Returns each pattern's static part, or () if no pattern has one."""
  has_static = any(pattern.split()[0] is not None for pattern in patterns)
  return tuple(p.static_part() for p in patterns if has_static)


def bind(
  patterns: tuple[Pattern, ...],
  queries: Queries,
  keys: Keys,
  directions: Directions,
) -> tuple[Any, ...]:
  """Finds the sets of pairs for the `contents` of each pattern.

  Args:
    patterns: one for each query head.
    queries, keys: arrays at all positions, with their segments if there are
      any.
    directions: as in `attend`.

  Returns:
    A tuple for each pattern of `with_content`, with the sets of each
    content-based pattern in it.
  """
  num_heads, num_key_heads = queries.q.shape[2], keys.k.shape[2]
  segments = key_segments = None
  if keys.segments is not None and queries.segments is not None:
    key_segments = keys.segments[..., 0]
    segments = queries.segments[..., 0], key_segments

  bound = []
  for pattern, heads in with_content(patterns).items():
    index = index_of(heads, num_heads)
    of_keys = key_heads(heads, num_heads // num_key_heads)
    q_BLHK = queries.q[:, :, index]
    k_BMGK = keys.k[:, :, index_of(of_keys, num_key_heads)]

    sets = []
    for content in pattern.contents():
      vectors = directions.get(content)
      if vectors is not None and np.shape(vectors)[-3] > 1:
        vectors = vectors[..., index, :, :]

      # Rematerialization saves the buckets, because they could differ if they
      # were computed again.
      buckets = find_buckets(
        content, q_BLHK, k_BMGK, vectors, segments=segments
      )
      buckets = checkpoint_name(buckets, contract.SAVED_NAMES[-1])
      sets.append(content.sets(buckets, key_segments))
    bound.append(tuple(sets))
  return tuple(bound)


def find_buckets(
  content: Content,
  q_BLHK: jax.Array,
  k_BMGK: jax.Array,
  directions: jax.Array | None,
  start: jax.Array | int = 0,
  segments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
  """Finds the buckets of queries and keys, without gradients.

  Args:
    content: the content-based pattern.
    q_BLHK, k_BMGK: queries and keys of the heads with this pattern.
    directions: [H or 1, directions, K]; None if the pattern draws its own.
    start: the position of the first query, when decoding.
    segments: (segments of queries [B, L], segments of keys [B, M]), or None if
      all positions are in one segment.

  Returns:
    int32 [B, H, n, buckets], see `Content.find_buckets`.
  """
  # Buckets are computed in float32, so that they do not depend on the dtype.
  drawn = content.directions(q_BLHK.shape[-1])
  q, k, given = jax.tree.map(
    lambda x: lax.stop_gradient(jnp.asarray(x)),
    (q_BLHK, k_BMGK, drawn if directions is None else directions),
  )
  known = Known(
    q_BLHK=q.astype(jnp.float32),
    k_BMGK=k.astype(jnp.float32),
    directions_HDK=given,
    start=start,
    segments=segments,
  )
  return content.find_buckets(known)


def take_directions(
  patterns: tuple[Pattern, ...],
  directions: Directions | None,
  *,
  batch: Any,
  length: int,
  width: int,
  lacks: Any = (),
) -> Directions:
  """Checks and returns the directions or blocks of patterns.

  Axis -3 of each array is the axis of heads. It may have size 1 if all heads
  share the array.

  Args:
    patterns: one for each head.
    directions: as in `attend`.
    batch, length: number of sequences, and number of positions of each.
    width: K.
    lacks: the axis that blocks lack, either of sequences or of positions; () if
      they have both.

  Raises:
    ValueError: an array is missing, has a wrong shape, or is for a pattern that
      does not use directions.
  """
  shapes = {}
  for pattern in patterns:
    for content in pattern.contents():
      shape = content.given_shape(batch, len(patterns), length, width)
      if shape:
        shapes[content] = shape

  # An OrderedDict can be a pytree even if its keys cannot be sorted, unlike a
  # dict.
  taken = collections.OrderedDict(directions or {})
  for pattern in taken:
    if pattern not in shapes:
      raise ValueError(
        f"directions of {shorten(repr(pattern))}, which no head's pattern"
        " takes; a key must be a Pattern, not its text; patterns that take"
        f" directions: {', '.join(map(shorten, shapes)) or 'none'}"
      )

  for content, shape in shapes.items():
    given = taken.get(content)
    if given is None and content.directions(width) is None:
      raise ValueError(
        f"{shorten(content)} needs its directions, an array {list(shape)}: pass"
        " directions={pattern: array} to attend, or to as_attention_fn"
      )
    if content.blocks_from:
      given = _of_heads(content, given, len(patterns), lacks)
      taken[content] = given
    one_head = *shape[:-3], 1, *shape[-2:]
    if given is not None and np.shape(given) not in (shape, one_head):
      raise ValueError(
        f"directions of {shorten(content)} must have shape {list(shape)} or"
        f" {list(one_head)}, got {list(np.shape(given))}"
      )
  return taken


def _of_heads(content, blocks, num_heads, lacks):
  """Expands blocks of KV heads, or of 1 head, to query heads: [B, H, L, C]."""
  dtype = getattr(blocks, "dtype", type(blocks).__name__)
  if dtype != jnp.int32:
    raise ValueError(
      f"directions of {shorten(content)} must be int32, got {dtype}"
    )
  blocks_BGLC = jnp.expand_dims(blocks, lacks)
  group = num_heads // blocks_BGLC.shape[-3]
  return jnp.repeat(blocks_BGLC, max(1, group), axis=-3)


def prepare(
  patterns: tuple[Pattern, ...],
  queries: Queries,
  keys: Keys,
  directions: Directions,
  tile: int,
) -> tuple[Any, ...]:
  """Finds the pairs of all content-based patterns, and lays out their tiles.

  The forward and the backward pass share the arrays that this function returns.
  Plans are made separately, by `plan_found`, because each pass makes its own.

  Args:
    patterns, queries, keys, directions: as in `bind`.
    tile: positions on a side of a tile; 0 for the default.

  Returns:
    (bound, tables): the result of `bind`, and the tables of each set.
  """
  bound = bind(patterns, queries, keys, directions)
  tables = [found_tiles.lay_out(pairs, tile) for pairs in _sets(bound)]
  return bound, tables


def plan_found(
  patterns: tuple[Pattern, ...], runtime_tables: tuple[Any, ...]
) -> contract.Plans:
  """Returns the plans of all content-based parts, from `prepare`'s result."""
  # Parts that use the same set share its tables.
  bound, tables = runtime_tables
  table_of = dict(zip(_sets(bound), tables, strict=True))
  by_pattern = with_content(patterns).items()
  plans = []
  for (pattern, heads), sets in zip(by_pattern, bound, strict=True):
    united = unions(pattern, sets)
    for content_part in pattern.split()[1]:
      for part in content_part.bind(united).parts():
        plans.append((found_tiles.plan_part(part, table_of), heads))
  return plans


def count_scores(
  pattern: Pattern, request: contract.Request
) -> list[tuple[str, int, int]]:
  """Returns (backend, tile, scores per sequence and head) of each part.

  Only content-based parts are counted. The shapes of their tables do not depend
  on the content, so the counts are known before run time.
  """
  counts = []
  directions = {}
  for content in pattern.contents():
    shape = content.given_shape(
      request.batch or 1, 1, request.length, request.qk_width
    )
    if shape:
      directions[content] = jnp.zeros(shape)

  # Make the plans of one head, and inspect them.
  def count(q):
    queries = Queries(q)
    keys = Keys(q, q)
    tables = prepare((pattern,), queries, keys, directions, request.tile)
    for plan, _ in plan_found((pattern,), tables):
      steps = plan.tables.steps(plan, queries, keys, request.platform)
      counts.append((steps.name, plan.tile, steps.scores))

  # Shapes are sufficient, so nothing is computed.
  one_head = request.batch or 1, request.length, 1, request.qk_width
  jax.eval_shape(count, jax.ShapeDtypeStruct(one_head, jnp.float32))
  return counts


def unions(
  pattern: Pattern, sets: Sequence[tuple[Pattern, ...]]
) -> dict[Pattern, Pattern]:
  """Returns {content: the union of its sets} for a pattern's `contents`.

  A content-based pattern may have several sets, such as one for each round of
  LSH.
  """
  unions = (functools.reduce(operator.or_, x) for x in sets)
  return dict(zip(pattern.contents(), unions, strict=True))


def _sets(bound):
  return jax.tree.leaves(bound, is_leaf=lambda x: isinstance(x, Pattern))


def find_pairs(
  patterns: tuple[Pattern, ...],
  q_BLHK: jax.Array,
  k_BMGK: jax.Array,
  directions: Directions,
) -> jax.Array:
  """Returns the pairs of all heads, bool [B, H, L, M].

  B is 1 if all patterns are static.
  """
  queries = Queries(q_BLHK)
  keys = Keys(k_BMGK, k_BMGK)  # values are not used
  return realize(patterns, queries, keys, directions)


def realize(
  patterns: tuple[Pattern, ...],
  queries: Queries,
  keys: Keys,
  directions: Directions,
) -> jax.Array:
  """Does the same as `find_pairs`, but buckets respect segments."""
  bound = bind(patterns, queries, keys, directions)

  # Each head gets its own bound pattern, which contains the arrays of this
  # head.
  heads_bound = [pattern.support() for pattern in patterns]
  by_pattern = with_content(patterns).items()
  for (pattern, heads), sets in zip(by_pattern, bound, strict=True):
    for i, head in enumerate(heads):
      own = jax.tree.map(lambda x, i=i: x[:, i : i + 1], sets)
      heads_bound[head] = pattern.bind(unions(pattern, own))

  # The mask of a bound pattern takes positions with axes of batch and heads.
  n = keys.k.shape[1]
  q_at = np.arange(n).reshape(1, 1, n, 1)
  k_at = q_at.swapaxes(2, 3)
  everything = np.ones((1, 1, n, n), bool)
  masks = [pattern.mask(q_at, k_at) for pattern in heads_bound]
  *masks, _ = jnp.broadcast_arrays(*masks, everything)
  return jnp.concatenate(masks, axis=1)
