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
    by_head = jnp.zeros(1) if span is None else jnp.asarray(directions[span])
    index = head if len(by_head) > 1 else 0
    spans.append(by_head[index].astype(dtype))
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
  distance = q - k
  rows = []
  for head, pattern in enumerate(patterns):
    row = jnp.ones(distance.shape, spans_H.dtype)
    span = span_of(pattern)
    if span is not None:
      ramp = span.weights(spans_H[head], distance)
      for part in pattern.split()[1]:
        has_span = part.support().mask(q, k)
        row = jnp.where(has_span, ramp, row)
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
  parts_H = []
  for pattern in patterns:
    _, parts = pattern.split()
    parts_H.append(() if span_of(pattern) is None else parts)

  plans = []
  for part, heads in group_heads(parts_H).items():
    (span,) = part.contents()
    own_spans_H = spans_H[index_of(heads, len(patterns))]
    plan = contract.Plan(
      pattern=None if part == span else part.support(),
      tile=min(tile or TILE, n),
      tables=SpanTables(own_spans_H, span),
    )
    plans.append((plan, heads))
  return plans


class _Walk(online_softmax.TileLoop):
  """The steps of a plan, back from each group of tiles of queries of a head.

  The groups of a head follow one another. Step `ago` has keys that far back.
  """

  name = "spanned"

  def __init__(self, plan, queries, keys, platform):
    del keys  # in the same order
    batch, self.n, self.num_heads, _ = queries.q.shape
    self.tile = plan.tile
    self.condition = plan.pattern
    self.spans = plan.tables.spans
    self.pattern = plan.tables.pattern

    # The number of groups of a head, and their tiles.
    self.times, self.size = found_tiles.cut(
      num_tiles=-(-self.n // self.tile),
      batch=batch,
      scores=self.tile**2,
      limit=CPU_SCORES if platform == "cpu" else found_tiles.SCORES,
    )
    self.num = self.times * self.num_heads
    longest = self.pattern.most_keys(self.n) - 1
    self.most = -(-longest // self.tile)
    # Scores for the longest spans, per sequence and head.
    last = (np.arange(self.times) + 1) * self.size - 1
    num_steps = int((np.minimum(self.most, last) + 1).sum())
    self.scores = num_steps * self.size * self.tile**2

  def bounds(self, i):
    end = self.pattern.end(self.spans[i // self.times])
    reach = jnp.ceil(end).astype(jnp.int32) - 1
    last_tile = self._first(i) + self.size - 1
    last = jnp.minimum(self.most, last_tile)
    return 0, jnp.clip(-(-reach // self.tile), 0, last) + 1

  def pairs(self, i, ago):
    tiles_A = self._first(i) + jnp.arange(self.size)
    tiles = tiles_A.reshape(1, 1, -1, 1, 1)
    mask = tiles >= ago
    if self.condition is not None:
      k_places = np.arange(self.tile).reshape(1, 1, 1, 1, -1)
      q_places = k_places.swapaxes(3, 4)
      first_q = tiles * self.tile
      first_k = first_q - ago * self.tile
      mask &= self.condition.mask(
        first_q + q_places,
        first_k + k_places,
      )
    weights = self._weights(self.spans, i, ago)
    return mask & (weights > 0), weights

  def spans_gradient(self, i, ago, dm):
    def weights(spans_H):
      return self._weights(spans_H, i, ago)

    _, transposed = jax.vjp(weights, self.spans)
    # Of all sequences and groups of tiles.
    total = dm.sum((0, 2), keepdims=True)
    (gradient,) = transposed(total)
    return gradient

  def _weights(self, spans_H, i, ago):
    """The weights of pairs, [1, 1, 1, T, S]."""
    places = np.arange(self.tile)
    within = (places[:, None] - places)[None, None, None]
    distance = ago * self.tile + within
    span = spans_H[i // self.times]
    in_support = self.pattern.support().mask(distance, 0)
    return jnp.where(
      in_support,
      self.pattern.weights(span, distance),
      0,
    )

  def arrange_queries(self, *arrays, before=0):
    """Arrays by head, in tiles: [B, H, V, T, ...]."""
    num_tiles = self.times * self.size
    behind = before * self.tile
    missing = num_tiles * self.tile - self.n

    def cut_tiles(x_BLH):
      batch, _, num_heads, *rest = x_BLH.shape
      pads = [(0, 0)] * x_BLH.ndim
      pads[1] = behind, missing
      x_BHL = jnp.pad(x_BLH, pads).swapaxes(1, 2)
      shape = batch, num_heads, -1, self.tile
      return x_BHL.reshape(*shape, *rest)

    return tuple(map(cut_tiles, arrays))

  def arrange_keys(self, *arrays):
    return self.arrange_queries(*arrays, before=self.most)

  def restore_queries(self, *arrays):
    results = []
    for x in arrays:
      batch, num_heads, _, _, *rest = x.shape
      x_BHL = x.reshape(batch, num_heads, -1, *rest)
      x_BHL = x_BHL[:, :, : self.n]
      results.append(x_BHL.swapaxes(1, 2))
    return tuple(results)

  def restore_keys(self, *arrays):
    own = (x[:, :, self.most :] for x in arrays)
    return self.restore_queries(*own)

  def queries(self, i, *arrays):
    first = self._first(i)
    return tuple(self._take(i, first, x) for x in arrays)

  def keys(self, i, ago, *arrays):
    first = self.most + self._first(i) - ago
    return tuple(self._take(i, first, x) for x in arrays)

  def put(self, i, x_BHVT, new):
    starts = self._starts(i, self._first(i), x_BHVT)
    return lax.dynamic_update_slice(x_BHVT, new, starts)

  def add(self, i, ago, x_BGVT, new):
    first = self.most + self._first(i) - ago
    new = self._take(i, first, x_BGVT) + new
    starts = self._starts(i, first, x_BGVT)
    return lax.dynamic_update_slice(x_BGVT, new, starts)

  def _first(self, i):
    return i % self.times * self.size

  def _take(self, i, first, x_BGVT):
    """A group's tiles of its head from the `first` on: [B, 1, A, T, ...]."""
    batch, _, _, *rest = x_BGVT.shape
    starts = self._starts(i, first, x_BGVT)
    return lax.dynamic_slice(x_BGVT, starts, (batch, 1, self.size, *rest))

  def _starts(self, i, first, x_BGVT):
    """Where these tiles start, on all axes."""
    num_key_heads = x_BGVT.shape[1]
    head = i // self.times * num_key_heads // self.num_heads
    starts = [0, head, first] + [0] * (x_BGVT.ndim - 3)
    return [jnp.int32(start) for start in starts]
