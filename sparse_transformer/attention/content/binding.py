"""The pairs of content-based patterns, for given arrays.

Labels of positions are named, so that rematerialization can keep them instead
of deciding again, perhaps differently.

In all functions, `patterns` has one pattern per head, `directions` is as in
`attention.attend`, and `bound` is what `bind` returns.
"""

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
from sparse_transformer.attention.content import found_tiles, spans as spans_lib
from sparse_transformer.attention.contract import Keys, Queries
from sparse_transformer.attention.heads import group_heads, index_of, key_heads
from sparse_transformer.patterns import Pattern, shorten
from sparse_transformer.patterns.content import Content, Known

Directions = Mapping[Pattern, jax.Array]


def labelled(pattern: Pattern) -> tuple[Content, ...]:
  """The `contents` of a pattern if its pairs follow from labels."""
  return pattern.contents() if spans_lib.span_of(pattern) is None else ()


def with_content(patterns: Sequence[Pattern]) -> dict[Pattern, contract.Heads]:
  """The distinct patterns whose pairs follow from labels, with their heads."""
  return group_heads([(p,) if labelled(p) else () for p in patterns])


def static_parts(patterns: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
  """The static part of each head's pattern; () if no head has one."""
  has_static = any(pattern.split()[0] is not None for pattern in patterns)
  return tuple(p.static_part() for p in patterns if has_static)


def bind(
  patterns: tuple[Pattern, ...],
  queries: Queries,
  keys: Keys,
  directions: Directions,
) -> tuple[Any, ...]:
  """The sets that make up the `contents` of each pattern of `with_content`."""
  group = queries.q.shape[2] // keys.k.shape[2]
  segments = None
  if keys.segments is not None and queries.segments is not None:
    segments = queries.segments[..., 0], keys.segments[..., 0]

  def sets_of(content, heads):
    q = queries.q[:, :, index_of(heads)]
    k = keys.k[:, :, index_of(key_heads(heads, group))]
    given = directions.get(content)
    if given is not None and len(given) > 1:
      given = given[index_of(heads)]
    found = labels(content, q, k, given, segments=segments)
    found = checkpoint_name(found, contract.SAVED_NAMES[-1])
    return content.sets(found, None if segments is None else segments[1])

  return tuple(
    tuple(sets_of(content, heads) for content in pattern.contents())
    for pattern, heads in with_content(patterns).items()
  )


def labels(
  content: Content,
  q_BLHK: jax.Array,
  k_BMGK: jax.Array,
  given: jax.Array | None,
  start: jax.Array | int = 0,
  segments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
  """`Content.labels` without gradients; by default, from its own directions."""
  drawn = content.directions(q_BLHK.shape[-1]) if given is None else given
  q, k, directions = jax.tree.map(
    lambda x: lax.stop_gradient(jnp.asarray(x)).astype(jnp.float32),
    (q_BLHK, k_BMGK, drawn),
  )
  return content.labels(Known(q, k, directions, start, segments))


def check_directions(
  patterns: tuple[Pattern, ...], directions: Directions, width: int
) -> None:
  """Raises a ValueError unless patterns have what they need; `width` is K."""
  contents = dict.fromkeys(c for p in patterns for c in p.contents())
  taken = {c: c.given(len(patterns), width) for c in contents}
  taken = {c: (shape, what) for c, (shape, what) in taken.items() if what}
  for pattern in directions:
    if pattern not in taken:
      raise ValueError(
        f"directions of {shorten(repr(pattern))}, which no head's pattern"
        " takes; a key is a Pattern, not its text; directions are for"
        f" {', '.join(map(shorten, taken)) or 'none'}"
      )
  for content, (shape, what) in taken.items():
    given = directions.get(content)
    if given is None and content.directions(width) is None:
      raise ValueError(
        f"{shorten(content)} needs its {what}, an array {list(shape)}: pass"
        " directions={pattern: array} to attend, or to as_attention_fn"
      )
    if given is not None and np.shape(given) not in (shape, (1, *shape[1:])):
      raise ValueError(
        f"{what} of {shorten(content)} must be {list(shape)}, or the same"
        f" with 1 head, got {list(np.shape(given))}"
      )


def prepare(
  patterns: tuple[Pattern, ...],
  queries: Queries,
  keys: Keys,
  directions: Directions,
  tile: int,
) -> tuple[jax.Array | None, tuple[Any, ...]]:
  """(the spans of heads, or None; what `plan_found` makes plans of)."""
  bound = bind(patterns, queries, keys, directions)
  dtype = np.promote_types(queries.q.dtype, np.float32)
  tables = [found_tiles.lay_out(pairs, tile) for pairs in _sets(bound)]
  return spans_lib.of_heads(patterns, directions, dtype), (bound, tables)


def plan_found(
  patterns: tuple[Pattern, ...],
  found: tuple[Any, ...],
  spans_H: jax.Array | None,
  n: int,
  tile: int,
) -> contract.Plans:
  """The plans of the disjoint parts that are not static, see `prepare`."""
  bound, tables = found
  table_of = dict(zip(_sets(bound), tables, strict=True))
  items = zip(with_content(patterns).items(), bound, strict=True)
  plans = [
    (found_tiles.plan_part(own, table_of), heads)
    for (pattern, heads), sets in items
    for part in pattern.split()[1]
    for own in part.bind(unions(pattern, sets)).parts()
  ]
  return [*plans, *spans_lib.span_plans(patterns, spans_H, n, tile)]


def count_scores(
  pattern: Pattern, case: contract.Case
) -> list[tuple[str, int, int]]:
  """(executor, tile, scores per sequence and head) of content-based parts.

  Shapes are known before run time, whatever the content. Spans are not: the
  count for the longest ones is an upper bound.
  """
  found = []
  given = {c: c.given(1, case.qk_width) for c in pattern.contents()}
  directions = {c: jnp.zeros(x) for c, (x, what) in given.items() if what}

  def count(q):
    arrays = Queries(q), Keys(q, q), directions
    spans_H, tables = prepare((pattern,), *arrays, case.tile)
    plans = plan_found((pattern,), tables, spans_H, case.length, case.tile)
    for plan, _ in plans:
      steps = plan.tables.steps(plan, case)
      found.append((steps.name, plan.tile, steps.scores))

  shape = 1, case.length, 1, case.qk_width
  jax.eval_shape(count, jax.ShapeDtypeStruct(shape, jnp.float32))
  return found


def unions(
  pattern: Pattern, sets: Sequence[tuple[Pattern, ...]]
) -> dict[Pattern, Pattern]:
  """{content: the union of its sets} for a pattern's `contents`."""
  unions = (functools.reduce(operator.or_, x) for x in sets)
  return dict(zip(pattern.contents(), unions, strict=True))


def _sets(bound):
  return jax.tree.leaves(bound, is_leaf=lambda x: isinstance(x, Pattern))


def realize(
  patterns: tuple[Pattern, ...],
  queries: Queries,
  keys: Keys,
  directions: Directions,
) -> jax.Array:
  """The pairs: bool [B, H, L, M]; B is 1 if all patterns are static."""
  # In the mask of a bound pattern, positions have axes of batch and heads.
  heads_bound = [pattern.support() for pattern in patterns]
  bound = bind(patterns, queries, keys, directions)
  items = zip(with_content(patterns).items(), bound, strict=True)
  for (pattern, heads), sets in items:
    for j, head in enumerate(range(len(patterns)) if heads is None else heads):
      own = jax.tree.map(lambda x, j=j: x[:, j : j + 1], sets)
      heads_bound[head] = pattern.bind(unions(pattern, own))
  n = keys.k.shape[1]
  i = np.arange(n).reshape(1, 1, n, 1)
  masks = [pattern.mask(i, i.swapaxes(2, 3)) for pattern in heads_bound]
  everything = np.ones((1, 1, n, n), bool)
  *masks, _ = jnp.broadcast_arrays(*masks, everything)
  mask_BHLM = jnp.concatenate(masks, axis=1)
  weights_HLM = spans_lib.weights(patterns, directions, i[0, 0], i[0, 0, :, 0])
  return (
    mask_BHLM if weights_HLM is None else mask_BHLM & (weights_HLM != 0)[None]
  )
