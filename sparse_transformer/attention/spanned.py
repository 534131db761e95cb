"""Runs patterns with learned spans, in plain XLA: no further than they reach.

A step processes some tiles of queries, each with the tile of keys that is
`ago` tiles before its own. Steps go back from ago = 0 until no span reaches
further. The spans are known at run time only, and so is how many steps there
are: one compiled program takes less time as they shrink.

Nothing here depends on timing: no two sums go to the same place in one step.

Axes: G heads that run together; A tiles of queries of a step; P places, which
are positions padded to whole steps, and for keys with tiles before them.
"""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import online_softmax, spans as spans_lib
from sparse_transformer.attention.contract import (
  Case,
  Heads,
  Keys,
  Plan,
  Queries,
  index_of,
  make_order,
)
from sparse_transformer.patterns import AdaptiveSpan, Pattern


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["spans"],
  meta_fields=["pattern"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
  """What a plan depends on.

  Attributes:
    spans: [H], those of the plan's heads, in positions.
    pattern: gives the pairs their weights.
  """

  spans: jax.Array
  pattern: AdaptiveSpan


@dataclasses.dataclass(frozen=True)
class Spanned:
  """Runs the plans of parts with spans.

  Attributes:
    tile: positions on a side of a tile, unless asked for another.
    scores: how many scores a step computes, of all sequences.
    together: whether all heads run together, as far as the widest span;
      otherwise one after another, each as far as its own.
  """

  tile: int
  scores: int
  together: bool

  def plans(
    self,
    patterns: tuple[Pattern, ...],
    spans_H: jax.Array,
    n: int,
    tile: int = 0,
  ) -> list[tuple[Plan, Heads]]:
    """The plans of the parts with spans, each with its heads.

    Args:
      patterns: one per head.
      spans_H: in positions.
      n: number of positions.
      tile: positions on a side of a tile; 0 for the default.
    """
    everywhere = make_order(np.arange(n), n)
    tile = min(tile or self.tile, n)

    def plan(part, heads):
      (span,) = part.contents()
      condition = None if part == span else part.support()
      tables = Tables(spans_H[index_of(heads)], span)
      return Plan(condition, tile, everywhere, everywhere, tables)

    by_part = spans_lib.parts(patterns)
    return [(plan(*item), item[1]) for item in by_part.items()]

  def forward(
    self, plan: Plan, q_BLHK: jax.Array, k_BLHK: jax.Array, v_BLHE: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """(out_BLHE, lse_BLH) over the pairs of a plan."""
    walk = self._walk(plan, *q_BLHK.shape[:3])

    def of_heads(arrays):
      spans_G, *arrays = arrays
      return online_softmax.forward(walk.of_heads(spans_G), *arrays)

    arrays = walk.pad(q_BLHK), *map(walk.pad_keys, (k_BLHK, v_BLHE))
    out, lse = lax.map(of_heads, (walk.spans, *arrays))
    return walk.restore(out), walk.restore(lse)[..., 0]

  def backward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv, dspans_H), with weights relative to `lse`."""
    walk = self._walk(plan, *queries.q.shape[:3])

    def of_heads(arrays):
      spans_G, *arrays = arrays
      return online_softmax.backward(walk.of_heads(spans_G), *arrays)

    arrays = (
      Queries(*map(walk.pad, queries.with_columns())),
      Keys(*map(walk.pad_keys, keys)),
    )
    dq, dk, dv, dspans = lax.map(of_heads, (walk.spans, *arrays))
    dk, dv = (x[:, :, :, walk.before :] for x in (dk, dv))
    return *map(walk.restore, (dq, dk, dv)), dspans.reshape(-1)

  def count_scores(
    self, pattern: Pattern, case: Case
  ) -> list[tuple[str, int, int]]:
    """(executor, tile, number of scores) of each part, with the longest spans.

    For one sequence and head of the pattern.
    """
    found = []
    spans_H = jnp.zeros(case.num_heads)
    heads = (pattern,) * case.num_heads
    for plan, _ in self.plans(heads, spans_H, case.length, case.tile):
      walk = self._walk(plan, case.batch, case.length, case.num_heads)
      last = (np.arange(walk.num) + 1) * walk.size - 1
      steps = (np.minimum(walk.most, last) + 1).sum()
      scores = int(steps) * walk.size * walk.tile**2
      found.append(("spanned", walk.tile, scores))
    return found

  def _walk(self, plan, b, n, h):
    group = h if self.together else 1
    num_tiles = -(-n // plan.tile)
    most = max(1, self.scores // (b * group * plan.tile**2))
    num = -(-num_tiles // most)
    return _Walk(plan, n, group, num, size=-(-num_tiles // num))


def on(platform: str) -> Spanned:
  """The executor for a platform."""
  if platform == "cpu":  # where the scores of a step should stay in cache
    return Spanned(tile=128, scores=131_072, together=False)
  return Spanned(tile=128, scores=2**25, together=True)


class _Walk(online_softmax.Steps):
  """The steps of a plan, back from the tiles of queries of each group.

  Their numbers are how many tiles ago the keys are.
  """

  def __init__(self, plan, n, group, num, size):
    self.n, self.tile, self.num, self.size = n, plan.tile, num, size
    self.pattern, self.condition = plan.tables.pattern, plan.pattern
    self.spans = plan.tables.spans.reshape(-1, group)
    self.most = -(-(self.pattern.most_keys(n) - 1) // self.tile)
    self.before = self.most * self.tile  # places before the first key

  def of_heads(self, spans_G):
    """The walk of heads that run together."""
    walk = copy.copy(self)
    walk.spans = spans_G
    return walk

  def bounds(self, i):
    reach = jnp.ceil(self.spans.max() + self.pattern.ramp).astype(jnp.int32) - 1
    last = jnp.minimum(self.most, (i + 1) * self.size - 1)
    return 0, jnp.clip(-(-reach // self.tile), 0, last) + 1

  def pairs(self, i, ago):
    tiles = (i * self.size + jnp.arange(self.size)).reshape(1, 1, -1, 1, 1)
    mask = tiles >= ago
    if self.condition is not None:
      places = np.arange(self.tile).reshape(1, 1, 1, 1, -1)
      q_at = tiles * self.tile + places.swapaxes(3, 4)
      k_at = (tiles - ago) * self.tile + places
      mask &= self.condition.mask(q_at, k_at)
    weights = self._weights(self.spans, ago)
    return mask & (weights > 0), weights

  def spans_gradient(self, i, ago, dweights):
    _, transposed = jax.vjp(lambda x: self._weights(x, ago), self.spans)
    return transposed(dweights.sum((0, 2), keepdims=True))[0]

  def _weights(self, spans_G, ago):
    """The weights of pairs, [1, G, 1, T, S]."""
    places = np.arange(self.tile)
    distance = ago * self.tile + (places[:, None] - places)[None, None, None]
    spans = spans_G.reshape(1, -1, 1, 1, 1)
    weights = spans_lib.weights_of(self.pattern, spans, distance)
    return jnp.where(self.pattern.support().mask(distance, 0), weights, 0)

  def pad(self, x_BLH, before=0):
    """x by head: [groups of heads, B, G, P, ...]."""
    b, n, _, *widths = x_BLH.shape
    x = x_BLH.reshape(b, n, *self.spans.shape, *widths)
    x = jnp.moveaxis(x, 1, 3).swapaxes(0, 1)
    after = self.num * self.size * self.tile - n
    return jnp.pad(x, [(0, 0)] * 3 + [(before, after)] + [(0, 0)] * len(widths))

  def pad_keys(self, x_BLH):
    return self.pad(x_BLH, self.before)

  def restore(self, x):
    """Undoes `pad`."""
    x_BPH = jnp.moveaxis(x.swapaxes(0, 1), 3, 1)
    b, p, _, _, *widths = x_BPH.shape
    return x_BPH.reshape(b, p, -1, *widths)[:, : self.n]

  def queries(self, i, *arrays):
    return tuple(self._take(x, i * self.size) for x in arrays)

  def keys(self, i, ago, *arrays):
    return tuple(self._take(x, self._first_key(i, ago)) for x in arrays)

  def put(self, i, x_BGP, new):
    return self._put(x_BGP, new, i * self.size)

  def add(self, i, ago, x_BGP, new):
    first = self._first_key(i, ago)
    return self._put(x_BGP, self._take(x_BGP, first) + new, first)

  def _first_key(self, i, ago):
    """The first tile of keys of a step."""
    return self.most + i * self.size - ago

  def _take(self, x_BGP, first):
    num = self.size * self.tile
    x = lax.dynamic_slice_in_dim(x_BGP, first * self.tile, num, 2)
    return x.reshape(*x.shape[:2], self.size, self.tile, *x.shape[3:])

  def _put(self, x_BGP, new, first):
    new = new.reshape(*new.shape[:2], -1, *new.shape[4:])
    return lax.dynamic_update_slice_in_dim(x_BGP, new, first * self.tile, 2)
