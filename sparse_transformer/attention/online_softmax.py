"""Attention step by step: the loop of the executors in plain XLA.

A group of query tiles meets its key tiles in one or more steps. The forward
pass keeps a running softmax of each group; the backward pass recomputes the
weights against the final log-sum-exp. Executors differ in which tiles meet and
where they come from, which `Steps` says.

Tiles have three leading axes, such as A (tiles computed together), B (batch)
and H (heads), in any order: queries are [A, B, H, T, K], scores [A, B, H, T,
S].

A running softmax is a triple (out, max, sum): the weighted sum of values
[A, B, H, T, E], and the maximum of the scores and the sum of exp(score - max)
so far [A, B, H, T, 1].
"""

import abc
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention.contract import Keys, Queries, Scores
from sparse_transformer.attention.orders import apply
from sparse_transformer.patterns import Pattern

Running = tuple[jax.Array, jax.Array, jax.Array]
Softmax = tuple[jax.Array, jax.Array]  # (out, lse)
# The pairs, and their weights; None if all are 1.
Pairs = tuple[jax.Array, jax.Array | None]


class Steps(abc.ABC):
  """The tiles that meet, and their places in arrays [B, L, H, ...].

  The i-th group of query tiles has steps of numbers j. The loop runs on arrays
  in a form that the steps choose: that of `of_queries` and `of_keys`.
  """

  num: int  # number of groups
  single: bool = False  # whether every group has one step, whose number is i
  skips: bool = False  # whether to skip what has no pairs within segments
  spans: Any = ()  # the spans that determine the weights of pairs, if learned

  def bounds(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first step of a group, and the one after its last."""
    raise NotImplementedError("groups have a single step")

  def of_queries(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays of queries, in the form that `queries` reads."""
    return arrays

  def of_keys(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays of keys, in the form that `keys` reads and `add` changes."""
    return arrays

  def from_queries(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, L, H, ...] from arrays that `put` filled with gradients."""
    return arrays

  def from_keys(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Undoes `of_keys`, of gradients."""
    return arrays

  def merge(self, out: jax.Array, lse: jax.Array) -> Softmax:
    """(out_BLHE, lse_BLH) from arrays that `put` filled with results."""
    out_BLHE, lse_BLH = self.from_queries(out, lse)
    return out_BLHE, lse_BLH

  @abc.abstractmethod
  def queries(self, i: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The query tiles of a group, from arrays of queries."""

  @abc.abstractmethod
  def keys(
    self, i: jax.Array, j: jax.Array, *arrays: jax.Array
  ) -> tuple[jax.Array, ...]:
    """The key tiles of a step, from arrays of keys."""

  @abc.abstractmethod
  def pairs(self, i: jax.Array, j: jax.Array) -> Pairs:
    """The pairs of a step; no weight in the mask is 0."""

  def spans_gradient(self, i: jax.Array, j: jax.Array, dm: jax.Array) -> Any:
    """The gradients of `spans`, from those of a step's weights."""
    del i, j, dm
    return ()

  def shape(self, q: jax.Array) -> tuple[int, ...]:
    """The shape of results, without their width, which `put` takes."""
    return q.shape[:-1]

  @abc.abstractmethod
  def put(self, i: jax.Array, x: jax.Array, new: jax.Array) -> jax.Array:
    """x, an array of results, with those of a group."""

  @abc.abstractmethod
  def add(
    self, i: jax.Array, j: jax.Array, x: jax.Array, new: jax.Array
  ) -> jax.Array:
    """x, an array of keys, with the results of a step added to it."""


def forward(
  steps: Steps, queries: Queries, keys: Keys, scores: Scores
) -> Softmax:
  """(out_BLHE, lse_BLH) of all queries: 0 and -inf without keys."""
  q = queries.q
  queries = apply(steps.of_queries, queries)
  keys = apply(steps.of_keys, keys)
  width = keys.v.shape[-1]

  def of_group(i, done):
    mine = apply(functools.partial(steps.queries, i), queries)
    tile = mine.q * scale(q, scores)
    out = jnp.zeros_like(tile, _wide(q), (*tile.shape[:-1], width))
    nothing = out, jnp.full_like(out[..., :1], -jnp.inf), out[..., :1]

    def step(j, state=None):
      others = apply(functools.partial(steps.keys, i, j), keys)
      pairs = _within_segments(steps.pairs(i, j), mine, others)
      new = _unless_empty(
        steps,
        pairs,
        lambda: softmax_of_tile(tile, others, pairs, scores),
        nothing,
      )
      return new if state is None else combine(state, new)

    if steps.single:
      state = step(i)
    else:
      state = lax.fori_loop(*steps.bounds(i), step, nothing)
    (out_done, lse_done), (out, lse) = done, finish(*state)
    return steps.put(i, out_done, out), steps.put(i, lse_done, lse[..., 0])

  shape = steps.shape(queries.q)
  out = jnp.zeros_like(q, _wide(q), (*shape, width))
  nothing = out, jnp.full_like(q, -jnp.inf, _wide(q), shape)
  return steps.merge(*lax.fori_loop(0, steps.num, of_group, nothing))


def backward(
  steps: Steps, queries: Queries, keys: Keys, scores: Scores
) -> tuple[jax.Array, ...]:
  """(dq, dk, dv, gradients of the spans), with weights relative to lse."""
  queries = apply(steps.of_queries, queries)
  keys = apply(steps.of_keys, keys)

  def of_group(i, done):
    dq_done, *others = done
    mine = apply(functools.partial(steps.queries, i), queries)
    q, dout = mine.q * scale(mine.q, scores), mine.dout
    # Before any product: the compiler would transpose within each, and one
    # whose left side is transposed runs at half the rate.
    q_T, dout_T = lax.optimization_barrier(
      (q.swapaxes(-1, -2), dout.swapaxes(-1, -2))
    )

    def gradients(i, j, tile, pairs):
      """(dq, dk, dv, gradients of the spans) of a step."""
      mask, m = pairs
      scaled = mine._replace(q=q)
      p, dp, slope = weights_and_gradients(scaled, tile, mask, scores)
      dspans: Any = ()
      if m is not None:  # p may be above 1 where m is below
        dspans = steps.spans_gradient(i, j, dp)
        p, dp = m * p, m * dp
      ds = (dp * slope).astype(q.dtype)
      p = p.astype(q.dtype)
      new_dv = dot("abhet,abhts->abhes", dout_T, p).swapaxes(-1, -2)
      new_dk = dot("abhkt,abhts->abhks", q_T, ds).swapaxes(-1, -2)
      return dot("abhts,abhsk->abhtk", ds, tile.k), new_dk, new_dv, dspans

    def step(j, carry):
      dq, dk, dv, dspans = carry
      tile = apply(functools.partial(steps.keys, i, j), keys)
      pairs = _within_segments(steps.pairs(i, j), mine, tile)
      new_dq, new_dk, new_dv, new_dspans = _unless_empty(
        steps,
        pairs,
        lambda: gradients(i, j, tile, pairs),
        (*(jnp.zeros_like(x, _wide(q)) for x in (q, tile.k, tile.v)), ()),
      )
      dspans = jax.tree.map(jnp.add, dspans, new_dspans)
      dk, dv = steps.add(i, j, dk, new_dk), steps.add(i, j, dv, new_dv)
      return dq + new_dq, dk, dv, dspans

    carry = jnp.zeros_like(q, _wide(q)), *others
    if steps.single:
      dq, *others = step(i, carry)
    else:
      dq, *others = lax.fori_loop(*steps.bounds(i), step, carry)
    return steps.put(i, dq_done, dq * scale(q, scores)), *others

  q = queries.q
  nothing = (
    jnp.zeros_like(q, _wide(q), (*steps.shape(q), q.shape[-1])),
    *(jnp.zeros_like(x, _wide(q)) for x in keys[:2]),
    jax.tree.map(jnp.zeros_like, steps.spans),
  )
  dq, dk, dv, dspans = lax.fori_loop(0, steps.num, of_group, nothing)
  grads = *steps.from_queries(dq), *steps.from_keys(dk, dv)
  return *grads, *jax.tree.leaves(dspans)


def _within_segments(pairs: Pairs, queries: Queries, keys: Keys) -> Pairs:
  """The pairs of a step whose query and key have the same segment."""
  mask, weights = pairs
  return within_segments(mask, queries.segments, keys.segments), weights


def within_segments(
  mask: jax.Array, of_queries: jax.Array | None, of_keys: jax.Array | None
) -> jax.Array:
  """A mask [..., T, S] and what segments [..., T] and [..., S] leave of it."""
  if of_queries is None or of_keys is None:
    return mask
  return mask & (of_queries[..., None] == of_keys[..., None, :])


def _unless_empty(steps, pairs, compute, nothing):
  """compute(), or `nothing` where segments leave no pairs to compute."""
  if not steps.skips:
    return compute()
  return lax.cond(pairs[0].any(), compute, lambda: nothing)


def pairs(pattern: Pattern, q_at: jax.Array, k_at: jax.Array) -> jax.Array:
  """Pairs [..., T, S] at positions [..., T] and [..., S], -1 for padding."""
  q_at, k_at = q_at[..., None], k_at[..., None, :]
  return pattern.mask(q_at, k_at) & (q_at >= 0) & (k_at >= 0)


def softmax_of_tile(
  q: jax.Array, keys: Keys, pairs: Pairs, scores: Scores
) -> Running:
  """The running softmax over one tile of keys; q is scaled."""
  mask, weights = pairs
  s, _ = _scores(q, keys.k, mask, scores)
  if weights is not None:
    s = s + jnp.log(weights)
  max_ = s.max(-1, keepdims=True)
  p = jnp.exp(s - _finite(max_))
  out = dot("abhts,abhse->abhte", p.astype(keys.v.dtype), keys.v)
  return out, max_, p.sum(-1, keepdims=True)


def combine(first: Running, second: Running) -> Running:
  """The running softmax over the keys of both."""
  (out_1, max_1, sum_1), (out_2, max_2, sum_2) = first, second
  max_ = jnp.maximum(max_1, max_2)
  decay_1, decay_2 = (jnp.exp(m - _finite(max_)) for m in (max_1, max_2))
  out = out_1 * decay_1 + out_2 * decay_2
  return out, max_, sum_1 * decay_1 + sum_2 * decay_2


def finish(out: jax.Array, max_: jax.Array, sum_: jax.Array) -> Softmax:
  """(out, log-sum-exp) of a running softmax: 0 and -inf without any keys."""
  return out / jnp.where(sum_ == 0, 1, sum_), _log_sum(max_, sum_)


def _log_sum(max_, sum_):
  """The log-sum-exp, -inf for a sum of 0, where log has no derivative."""
  lse = max_ + jnp.log(jnp.where(sum_ == 0, 1, sum_))
  return jnp.where(sum_ == 0, -jnp.inf, lse)


def merge(*results: Softmax) -> Softmax:
  """(out [..., E], lse [...]) over the keys of all, from those of each.

  Exact, as long as no pair is counted twice.
  """
  if len(results) == 1:
    return results[0]
  outs, lses = zip(*results, strict=True)
  max_ = functools.reduce(jnp.maximum, lses)
  sum_ = functools.reduce(jnp.add, (jnp.exp(x - _finite(max_)) for x in lses))
  lse = _log_sum(max_, sum_)
  # The shares of the results, rather than a division by their sum.
  shares = [jnp.exp(x - _finite(lse))[..., None] for x in lses]
  parts = (share * out for share, out in zip(shares, outs, strict=True))
  return functools.reduce(jnp.add, parts), lse


def add_sinks(
  out_BLHE: jax.Array, lse_BLH: jax.Array, sinks_H: jax.Array
) -> Softmax:
  """The results with a sink, a key whose score is given and whose value is 0.

  Source: Xiao et al. 2023, arXiv 2309.17453, section 3.3, with a value of 0.
  """
  sinks = sinks_H.astype(lse_BLH.dtype)[None, None]
  is_none = (lse_BLH == -jnp.inf) & (sinks == -jnp.inf)
  sinks = jnp.where(is_none, 0, sinks)  # the difference would be NaN
  share = jax.nn.sigmoid(lse_BLH - sinks)[..., None]
  out = (out_BLHE.astype(lse_BLH.dtype) * share).astype(out_BLHE.dtype)
  return out, jnp.where(is_none, -jnp.inf, jnp.logaddexp(lse_BLH, sinks))


def weights_and_gradients(
  queries: Queries, keys: Keys, mask: jax.Array, scores: Scores
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
  """(weights relative to the given lse, gradients of the scores, their slope).

  The slope is that of the scores as a function of products of keys and queries,
  which are scaled: the gradients are to be multiplied by it in the end. All are
  in float32 or wider: round them for products.
  """
  s, slope = _scores(queries.q, keys.k, mask, scores)
  p = jnp.exp(s - queries.lse[..., None])
  dp = dot("abhte,abhse->abhts", queries.dout, keys.v)
  return p, p * (dp - queries.delta[..., None]), slope


def _scores(q, k, mask, scores):
  """(The scores, -inf outside the mask, their slope); `scale` multiplied q."""
  # What `scale` leaves.
  factor = scores.factor(q.shape[-1]) if q.dtype.itemsize == 2 else 1.0
  s = dot("abhtk,abhsk->abhts", q, k) * factor
  slope: jax.Array | float = factor
  if scores.softcap:
    share = jnp.tanh(s / scores.softcap)
    s, slope = scores.softcap * share, factor * (1 - share**2)
  return jnp.where(mask, s, -jnp.inf), slope


def _finite(max_):
  """0 while no key has been seen: exp(-inf - 0) is 0, not NaN."""
  return jnp.where(max_ == -jnp.inf, 0, max_)


def _wide(x):
  return jnp.promote_types(x.dtype, jnp.float32)


def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """An einsum that accumulates in float32 or wider."""
  return jnp.einsum(spec, a, b, preferred_element_type=_wide(a))


def scale(q: jax.Array, scores: Scores) -> np.ndarray:
  """The factor of the queries: that of the scores, or 1 if it would round them.

  In 16 bits, queries are scaled by powers of 2 exactly; by others, such as
  1 / sqrt(32), the log-sum-exp would be off by 0.005.
  """
  is_narrow = q.dtype.itemsize == 2
  return np.asarray(1 if is_narrow else scores.factor(q.shape[-1]), q.dtype)
