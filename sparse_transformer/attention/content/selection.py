"""The pairs of content-based patterns, for given arrays.

Heads with the same pattern are bound together. A pattern decides the integer
labels of positions; they are named, so that rematerialization can keep them
instead of deciding again, perhaps differently.

In all functions, `patterns` has one pattern per head, q_BLHK and k_BLHK are
queries and keys, `directions` is as in `attention.attend`, and `bound` is what
`bind` returns.
"""

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_transformer.attention.content import gathered, spans as spans_lib
from sparse_transformer.attention.contract import (
  SAVED_NAMES,
  Case,
  Heads,
  Plan,
  group_heads,
  index_of,
)
from sparse_transformer.patterns import AdaptiveSpan, Pattern, shorten
from sparse_transformer.patterns.content import Content

LABELS_NAME = SAVED_NAMES[-1]

Directions = Mapping[Pattern, jax.Array]


def follows(pattern: Pattern) -> bool:
  """Returns whether the pairs of a pattern follow from labels."""
  return bool(pattern.contents()) and spans_lib.span_of(pattern) is None


def with_content(patterns: tuple[Pattern, ...]) -> dict[Pattern, Heads]:
  """The distinct content-based patterns, with their heads."""
  return group_heads([(p,) if follows(p) else () for p in patterns])


def static_parts(patterns: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
  """The static part of each head's pattern; () if no head has one."""
  if all(pattern.split()[0] is None for pattern in patterns):
    return ()
  return tuple(pattern.static_part() for pattern in patterns)


def bind(
  patterns: tuple[Pattern, ...],
  q_BLHK: jax.Array,
  k_BLHK: jax.Array,
  directions: Directions,
) -> tuple[Any, ...]:
  """Binds the content-based patterns to arrays.

  Returns, for each pattern of `with_content`, in order, and each of its
  `contents`, the sets whose union it is.
  """

  def sets_of(content, heads):
    q, k = (x[:, :, index_of(heads)] for x in (q_BLHK, k_BLHK))
    given = directions.get(content)
    if given is not None and len(given) > 1:
      given = given[index_of(heads)]
    found = labels(content, q, k, given)
    return content.sets(checkpoint_name(found, LABELS_NAME))

  return tuple(
    tuple(sets_of(content, heads) for content in pattern.contents())
    for pattern, heads in with_content(patterns).items()
  )


def labels(
  content: Content,
  q_BLHK: jax.Array,
  k_BMHK: jax.Array,
  given: jax.Array | None,
  start: jax.Array | int = 0,
) -> jax.Array:
  """`Content.labels` of raw queries and keys, without gradients.

  Directions that are not `given` are the pattern's.
  """
  drawn = content.directions(q_BLHK.shape[-1]) if given is None else given
  q, k, directions = jax.tree.map(
    lambda x: lax.stop_gradient(jnp.asarray(x)).astype(jnp.float32),
    (q_BLHK, k_BMHK, drawn),
  )
  return content.labels(q, k, directions, start)


def check_directions(
  patterns: tuple[Pattern, ...], directions: Directions, width: int
) -> None:
  """Checks that all patterns have the directions that they need, of width K.

  Raises:
    ValueError: some are missing, superfluous or have another shape.
  """
  if not isinstance(directions, Mapping):
    raise ValueError(
      f"directions must be a mapping {{pattern: array}}, got {type(directions)}"
    )
  contents = dict.fromkeys(c for p in patterns for c in p.contents())
  for pattern in directions:
    if pattern not in contents:
      raise ValueError(
        f"directions of {shorten(pattern)}, which no head's pattern contains;"
        f" they contain {', '.join(map(shorten, contents)) or 'none'}"
      )
  for content in contents:
    shape, what = _directions_of(content, len(patterns), width)
    given = directions.get(content)
    if given is not None and not what:
      raise ValueError(f"{shorten(content)} takes no directions; leave it out")
    if given is None:
      if what and content.directions(width) is None:
        raise ValueError(
          f"{shorten(content)} needs its {what}, an array {list(shape)}: pass"
          " attend(..., directions={pattern: array})"
        )
    elif np.shape(given) not in (shape, (1, *shape[1:])):
      raise ValueError(
        f"{what} of {shorten(content)} must be {list(shape)}, or the same"
        f" with 1 head, got {list(np.shape(given))}"
      )


def _directions_of(content, num_heads, width):
  """The shape and name of what a pattern takes; no name if it takes nothing."""
  if isinstance(content, AdaptiveSpan):
    return (num_heads,), "spans in positions, one per head"
  shape = num_heads, content.num_directions, width
  return shape, "directions" if content.num_directions else ""


def lay_out(bound: tuple[Any, ...], tile: int) -> list[gathered.Tables]:
  """The tables of all sets."""
  return [gathered.lay_out(pairs, tile) for pairs in _sets(bound)]


def parts(
  patterns: tuple[Pattern, ...], bound: tuple[Any, ...]
) -> Iterator[tuple[Pattern, Heads]]:
  """The disjoint content-based parts, bound, each with its heads."""
  items = zip(with_content(patterns).items(), bound, strict=True)
  for (pattern, heads), sets in items:
    for part in pattern.split()[1]:
      for found in part.bind(unions(pattern, sets)).parts():
        yield found, heads


def plans(
  patterns: tuple[Pattern, ...],
  bound: tuple[Any, ...],
  tables: list[gathered.Tables],
) -> list[tuple[Plan, Heads]]:
  """The plans of `parts` with the tables from `lay_out`."""
  table_of = dict(zip(_sets(bound), tables, strict=True))
  return [
    (gathered.make_plan(part, table_of[gathered.pairs_of(part)]), heads)
    for part, heads in parts(patterns, bound)
  ]


def count_scores(pattern: Pattern, case: Case) -> list[tuple[str, int, int]]:
  """(executor, tile, number of scores) of the content-based parts.

  For one sequence and head. Shapes are known before run time, whatever the
  content. Spans are not: the count for the longest ones is an upper bound.
  """
  if not follows(pattern):
    return spans_lib.count_scores(pattern, case)
  shape = 1, case.length, 1, case.qk_width

  def tables_of_parts(q_BLHK):
    directions = {
      content: jnp.zeros((1, content.num_directions, case.qk_width))
      for content in pattern.contents()
      if content.num_directions
    }
    bound = bind((pattern,), q_BLHK, q_BLHK, directions)
    tables = lay_out(bound, case.tile)
    found = plans((pattern,), bound, tables)
    return [plan.tables for plan, _ in found]

  q_BLHK = jax.ShapeDtypeStruct(shape, jnp.float32)
  return [
    ("gathered", tables.queries.shape[-1], gathered.count_scores(tables))
    for tables in jax.eval_shape(tables_of_parts, q_BLHK)
  ]


def unions(
  pattern: Pattern, sets: Sequence[tuple[Pattern, ...]]
) -> dict[Pattern, Pattern]:
  """{content: the union of its sets} for a pattern's `contents`."""
  unions = (functools.reduce(operator.or_, x) for x in sets)
  return dict(zip(pattern.contents(), unions, strict=True))


def _sets(bound):
  return jax.tree.leaves(bound, is_leaf=lambda x: isinstance(x, Pattern))


def bind_heads(
  patterns: tuple[Pattern, ...],
  q_BLHK: jax.Array,
  k_BLHK: jax.Array,
  directions: Directions,
) -> list[Pattern]:
  """The pattern of each head, bound to its queries and keys if needed.

  In the mask of a bound pattern, positions have axes of batch and heads. A
  pattern with a span becomes its support.
  """
  found = [pattern.support() for pattern in patterns]
  bound = bind(patterns, q_BLHK, k_BLHK, directions)
  items = zip(with_content(patterns).items(), bound, strict=True)
  for (pattern, heads), sets in items:
    for j, head in enumerate(range(len(patterns)) if heads is None else heads):
      own = jax.tree.map(lambda x, j=j: x[:, j : j + 1], sets)
      found[head] = pattern.bind(unions(pattern, own))
  return found


def realize(
  patterns: tuple[Pattern, ...],
  q_BLHK: jax.Array,
  k_BLHK: jax.Array,
  directions: Directions,
) -> jax.Array | np.ndarray:
  """The pairs: bool [B, H, L, M]; B is 1 if all patterns are static."""
  n = q_BLHK.shape[1]
  i = np.arange(n).reshape(1, 1, n, 1)
  bound = bind_heads(patterns, q_BLHK, k_BLHK, directions)
  masks = [pattern.mask(i, i.swapaxes(2, 3)) for pattern in bound]
  at = i[0, 0]
  weights_HLM = spans_lib.weights(patterns, directions, at, at[:, 0])
  if weights_HLM is not None:
    pairs = zip(masks, weights_HLM, strict=True)
    masks = [mask & (weights != 0)[None, None] for mask, weights in pairs]
  is_known = all(isinstance(mask, np.ndarray) for mask in masks)
  arrays = np if is_known else jnp
  everything = np.ones((1, 1, n, n), bool)
  *masks, _ = arrays.broadcast_arrays(*masks, everything)
  return arrays.concatenate(masks, axis=1)
