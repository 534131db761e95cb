"""Learned spans: the weights of pairs, and execution of parts with spans.

Steps go back from `ago` = 0 until the span ends, which is known only at run
time: one compiled program takes less time as spans shrink.

In all functions, `patterns` has one pattern per head, and spans_H are their
spans in positions. Axes: A tiles of queries of a step; V tiles of T positions,
padded to whole steps, and for keys with tiles before them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract, online_softmax
from sparse_transformer.attention.content import found_tiles
from sparse_transformer.attention.heads import group_heads, index_of
from sparse_transformer.patterns import Pattern
from sparse_transformer.patterns.content import Spanned

TILE = 128  # positions
# Scores of a step, over all sequences: on CPUs, they should stay in cache.
CPU_SCORES = 131_072


def span_of(pattern: Pattern) -> Spanned | None:
  """The one `Spanned` pattern within a head's pattern, or None."""
  return next((c for c in pattern.contents() if isinstance(c, Spanned)), None)


def any_span(patterns: Sequence[Pattern]) -> bool:
  """Returns whether any head's pattern has a span."""
  return any(span_of(pattern) is not None for pattern in patterns)


def spans_of_heads(
  patterns: Sequence[Pattern],
  directions: Mapping[Pattern, jax.Array],
  dtype: Any = jnp.float32,
) -> jax.Array | None:
  """The spans [H] of heads, 0 for a head without; None if no head has one."""
  if not any_span(patterns):
    return None
  spans = []
  for head, span in enumerate(map(span_of, patterns)):
    given = jnp.zeros(1) if span is None else jnp.asarray(directions[span])
    spans.append(given[head if len(given) > 1 else 0].astype(dtype))
  return jnp.stack(spans)


def weights(
  patterns: Sequence[Pattern],
  directions: Mapping[Pattern, jax.Array],
  q: jax.Array | np.ndarray,
  k: jax.Array | np.ndarray,
  dtype: Any = jnp.float32,
) -> jax.Array | None:
  """The weights [H, ...] of pairs, 1 where static; None without any span."""
  spans_H = spans_of_heads(patterns, directions, dtype)
  if spans_H is None:
    return None
  rows = []
  for head, pattern in enumerate(patterns):
    row = jnp.ones((q - k).shape, spans_H.dtype)
    if (span := span_of(pattern)) is not None:
      ramp = span.weights(spans_H[head], q - k)
      for part in pattern.split()[1]:
        row = jnp.where(part.support().mask(q, k), ramp, row)
    rows.append(row)
  return jnp.stack(rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SpanTables:
  """The spans [H] of a plan's heads, and the pattern that gets its weights."""

  spans: jax.Array
  pattern: Spanned = dataclasses.field(metadata=contract.STATIC)

  @property
  def steps(self) -> type["_Walk"]:
    """See `found_tiles.TileTables`."""
    return _Walk


def span_plans(
  patterns: Sequence[Pattern], spans_H: jax.Array | None, n: int, tile: int
) -> contract.Plans:
  """The plans of the parts with spans; a tile of 0 is the default."""
  if spans_H is None:
    return []
  parts = [() if span_of(p) is None else p.split()[1] for p in patterns]
  found = []
  for part, heads in group_heads(parts).items():
    (span,) = part.contents()
    condition = None if part == span else part.support()
    tables = SpanTables(spans_H[index_of(heads, len(patterns))], span)
    plan = contract.Plan(condition, min(tile or TILE, n), tables)
    found.append((plan, heads))
  return found


class _Walk(online_softmax.TileLoop):
  """The steps of a plan, back from each group of tiles of queries of a head.

  The groups of a head follow one another. Step `ago` has keys that far back.
  """

  name = "spanned"

  def __init__(self, plan, queries, keys, platform):
    del keys  # in the same order
    batch, self.n, self.num_heads, _ = queries.q.shape
    self.tile, self.condition = plan.tile, plan.pattern
    self.spans, self.pattern = plan.tables.spans, plan.tables.pattern
    limit = CPU_SCORES if platform == "cpu" else found_tiles.SCORES
    num_tiles = -(-self.n // self.tile)
    # The number of groups of a head, and their tiles.
    self.times, self.size = found_tiles.cut(
      num_tiles, batch, self.tile**2, limit
    )
    self.num = self.times * self.num_heads
    self.most = -(-(self.pattern.most_keys(self.n) - 1) // self.tile)
    # Scores for the longest spans, per sequence and head.
    last = (np.arange(self.times) + 1) * self.size - 1
    steps = int((np.minimum(self.most, last) + 1).sum())
    self.scores = steps * self.size * self.tile**2

  def bounds(self, i):
    end = self.pattern.end(self.spans[i // self.times])
    reach = jnp.ceil(end).astype(jnp.int32) - 1
    last = jnp.minimum(self.most, self._first(i) + self.size - 1)
    return 0, jnp.clip(-(-reach // self.tile), 0, last) + 1

  def pairs(self, i, ago):
    tiles = (self._first(i) + jnp.arange(self.size)).reshape(1, 1, -1, 1, 1)
    mask = tiles >= ago
    if self.condition is not None:
      places = np.arange(self.tile).reshape(1, 1, 1, 1, -1)
      q_at = tiles * self.tile + places.swapaxes(3, 4)
      k_at = (tiles - ago) * self.tile + places
      mask &= self.condition.mask(q_at, k_at)
    weights = self._weights(self.spans, i, ago)
    return mask & (weights > 0), weights

  def spans_gradient(self, i, ago, dm):
    _, transposed = jax.vjp(lambda x: self._weights(x, i, ago), self.spans)
    return transposed(dm.sum((0, 2), keepdims=True))[0]

  def _weights(self, spans_H, i, ago):
    """The weights of pairs, [1, 1, 1, T, S]."""
    places = np.arange(self.tile)
    distance = ago * self.tile + (places[:, None] - places)[None, None, None]
    weights = self.pattern.weights(spans_H[i // self.times], distance)
    return jnp.where(self.pattern.support().mask(distance, 0), weights, 0)

  def arrange_queries(self, *arrays, before=0):
    """Arrays by head, in tiles: [B, H, V, T, ...]."""
    after = self.times * self.size * self.tile - self.n
    pads = (0, 0), (before * self.tile, after)

    def of_array(x_BLH):
      x = jnp.pad(x_BLH, (*pads, *[(0, 0)] * (x_BLH.ndim - 2))).swapaxes(1, 2)
      return x.reshape(*x.shape[:2], -1, self.tile, *x.shape[3:])

    return tuple(map(of_array, arrays))

  def arrange_keys(self, *arrays):
    return self.arrange_queries(*arrays, before=self.most)

  def restore_queries(self, *arrays):
    rows = (x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in arrays)
    return tuple(x[:, :, : self.n].swapaxes(1, 2) for x in rows)

  def restore_keys(self, *arrays):
    return self.restore_queries(*(x[:, :, self.most :] for x in arrays))

  def queries(self, i, *arrays):
    return tuple(self._take(i, self._first(i), x) for x in arrays)

  def keys(self, i, ago, *arrays):
    first = self.most + self._first(i) - ago
    return tuple(self._take(i, first, x) for x in arrays)

  def put(self, i, x_BHVT, new):
    starts = self._starts(i, self._first(i), x_BHVT)
    return lax.dynamic_update_slice(x_BHVT, new, starts)

  def add(self, i, ago, x_BGVT, new):
    first = self.most + self._first(i) - ago
    new = self._take(i, first, x_BGVT) + new
    return lax.dynamic_update_slice(x_BGVT, new, self._starts(i, first, x_BGVT))

  def _first(self, i):
    return i % self.times * self.size

  def _take(self, i, first, x_BGVT):
    """A group's tiles of its head from the `first` on: [B, 1, A, T, ...]."""
    b, _, _, *rest = x_BGVT.shape
    starts = self._starts(i, first, x_BGVT)
    return lax.dynamic_slice(x_BGVT, starts, (b, 1, self.size, *rest))

  def _starts(self, i, first, x_BGVT):
    """Where these tiles start, on all axes."""
    head = i // self.times * x_BGVT.shape[1] // self.num_heads
    starts = 0, head, first, *[0] * (x_BGVT.ndim - 3)
    return [*map(jnp.int32, starts)]
