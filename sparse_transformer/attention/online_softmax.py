"""Attention step by step: the loop of the executors in plain XLA.

Tiles have three leading axes, such as A (tiles computed together), B (batch)
and H (heads), in any order: queries [A, B, H, T, K], scores [A, B, H, T, S].

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
from jax import Array, lax

from sparse_transformer.attention.contract import Keys, Queries, Scores
from sparse_transformer.attention.orders import apply
from sparse_transformer.patterns import Pattern

Arrays = tuple[Array, ...]
Running = tuple[Array, Array, Array]
Softmax = tuple[Array, Array]  # (out, lse)
Pairs = tuple[Array, Array | None]  # and their weights; None if all are 1


class Steps(abc.ABC):
  """The tiles that meet, and their places in arrays [B, L, H, ...].

  The i-th group of query tiles has steps of numbers j. The loop runs on arrays
  in the form that `of_queries` and `of_keys` give them.
  """

  num: int  # number of groups
  single: bool = False  # whether every group has one step, whose number is i
  skips: bool = False  # whether to skip what has no pairs within segments
  spans: Any = ()  # the spans that determine the weights of pairs, if learned

  def bounds(self, i: Array) -> tuple[Array, Array]:
    """The first step of a group, and the one after its last."""
    raise NotImplementedError("groups have a single step")

  def of_queries(self, *arrays: Array) -> Arrays:
    """Arrays of queries, in the form that `queries` reads."""
    return arrays

  def of_keys(self, *arrays: Array) -> Arrays:
    """Arrays of keys, in the form that `keys` reads and `add` changes."""
    return arrays

  def from_queries(self, *arrays: Array) -> Arrays:
    """[B, L, H, ...] from arrays that `put` filled with gradients."""
    return arrays

  def from_keys(self, *arrays: Array) -> Arrays:
    """Undoes `of_keys`, of gradients."""
    return arrays

  def merge(self, out: Array, lse: Array) -> Arrays:
    """(out_BLHE, lse_BLH) from arrays that `put` filled with results."""
    return self.from_queries(out, lse)

  @abc.abstractmethod
  def queries(self, i: Array, *arrays: Array) -> Arrays:
    """The query tiles of a group, from arrays of queries."""

  @abc.abstractmethod
  def keys(self, i: Array, j: Array, *arrays: Array) -> Arrays:
    """The key tiles of a step, from arrays of keys."""

  @abc.abstractmethod
  def pairs(self, i: Array, j: Array) -> Pairs:
    """The pairs of a step; no weight in the mask is 0."""

  def spans_gradient(self, i: Array, j: Array, dm: Array) -> Any:
    """The gradients of `spans`, from the gradients of a step's weights."""
    return ()

  def shape(self, q: Array) -> tuple[int, ...]:
    """The shape of results, without their width, which `put` takes."""
    return q.shape[:-1]

  @abc.abstractmethod
  def put(self, i: Array, x: Array, new: Array) -> Array:
    """x, an array of results, with a group's results put in."""

  @abc.abstractmethod
  def add(self, i: Array, j: Array, x: Array, new: Array) -> Array:
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
    tile = mine.q * _scale(q, scores)
    out = jnp.zeros_like(tile, _wide(q), (*tile.shape[:-1], width))
    nothing = out, jnp.full_like(out[..., :1], -jnp.inf), out[..., :1]

    def step(j, state=None):
      others = apply(functools.partial(steps.keys, i, j), keys)
      pairs = _within_segments(steps.pairs(i, j), mine, others)
      new = _unless_empty(
        steps,
        pairs,
        lambda: _softmax_of_tile(tile, others, pairs, scores),
        nothing,
      )
      return new if state is None else _combine(state, new)

    if steps.single:
      state = step(i)
    else:
      state = lax.fori_loop(*steps.bounds(i), step, nothing)
    (out_done, lse_done), (out, lse) = done, _finish(*state)
    return steps.put(i, out_done, out), steps.put(i, lse_done, lse[..., 0])

  shape = steps.shape(queries.q)
  out = jnp.zeros_like(q, _wide(q), (*shape, width))
  nothing = out, jnp.full_like(q, -jnp.inf, _wide(q), shape)
  results = lax.fori_loop(0, steps.num, of_group, nothing)
  out, lse = steps.merge(*results)
  return out, lse


def backward(
  steps: Steps, queries: Queries, keys: Keys, scores: Scores
) -> tuple[Array, ...]:
  """(dq, dk, dv, gradients of the spans), with weights relative to lse."""
  queries = apply(steps.of_queries, queries)
  keys = apply(steps.of_keys, keys)

  def of_group(i, done):
    dq_done, *others = done
    mine = apply(functools.partial(steps.queries, i), queries)
    q, dout = mine.q * _scale(mine.q, scores), mine.dout
    # Before any product: the compiler would transpose within each, and one
    # whose left side is transposed runs at half the rate.
    q_T, dout_T = lax.optimization_barrier(
      (q.swapaxes(-1, -2), dout.swapaxes(-1, -2))
    )

    def gradients(i, j, tile, pairs):
      """(dq, dk, dv, gradients of the spans) of a step."""
      mask, m = pairs
      s, slope = _scores(q, tile.k, mask, scores)
      p = jnp.exp(s - mine.lse[..., None])
      dp = _dot("abhte,abhse->abhts", dout, tile.v).astype(p.dtype)
      dp = p * (dp - mine.delta[..., None])
      dspans: Any = ()
      if m is not None:  # p may be above 1 where m is below
        dspans = steps.spans_gradient(i, j, dp)
        p, dp = m * p, m * dp
      ds = (dp * slope).astype(q.dtype)
      p = p.astype(q.dtype)
      new_dv = _dot("abhet,abhts->abhes", dout_T, p).swapaxes(-1, -2)
      new_dk = _dot("abhkt,abhts->abhks", q_T, ds).swapaxes(-1, -2)
      new_dv = new_dv.astype(dp.dtype)  # that of values, until here
      return _dot("abhts,abhsk->abhtk", ds, tile.k), new_dk, new_dv, dspans

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
    dq = dq * _scale(q, scores).astype(dq.dtype)
    return steps.put(i, dq_done, dq), *others

  q = queries.q
  nothing = (
    jnp.zeros_like(q, _wide(q), (*steps.shape(q), q.shape[-1])),
    *(jnp.zeros_like(x, _wide(q)) for x in keys[:2]),
    jax.tree.map(jnp.zeros_like, steps.spans),
  )
  dq, dk, dv, dspans = lax.fori_loop(0, steps.num, of_group, nothing)
  grads = *steps.from_queries(dq), *steps.from_keys(dk, dv)
  return *grads, *jax.tree.leaves(dspans)


def _within_segments(pairs, queries, keys):
  """The pairs of a step whose query and key have the same segment."""
  mask, weights = pairs
  if queries.segments is not None:
    same = queries.segments[..., None] == keys.segments[..., None, :]
    mask = mask & same
  return mask, weights


def _unless_empty(steps, pairs, compute, nothing):
  """compute(), or `nothing` where segments leave no pairs to compute."""
  if not steps.skips:
    return compute()
  return lax.cond(pairs[0].any(), compute, lambda: nothing)


def pairs(pattern: Pattern, q_at: Array, k_at: Array) -> Array:
  """Pairs [..., T, S] at positions [..., T] and [..., S], -1 for padding."""
  q_at, k_at = q_at[..., None], k_at[..., None, :]
  return pattern.mask(q_at, k_at) & (q_at >= 0) & (k_at >= 0)


def _softmax_of_tile(q, keys, pairs, scores):
  """The running softmax over one tile of keys; q is scaled."""
  mask, weights = pairs
  s, _ = _scores(q, keys.k, mask, scores)
  if weights is not None:
    s = s + jnp.log(jnp.where(weights > 0, weights, 1))
  max_ = s.max(-1, keepdims=True)
  p = jnp.exp(s - _finite(max_))
  out = _dot("abhts,abhse->abhte", p.astype(keys.v.dtype), keys.v)
  return out.astype(p.dtype), max_, p.sum(-1, keepdims=True)


def softmax(q: Array, keys: Keys, pairs: Pairs, scores: Scores) -> Softmax:
  """(out, lse) of queries over one tile of keys."""
  q = q * _scale(q, scores)
  return _finish(*_softmax_of_tile(q, keys, pairs, scores))


def _combine(first: Running, second: Running) -> Running:
  """The running softmax over the keys of both."""
  (out_1, max_1, sum_1), (out_2, max_2, sum_2) = first, second
  max_ = jnp.maximum(max_1, max_2)
  decay_1, decay_2 = (jnp.exp(m - _finite(max_)) for m in (max_1, max_2))
  out = out_1 * decay_1 + out_2 * decay_2
  return out, max_, sum_1 * decay_1 + sum_2 * decay_2


def _finish(out: Array, max_: Array, sum_: Array) -> Softmax:
  """(out, log-sum-exp) of a running softmax: 0 and -inf without any keys."""
  return out / jnp.where(sum_ == 0, 1, sum_), _log_sum(max_, sum_)


def _log_sum(max_, sum_):
  """The log-sum-exp, -inf for a sum of 0, where log has no derivative."""
  lse = max_ + jnp.log(jnp.where(sum_ == 0, 1, sum_))
  return jnp.where(sum_ == 0, -jnp.inf, lse)


def merge(*results: Softmax) -> Softmax:
  """(out [..., E], lse [...]) over all keys, from those over disjoint sets."""
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


def add_sinks(out_BLHE: Array, lse_BLH: Array, sinks_H: Array) -> Softmax:
  """The results with a sink, a key whose score is given and whose value is 0.

  Source: Xiao et al. 2023, arXiv 2309.17453, section 3.3, with a value of 0.
  """
  sinks = jnp.broadcast_to(sinks_H.astype(lse_BLH.dtype), lse_BLH.shape)
  is_none = (lse_BLH == -jnp.inf) & (sinks == -jnp.inf)
  sinks = jnp.where(is_none, 0, sinks)  # the difference would be NaN
  share = jax.nn.sigmoid(lse_BLH - sinks)[..., None]
  out = (out_BLHE.astype(lse_BLH.dtype) * share).astype(out_BLHE.dtype)
  return out, jnp.where(is_none, -jnp.inf, jnp.logaddexp(lse_BLH, sinks))


def _scores(q, k, mask, scores):
  """(The scores, -inf outside the mask; their slope as a function of q k^T)."""
  # What `_scale` leaves.
  factor = scores.factor(q.shape[-1]) if q.dtype.itemsize == 2 else 1.0
  s = _dot("abhtk,abhsk->abhts", q, k) * factor
  slope: Array | float = factor
  if scores.softcap:
    share = jnp.tanh(s / scores.softcap)
    s, slope = scores.softcap * share, factor * (1 - share**2)
  return jnp.where(mask, s, -jnp.inf), slope


def _finite(max_):
  """0 while no key has been seen: exp(-inf - 0) is 0, not NaN."""
  return jnp.where(max_ == -jnp.inf, 0, max_)


def _wide(x):
  return np.promote_types(x.dtype, np.float32)


def _dot(spec, a, b):
  """An einsum that accumulates in float32 or wider."""
  return jnp.einsum(spec, a, b, preferred_element_type=_wide(a))


def _scale(q, scores):
  """The factor of the queries: the scores', or 1 if it would round them.

  With queries scaled by 1 / sqrt(32) in 16 bits, lse would be off by 0.005.
  """
  is_narrow = q.dtype.itemsize == 2
  return np.asarray(1 if is_narrow else scores.factor(q.shape[-1]), q.dtype)
