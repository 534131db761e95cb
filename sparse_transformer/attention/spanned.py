"""Runs patterns with learned spans, in plain XLA: no further than they reach.

A step processes some tiles of queries, each with the tile of keys that is
`ago` tiles before its own. Steps go back from ago = 0 until no span reaches
further. The spans are known at run time only, and so is how many steps there
are: one compiled program takes less time as they shrink.

Nothing here depends on timing: no two sums go to the same place in one step.

Axes: G heads that run together; A tiles of queries of a step; P places, which
are positions padded to whole steps, and for keys with tiles before them.
"""

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
  Plan,
  index_of,
  make_order,
)
from sparse_transformer.attention.online_softmax import dot
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
    scale = online_softmax.scale(q_BLHK)
    dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)

    def of_heads(arrays):
      q_BGP, k_BGP, v_BGP, spans = arrays

      def rows(i, carry):
        q = walk.queries(q_BGP, i)

        def step(ago, state):
          mask, m = walk.weights(spans, i, ago)
          key = walk.keys(k_BGP, i, ago), walk.keys(v_BGP, i, ago)
          new = online_softmax.softmax_of_tile(mask, q, key, jnp.log(m))
          return online_softmax.combine(state, new)

        out = jnp.zeros_like(q, dtype, (*q.shape[:-1], v_BGP.shape[-1]))
        state = out, jnp.full_like(out[..., :1], -jnp.inf), out[..., :1]
        state = lax.fori_loop(0, walk.num_steps(spans, i), step, state)
        out, lse = online_softmax.finish(*state)
        return walk.put(carry[0], out, i), walk.put(carry[1], lse, i)

      zeros = jnp.zeros_like(q_BGP, dtype, (*q_BGP.shape[:-1], v_BGP.shape[-1]))
      return lax.fori_loop(0, walk.num, rows, (zeros, zeros[..., :1]))

    arrays = walk.pad(q_BLHK * scale), *map(walk.pad_keys, (k_BLHK, v_BLHE))
    out, lse = lax.map(of_heads, (*arrays, walk.spans))
    return walk.restore(out), walk.restore(lse)[..., 0]

  def backward(
    self,
    plan: Plan,
    q_BLHK: jax.Array,
    dout_BLHE: jax.Array,
    lse_BLH: jax.Array,
    delta_BLH: jax.Array,
    k_BLHK: jax.Array,
    v_BLHE: jax.Array,
  ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv, dspans_H), with weights relative to `lse_BLH`."""
    walk = self._walk(plan, *q_BLHK.shape[:3])
    scale = online_softmax.scale(q_BLHK)
    dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)

    def of_heads(arrays):
      *of_queries, k_BGP, v_BGP, spans = arrays

      def rows(i, carry):
        dq_BGP, *others = carry
        q, dout, lse, delta = (walk.queries(x, i) for x in of_queries)
        q_T, dout_T = online_softmax.transpose_first(q, dout)

        def step(ago, carry):
          dq, dk_BGP, dv_BGP, dspans = carry
          k, v = walk.keys(k_BGP, i, ago), walk.keys(v_BGP, i, ago)
          mask, m = walk.weights(spans, i, ago)
          # Without the ramp, which is 0 at its end: e may be above 1.
          e, de = online_softmax.weights_and_gradients(
            mask & (m != 0), (q, dout, lse, delta), (k, v)
          )
          ds = m * de * online_softmax.scale_of_scores(q)
          p, ds = (m * e).astype(q.dtype), ds.astype(q.dtype)
          slopes = walk.slopes(spans, ago)
          dv = dot("bgaet,bgats->bgaes", dout_T, p).swapaxes(-1, -2)
          dk = dot("bgakt,bgats->bgaks", q_T, ds).swapaxes(-1, -2)
          return (
            dq + dot("bgats,bgask->bgatk", ds, k),
            walk.add_keys(dk_BGP, dk, i, ago),
            walk.add_keys(dv_BGP, dv, i, ago),
            dspans + (slopes * de).sum((0, 2, 3, 4)),
          )

        carry = jnp.zeros_like(q, dtype), *others
        carry = lax.fori_loop(0, walk.num_steps(spans, i), step, carry)
        return walk.put(dq_BGP, carry[0] * scale, i), *carry[1:]

      arrays = of_queries[0], k_BGP, v_BGP, spans
      zeros = tuple(jnp.zeros_like(x, dtype) for x in arrays)
      return lax.fori_loop(0, walk.num, rows, zeros)

    of_queries = (
      q_BLHK * scale,
      dout_BLHE,
      lse_BLH[..., None],
      delta_BLH[..., None],
    )
    dq, dk, dv, dspans = lax.map(
      of_heads,
      (
        *map(walk.pad, of_queries),
        *map(walk.pad_keys, (k_BLHK, v_BLHE)),
        walk.spans,
      ),
    )
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


class _Walk:
  """How a plan is processed: in `num` groups of `size` tiles of queries."""

  def __init__(self, plan, n, group, num, size):
    self.n, self.tile, self.num, self.size = n, plan.tile, num, size
    self.pattern, self.condition = plan.tables.pattern, plan.pattern
    self.spans = plan.tables.spans.reshape(-1, group)
    self.most = -(-(self.pattern.most_keys(n) - 1) // self.tile)
    self.before = self.most * self.tile  # places before the first key

  def num_steps(self, spans_G, i):
    """How many tiles of keys the i-th group of tiles of queries has."""
    reach = jnp.ceil(spans_G.max() + self.pattern.ramp).astype(jnp.int32) - 1
    ago = -(-reach // self.tile)
    return jnp.clip(ago, 0, jnp.minimum(self.most, (i + 1) * self.size - 1)) + 1

  def weights(self, spans_G, i, ago):
    """Of a step: which keys there are, and the weights of pairs.

    Returns:
      Arrays that broadcast to [B, G, A, T, S].
    """
    distance = self._distance(ago)
    m = spans_lib.weights_of(self.pattern, _by_head(spans_G), distance)
    m = jnp.where(self.pattern.support().mask(distance, 0), m, 0)
    tiles = (i * self.size + jnp.arange(self.size)).reshape(1, 1, -1, 1, 1)
    mask = tiles >= ago
    if self.condition is not None:
      places = np.arange(self.tile).reshape(1, 1, 1, 1, -1)
      q_at = tiles * self.tile + places.swapaxes(3, 4)
      k_at = (tiles - ago) * self.tile + places
      mask &= self.condition.mask(q_at, k_at)
    return mask, m

  def slopes(self, spans_G, ago):
    """The derivatives of the weights of a step by the spans."""
    distance = self._distance(ago)
    return spans_lib.slopes_of(self.pattern, _by_head(spans_G), distance)

  def _distance(self, ago):
    places = np.arange(self.tile)
    return ago * self.tile + (places[:, None] - places)[None, None, None]

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

  def queries(self, x_BGP, i):
    """The i-th group of tiles: [B, G, A, T, ...]."""
    return self._take(x_BGP, i * self.size)

  def put(self, x_BGP, new, i):
    """x with a group of tiles replaced."""
    return self._put(x_BGP, new, i * self.size)

  def keys(self, x_BGP, i, ago):
    """The tiles of keys of a step."""
    return self._take(x_BGP, self.most + i * self.size - ago)

  def add_keys(self, x_BGP, new, i, ago):
    """x with new values added to the tiles of keys of a step."""
    first = self.most + i * self.size - ago
    return self._put(x_BGP, self._take(x_BGP, first) + new, first)

  def _take(self, x_BGP, first):
    num = self.size * self.tile
    x = lax.dynamic_slice_in_dim(x_BGP, first * self.tile, num, 2)
    return x.reshape(*x.shape[:2], self.size, self.tile, *x.shape[3:])

  def _put(self, x_BGP, new, first):
    new = new.reshape(*new.shape[:2], -1, *new.shape[4:])
    return lax.dynamic_update_slice_in_dim(x_BGP, new, first * self.tile, 2)


def _by_head(spans_G):
  return spans_G.reshape(1, -1, 1, 1, 1)
