"""Attention as a loop over tiles, for the backends in plain XLA.

An outer loop runs over groups of query tiles. An inner loop runs over the steps
of a group; in each step, the group meets some of its key tiles. In the forward
pass, the inner loop carries a running softmax (Dao et al. 2022, arXiv
2205.14135, section 3.1). In the backward pass, it carries the gradients, and
recomputes weights from the final log-sum-exp.

Tiles have three leading axes in any order, for example A (tiles that are
computed together), B (batch) and H (heads). In this example, queries have shape
[A, B, H, T, K]. Scores have shape [A, B, H, T, S] in the forward pass, and
[A, B, H, S, T] in the backward pass.
"""

import abc
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from sparse_transformer.attention.contract import Keys, Queries, Scores
from sparse_transformer.patterns import Pattern

Softmax = tuple[Array, Array]  # (out, lse)


class Running(NamedTuple):
  """A softmax over the keys that have been processed so far."""

  accumulator: Array  # the weighted sum of values [A, B, H, T, E]
  maximum: Array  # the largest score, [A, B, H, T, 1]
  normalizer: Array  # the sum of exp(score - maximum), [A, B, H, T, 1]


class TileLoop(abc.ABC):
  """Says which query tiles meet which key tiles, and where they are stored.

  Index i is the index of a group of query tiles, and j the index of a step. The
  loop runs on arrays that `arrange_queries` and `arrange_keys` return.
  Arguments named `arrays` are pytrees of arrays, and methods that take them
  return the same structure.

  Attributes:
    num: number of groups.
    pattern: the pattern, whose `mask` is applied to positions.
    single: whether every group has only one step, with index j = i. The inner
      loop and the running softmax are then omitted.
    dbias: the initial gradient of the bias, zeros; () if there is no bias.
    skips: whether to skip steps that have no pairs within segments.
  """

  num: int
  pattern: Pattern
  single: bool = False
  dbias: Any = ()
  skips: bool = False

  def bounds(self, i: Array) -> tuple[Array, Array]:
    """Returns the first step of a group, and the step after its last."""
    raise NotImplementedError("groups have a single step")

  def arrange_queries(self, arrays: Any) -> Any:
    """Converts arrays of queries to the form that `queries` reads."""
    return arrays

  def arrange_keys(self, arrays: Any) -> Any:
    """Converts arrays of keys to the form that `keys` and `add` use."""
    return arrays

  def restore_queries(self, arrays: Any) -> Any:
    """Converts gradients that `put` has stored to [B, L, H, ...]."""
    return arrays

  def restore_keys(self, arrays: Any) -> Any:
    """Undoes `arrange_keys` for gradients, which are summed for each key."""
    return arrays

  def merge(self, out: Array, lse: Array) -> Softmax:
    """Converts results that `put` has stored to (out_BLHE, lse_BLH)."""
    return self.restore_queries((out, lse))

  @abc.abstractmethod
  def queries(self, i: Array, arrays: Any) -> Any:
    """Returns the query tiles of a group, from arrays of queries."""

  @abc.abstractmethod
  def keys(self, i: Array, j: Array, arrays: Any) -> Any:
    """Returns the key tiles of a step, from arrays of keys."""

  @abc.abstractmethod
  def positions(self, i: Array, j: Array) -> tuple[Array, Array]:
    """Returns the positions of a step's queries and of its keys.

    They broadcast to [A, B, H, T] and [A, B, H, S]. Position -1 is padding,
    which has no pairs.
    """

  def bias(self, i: Array, j: Array) -> Array | None:
    """Returns the bias of a step's scores, [A, B, H, T, S], or None.

    An axis may have size 1 if the bias is the same along it, as it is along the
    batch axis.
    """
    return None

  def add_bias(
    self,
    i: Array,
    j: Array,
    dbias: Any,
    ds: Array,
  ) -> Any:
    """Returns `dbias` plus the gradients of a step's scores.

    `ds` is transposed, [A, B, H, S, T].
    """
    return dbias

  def shape(self, q: Array) -> tuple[int, ...]:
    """Returns the shape of results that `put` stores, without their width."""
    return q.shape[:-1]

  @abc.abstractmethod
  def put(
    self,
    i: Array,
    x: Array,
    new: Array,
  ) -> Array:
    """Returns x, an array of results, with the results of a group stored."""

  @abc.abstractmethod
  def add(
    self,
    i: Array,
    j: Array,
    x: Array,
    new: Array,
  ) -> Array:
    """Returns x, gradients of keys or values, plus the gradients of a step."""


def forward(
  loop: TileLoop,
  queries: Queries,
  keys: Keys,
  scores: Scores,
) -> Softmax:
  """Computes attention for all queries, with an online softmax over steps.

  Args:
    loop: the tiles that meet.
    queries: arrays [B, L, H, ...].
    keys: arrays [B, M, G, ...].
    scores: how scores are computed from products.

  Returns:
    out_BLHE and lse_BLH, in float32 or wider. A query without keys gets 0 and
    -inf.
  """
  dtype = _wide(queries.q)
  queries = loop.arrange_queries(queries)
  keys = loop.arrange_keys(keys)
  value_width = keys.v.shape[-1]

  def run_group(i, results):
    group = loop.queries(i, queries)
    # Scaling the queries once is cheaper than scaling the scores, which are far
    # more.
    q = group.q * _scale(group.q, scores)

    zeros = jnp.zeros_like(q, dtype, (*q.shape[:-1], value_width))
    normalizer = zeros[..., :1]
    maximum = jnp.full_like(normalizer, -jnp.inf)
    empty = Running(zeros, maximum, normalizer)

    def run_step(j):
      tile = loop.keys(i, j, keys)
      pairs = _pairs(loop, i, j, group, tile, transposed=False)
      run_tile = lambda: _softmax_of_tile(
        q, tile, pairs, scores, loop.bias(i, j)
      )
      return _unless_empty(loop, pairs, run_tile, empty)

    if loop.single:
      running = run_step(i)
    else:
      first, end = loop.bounds(i)
      add_step = lambda j, running: _combine(running, run_step(j))
      running = lax.fori_loop(first, end, add_step, empty)

    # XLA updates the carry of a loop in place, so results are not copied.
    all_out, all_lse = results
    out, lse = _finish(running)
    all_out = loop.put(i, all_out, out)
    all_lse = loop.put(i, all_lse, lse[..., 0])
    return all_out, all_lse

  # The carry is made by `zeros_like` an input, so that it varies over the same
  # mesh axes as the input, which `jax.shard_map` requires.
  q = queries.q
  shape = loop.shape(q)
  results = (
    jnp.zeros_like(q, dtype, (*shape, value_width)),
    jnp.full_like(q, -jnp.inf, dtype, shape),
  )
  all_out, all_lse = lax.fori_loop(0, loop.num, run_group, results)
  return loop.merge(all_out, all_lse)


def backward(
  loop: TileLoop,
  queries: Queries,
  keys: Keys,
  scores: Scores,
) -> tuple[Array, ...]:
  """Computes the gradients of all arrays, with weights from `queries.lse`.

  Each step recomputes its weights, p = exp(s - lse). These are final, so no
  running maximum is needed, and steps only add to the gradients.

  Args:
    loop: the tiles that meet.
    queries: arrays [B, L, H, ...], with dout, lse and delta.
    keys: arrays [B, M, G, ...].
    scores: how scores are computed from products.

  Returns:
    dq_BLHK, dk_BMGK and dv_BMGE, in float32 or wider, and the gradient of the
    bias if there is one.
  """
  dtype = _wide(queries.q)
  queries = loop.arrange_queries(queries)
  keys = loop.arrange_keys(keys)

  def run_group(i, sums):
    all_dq, dk, dv, dbias = sums
    group = loop.queries(i, queries)
    group = group._replace(q=group.q * _scale(group.q, scores))

    # Steps sum dq in transposed form, see `_gradients_of_tile`. The sum is
    # transposed back once, after the last step.
    zeros_ABHKT = jnp.zeros_like(group.q.swapaxes(-1, -2), dtype)

    def run_step(j, sums):
      dq_ABHKT, dk, dv, dbias = sums
      tile = loop.keys(i, j, keys)
      pairs = _pairs(loop, i, j, group, tile, transposed=True)

      def run_tile():
        grads, ds = _gradients_of_tile(
          group,
          tile,
          pairs,
          scores,
          loop.bias(i, j),
        )
        return grads, loop.add_bias(i, j, dbias, ds)

      zeros_of_keys = (jnp.zeros_like(x, dtype) for x in (tile.k, tile.v))
      empty = (zeros_ABHKT, *zeros_of_keys), dbias

      grads, new_dbias = _unless_empty(loop, pairs, run_tile, empty)
      new_dq_ABHKT, new_dk, new_dv = grads
      dk = loop.add(i, j, dk, new_dk)
      dv = loop.add(i, j, dv, new_dv)
      return dq_ABHKT + new_dq_ABHKT, dk, dv, new_dbias

    # dq is complete after the steps of its group. dk and dv accumulate over all
    # groups, which therefore run one after another.
    sums = zeros_ABHKT, dk, dv, dbias
    if loop.single:
      sums = run_step(i, sums)
    else:
      first, end = loop.bounds(i)
      sums = lax.fori_loop(first, end, run_step, sums)
    dq_ABHKT, dk, dv, dbias = sums

    # Scaling the queries has already scaled dk, but not dq.
    dq = dq_ABHKT.swapaxes(-1, -2)
    dq = dq * _scale(group.q, scores).astype(dq.dtype)
    return loop.put(i, all_dq, dq), dk, dv, dbias

  q = queries.q
  zeros = (
    jnp.zeros_like(q, dtype, (*loop.shape(q), q.shape[-1])),
    jnp.zeros_like(keys.k, dtype),
    jnp.zeros_like(keys.v, dtype),
    loop.dbias,
  )
  dq, dk, dv, dbias = lax.fori_loop(0, loop.num, run_group, zeros)
  dq = loop.restore_queries(dq)
  dk, dv = loop.restore_keys((dk, dv))
  return dq, dk, dv, *jax.tree.leaves(dbias)


def _pairs(loop, i, j, queries, keys, transposed):
  """Returns a mask of the pairs of a step, within segments.

  Masks are computed from positions even in full tiles, because steps have no
  separate branch for full tiles.

  Args:
    loop: the tiles that meet.
    i, j: the indices of the group and of the step.
    queries, keys: the tiles of the step.
    transposed: whether keys come before queries.

  Returns:
    Booleans that broadcast to [A, B, H, T, S], or to [A, B, H, S, T] if
    `transposed`.
  """

  def across(of_queries, of_keys):
    """Makes numbers of queries, and of keys, broadcast to all pairs."""
    if transposed:
      return of_queries[..., None, :], of_keys[..., None]
    return of_queries[..., None], of_keys[..., None, :]

  q_at, k_at = across(*loop.positions(i, j))
  pairs = loop.pattern.mask(q_at, k_at)
  pairs &= q_at >= 0
  pairs &= k_at >= 0

  if queries.segments is not None:
    of_query, of_key = across(
      queries.segments,
      keys.segments,
    )
    pairs &= of_query == of_key

  # Without this barrier, the compiler for CPUs would compute the mask again for
  # each head, and for each loop over scores that reads it.
  return lax.optimization_barrier(pairs)


def _unless_empty(loop, pairs, compute, empty):
  """Returns compute(), or `empty` if no pairs are within segments."""
  # A branch prevents XLA from fusing across it, so it is used only where
  # skipping may be worth that.
  if not loop.skips:
    return compute()
  return lax.cond(pairs.any(), compute, lambda: empty)


def _softmax_of_tile(q, keys, pairs, scores, bias):
  """Computes the softmax over one tile of keys, to be combined with others.

  Args:
    q: tiles of queries [A, B, H, T, K], scaled by `_scale`.
    keys: tiles of keys and values, [A, B, H, S, ...].
    pairs: the mask of pairs, which broadcasts to [A, B, H, T, S].
    scores: how scores are computed from products.
    bias: the bias that is added to scores, or None.
  """
  s, _ = _scores(q, keys.k, pairs, scores, bias)

  maximum = s.max(-1, keepdims=True)
  p = jnp.exp(s - _finite(maximum))
  normalizer = p.sum(-1, keepdims=True)

  # The product uses weights that are rounded to the dtype of the values. The
  # normalizer sums the weights before rounding.
  v = keys.v
  out = _dot("abhts,abhse->abhte", p.astype(v.dtype), v)
  out = out.astype(p.dtype)
  return Running(out, maximum, normalizer)


def _gradients_of_tile(queries, keys, pairs, scores, bias):
  """Computes the gradients of a step, from scaled queries.

  Scores are computed in transposed form, [A, B, H, S, T]. Otherwise, the
  compiler for CPUs would transpose the scores in the products for dk and dv, or
  the results of these products. The product for dq would need the gradients of
  scores in the other form. Therefore, the transpose of dq is computed, for
  which only the keys are transposed.

  Args:
    queries: the tiles of a group.
    keys: the tiles of keys of the step.
    pairs: the mask of pairs, which broadcasts to [A, B, H, S, T].
    scores: how scores are computed from products.
    bias: the bias that is added to scores, [A, B, H, T, S], or None.

  Returns:
    (gradients, ds). The gradients are those of the queries, [A, B, H, K, T], of
    the keys, [A, B, H, S, K], and of the values, [A, B, H, S, E]. ds are those
    of the scores, [A, B, H, S, T].
  """
  if bias is not None:
    bias = bias.swapaxes(-1, -2)

  s, slope = _scores(keys.k, queries.q, pairs, scores, bias)
  lse = queries.lse[..., None, :]
  delta = queries.delta[..., None, :]
  p = jnp.exp(s - lse)

  # The gradients of the scores, through the softmax: ds = p (dout v^T - delta).
  dp = _dot("abhse,abhte->abhst", keys.v, queries.dout)
  dp = dp.astype(p.dtype)
  ds = p * (dp - delta)

  # The gradients of the products, before the soft cap and the bias.
  dtype = queries.q.dtype
  p = p.astype(dtype)
  dproducts = ds * slope
  dproducts = dproducts.astype(dtype)
  dv = _dot("abhst,abhte->abhse", p, queries.dout)
  dk = _dot("abhst,abhtk->abhsk", dproducts, queries.q)
  k_ABHKS = keys.k.swapaxes(-1, -2)
  dq_ABHKT = _dot("abhks,abhst->abhkt", k_ABHKS, dproducts)
  return (dq_ABHKT, dk, dv), ds


def softmax(
  q: Array,
  keys: Keys,
  pairs: Array,
  scores: Scores,
  bias: Array | None = None,
) -> Softmax:
  """Computes (out, lse) of queries over one tile of keys."""
  q = q * _scale(q, scores)
  return _finish(_softmax_of_tile(q, keys, pairs, scores, bias))


def _combine(first: Running, second: Running) -> Running:
  """Combines two softmaxes, by rescaling their sums to one maximum."""
  maximum = jnp.maximum(first.maximum, second.maximum)
  decay_1 = jnp.exp(first.maximum - _finite(maximum))
  decay_2 = jnp.exp(second.maximum - _finite(maximum))
  accumulator = first.accumulator * decay_1 + second.accumulator * decay_2
  normalizer = first.normalizer * decay_1 + second.normalizer * decay_2
  return Running(accumulator, maximum, normalizer)


def _finish(running: Running) -> Softmax:
  """Returns (out, lse) of a running softmax; 0 and -inf without keys."""
  accumulator, maximum, normalizer = running
  out = accumulator / jnp.where(normalizer == 0, 1, normalizer)
  return out, _log_sum(maximum, normalizer)


def _log_sum(maximum, normalizer):
  """Returns the log-sum-exp, or -inf if the sum is 0, without NaN gradients."""
  # Sums of 0 are replaced by 1, because the gradient of log(0) is infinite, and
  # 0 times infinity is NaN.
  is_empty = normalizer == 0
  lse = maximum + jnp.log(jnp.where(is_empty, 1, normalizer))
  return jnp.where(is_empty, -jnp.inf, lse)


def merge(results: Sequence[Softmax]) -> Softmax:
  """Merges softmaxes over disjoint sets of keys into the one over all keys.

  The result is exact: lse is the log of the sum of exp(lse_i), and out is the
  sum of exp(lse_i - lse) out_i.

  Args:
    results: (out [..., E], lse [...]) of each set, at least one.

  Returns:
    (out, lse) over the union of the sets; 0 and -inf for a query that has no
    keys in any set.
  """
  if len(results) == 1:
    return results[0]

  lses = [lse for _, lse in results]
  maximum = functools.reduce(jnp.maximum, lses)
  terms = [jnp.exp(x - _finite(maximum)) for x in lses]
  normalizer = functools.reduce(jnp.add, terms)
  lse = _log_sum(maximum, normalizer)

  # Each result is multiplied by its weight, instead of dividing the sum at the
  # end.
  weighted = []
  for out_of_set, lse_of_set in results:
    weight = jnp.exp(lse_of_set - _finite(lse))
    weighted.append(weight[..., None] * out_of_set)
  out = functools.reduce(jnp.add, weighted)
  return out, lse


def add_sinks(
  out_BLHE: Array,
  lse_BLH: Array,
  sinks_H: Array,
) -> Softmax:
  """Adds a sink to results: a key with a given score and a value of 0.

  The other keys keep a share of exp(lse) / (exp(lse) + exp(sink)) of the
  weight. This share is sigmoid(lse - sink).

  Source: Xiao et al. 2023, arXiv 2309.17453, section 3.3, for a value of 0.

  Args:
    out_BLHE: outputs without sinks.
    lse_BLH: log-sum-exps without sinks, in nats.
    sinks_H: the score of each head's sink, in nats; -inf for no sink.

  Returns:
    (out_BLHE, lse_BLH) with sinks, in the dtypes of the arguments.
  """
  sinks = sinks_H.astype(lse_BLH.dtype)
  sinks = jnp.broadcast_to(sinks, lse_BLH.shape)
  is_empty = (lse_BLH == -jnp.inf) & (sinks == -jnp.inf)
  sinks = jnp.where(is_empty, 0, sinks)  # the difference would be NaN

  weight = jax.nn.sigmoid(lse_BLH - sinks)
  out = out_BLHE.astype(lse_BLH.dtype)
  out = out * weight[..., None]
  lse = jnp.logaddexp(lse_BLH, sinks)
  lse = jnp.where(is_empty, -jnp.inf, lse)
  return out.astype(out_BLHE.dtype), lse


def _scores(rows, columns, mask, scores, bias):
  """Returns scores of a tile, and their derivatives by the products.

  Args:
    rows, columns: the scaled queries and the keys; or, for transposed scores,
      the keys and the scaled queries.
    mask: a boolean mask of the pairs, in the same form as the scores.
    scores: how scores are computed from products.
    bias: the bias that is added after the soft cap, in the same form, or None.

  Returns:
    (s, slope). s are the scores, which are -inf outside the mask. slope is the
    derivative of each score by its product, or a single number if there is no
    soft cap.
  """
  # The factor that `_scale` has not yet applied.
  is_narrow = rows.dtype.itemsize == 2
  factor = scores.factor(rows.shape[-1]) if is_narrow else 1.0
  s = _dot("abhmk,abhnk->abhmn", rows, columns) * factor
  slope: Array | float = factor
  if scores.softcap:
    ratio = jnp.tanh(s / scores.softcap)
    s = scores.softcap * ratio
    slope = factor * (1 - ratio**2)

  if bias is not None:
    s = s + bias
  # The mask comes last, because the soft cap would turn -inf into -c, and
  # thereby include the pair.
  return jnp.where(mask, s, -jnp.inf), slope


def _finite(maximum):
  """Replaces -inf by 0, so that exp(-inf - 0) is 0 rather than NaN."""
  return jnp.where(maximum == -jnp.inf, 0, maximum)


def _wide(x):
  return np.promote_types(x.dtype, np.float32)


def _dot(spec, a, b):
  """Computes an einsum that accumulates in float32, or in the dtype of `a`.

  The wider of the two is also the dtype of the result.
  """
  return jnp.einsum(spec, a, b, preferred_element_type=_wide(a))


def _scale(q, scores):
  """Returns the factor by which queries are multiplied.

  This is the factor of the scores. For 16-bit dtypes, it is 1, and the scores
  are scaled instead, because scaling 16-bit queries would round them. With a
  scale of 1 / sqrt(32), for example, lse would be off by 0.005.
  """
  is_narrow = q.dtype.itemsize == 2
  factor = 1 if is_narrow else scores.factor(q.shape[-1])
  return np.asarray(factor, q.dtype)
