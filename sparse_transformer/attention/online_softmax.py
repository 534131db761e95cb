"""Attention step by step: the loop of the backends in plain XLA.

An outer loop runs over groups of query tiles, an inner one over the steps in
which a group meets its tiles of keys. Forward, the inner loop carries a running
softmax (Dao et al. 2022, arXiv 2205.14135, section 3.1); backward, it carries
the gradients, whose weights are relative to the final log-sum-exp.

Tiles have three leading axes, such as A (tiles computed together), B (batch)
and H (heads), in any order: queries [A, B, H, T, K], scores [A, B, H, T, S].
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
  """A softmax over the keys that have been seen."""

  accumulator: Array  # the weighted sum of values [A, B, H, T, E]
  maximum: Array  # of the scores, [A, B, H, T, 1]
  normalizer: Array  # the sum of exp(score - maximum), [A, B, H, T, 1]


class TileLoop(abc.ABC):
  """The tiles that meet, and their places in arrays [B, L, H, ...].

  The i-th group of query tiles has steps of numbers j. The loop runs on arrays
  as `arrange_queries` and `arrange_keys` give them. Arguments named `arrays`
  are pytrees of arrays, and methods return the same structure.

  Attributes:
    num: number of groups.
    single: whether every group has one step, whose number is i. The inner loop
      and the running softmax are then left out.
    dbias: zeros like the bias, if there is one.
    skips: whether to skip what has no pairs within segments.
  """

  num: int
  single: bool = False
  dbias: Any = ()
  skips: bool = False

  def bounds(self, i: Array) -> tuple[Array, Array]:
    """The first step of a group, and the one after its last."""
    raise NotImplementedError("groups have a single step")

  def arrange_queries(self, arrays: Any) -> Any:
    """Arrays of queries, in the form that `queries` reads."""
    return arrays

  def arrange_keys(self, arrays: Any) -> Any:
    """Arrays of keys, in the form that `keys` reads and `add` changes."""
    return arrays

  def restore_queries(self, arrays: Any) -> Any:
    """[B, L, H, ...] from arrays that `put` filled with gradients."""
    return arrays

  def restore_keys(self, arrays: Any) -> Any:
    """Undoes `arrange_keys`, of gradients."""
    return arrays

  def merge(self, out: Array, lse: Array) -> Softmax:
    """(out_BLHE, lse_BLH) from arrays that `put` filled with results."""
    return self.restore_queries((out, lse))

  @abc.abstractmethod
  def queries(self, i: Array, arrays: Any) -> Any:
    """The query tiles of a group, from arrays of queries."""

  @abc.abstractmethod
  def keys(self, i: Array, j: Array, arrays: Any) -> Any:
    """The key tiles of a step, from arrays of keys."""

  @abc.abstractmethod
  def pairs(self, i: Array, j: Array) -> Array:
    """The pairs of a step, booleans."""

  def bias(self, i: Array, j: Array) -> Array | None:
    """What is added to the scores of a step, [A, B, H, T, S]; None if nothing.

    The batch may be 1, as may any axis of which all members share a bias.
    """
    return None

  def add_bias(
    self,
    i: Array,
    j: Array,
    dbias: Any,
    ds: Array,
  ) -> Any:
    """dbias, with the gradients of a step's scores, `ds`, added to it."""
    return dbias

  def shape(self, q: Array) -> tuple[int, ...]:
    """The shape of results, without their width, which `put` takes."""
    return q.shape[:-1]

  @abc.abstractmethod
  def put(
    self,
    i: Array,
    x: Array,
    new: Array,
  ) -> Array:
    """x, an array of results, with a group's results put in."""

  @abc.abstractmethod
  def add(
    self,
    i: Array,
    j: Array,
    x: Array,
    new: Array,
  ) -> Array:
    """x, an array of keys, with the results of a step added to it."""


def forward(
  loop: TileLoop,
  queries: Queries,
  keys: Keys,
  scores: Scores,
) -> Softmax:
  """Attention of all queries, with an online softmax over steps.

  Args:
    loop: which tiles meet.
    queries: arrays [B, L, H, ...].
    keys: arrays [B, M, G, ...].
    scores: how scores follow from products.

  Returns:
    out_BLHE and lse_BLH, in float32 or wider: 0 and -inf without keys.
  """
  dtype = _wide(queries.q)
  queries = loop.arrange_queries(queries)
  keys = loop.arrange_keys(keys)
  value_width = keys.v.shape[-1]

  def run_group(i, results):
    group = loop.queries(i, queries)
    # Queries are scaled once for all keys: scores are many more.
    q = group.q * _scale(group.q, scores)

    zeros = jnp.zeros_like(q, dtype, (*q.shape[:-1], value_width))
    normalizer = zeros[..., :1]
    maximum = jnp.full_like(normalizer, -jnp.inf)
    empty = Running(zeros, maximum, normalizer)

    def run_step(j):
      tile = loop.keys(i, j, keys)
      pairs = _within_segments(loop.pairs(i, j), group, tile)
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

    # XLA updates the carry of a loop in place: results are not copied.
    all_out, all_lse = results
    out, lse = _finish(running)
    all_out = loop.put(i, all_out, out)
    all_lse = loop.put(i, all_lse, lse[..., 0])
    return all_out, all_lse

  # `zeros_like` an input, so that the carry varies over the mesh axes that the
  # input does, as `jax.shard_map` demands.
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
  """The gradients of all arrays, with weights relative to `queries.lse`.

  Each step recomputes its weights, p = exp(s - lse), which are final at once:
  there is no running maximum, and steps only add.

  Args:
    loop: which tiles meet.
    queries: arrays [B, L, H, ...], with dout, lse and delta.
    keys: arrays [B, M, G, ...].
    scores: how scores follow from products.

  Returns:
    dq_BLHK, dk_BMGK and dv_BMGE, in float32 or wider, and the gradient of a
    bias, if there is one.
  """
  dtype = _wide(queries.q)
  queries = loop.arrange_queries(queries)
  keys = loop.arrange_keys(keys)

  def run_group(i, sums):
    all_dq, dk, dv, dbias = sums
    group = loop.queries(i, queries)
    group = group._replace(q=group.q * _scale(group.q, scores))

    # Before any product: the compiler would transpose within each, and one
    # whose left side is transposed runs at half the rate.
    q_T = group.q.swapaxes(-1, -2)
    dout_T = group.dout.swapaxes(-1, -2)
    transposed = lax.optimization_barrier((q_T, dout_T))

    def run_step(j, sums):
      dq, dk, dv, dbias = sums
      tile = loop.keys(i, j, keys)
      pairs = _within_segments(loop.pairs(i, j), group, tile)

      def run_tile():
        grads, ds = _gradients_of_tile(
          group,
          transposed,
          tile,
          pairs,
          scores,
          loop.bias(i, j),
        )
        return grads, loop.add_bias(i, j, dbias, ds)

      zeros = tuple(jnp.zeros_like(x, dtype) for x in (group.q, tile.k, tile.v))
      empty = zeros, dbias

      grads, new_dbias = _unless_empty(loop, pairs, run_tile, empty)
      new_dq, new_dk, new_dv = grads
      dk = loop.add(i, j, dk, new_dk)
      dv = loop.add(i, j, dv, new_dv)
      return dq + new_dq, dk, dv, new_dbias

    # dq is complete after the steps of its group; dk and dv grow over all
    # groups, which therefore run in turn.
    sums = jnp.zeros_like(group.q, dtype), dk, dv, dbias
    if loop.single:
      sums = run_step(i, sums)
    else:
      first, end = loop.bounds(i)
      sums = lax.fori_loop(first, end, run_step, sums)
    dq, dk, dv, dbias = sums

    # Scaled queries have scaled dk already, but not dq.
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


def _within_segments(pairs, queries, keys):
  """The pairs of a step whose query and key have the same segment."""
  if queries.segments is None:
    return pairs
  return pairs & (queries.segments[..., None] == keys.segments[..., None, :])


def _unless_empty(loop, pairs, compute, empty):
  """compute(), or `empty` where segments leave no pairs to compute."""
  # A branch keeps XLA from fusing across it: only where it may pay.
  if not loop.skips:
    return compute()
  return lax.cond(pairs.any(), compute, lambda: empty)


def pairs(
  pattern: Pattern,
  q_at: Array,
  k_at: Array,
) -> Array:
  """Pairs [..., T, S] at positions [..., T] and [..., S], -1 for padding."""
  q_at = q_at[..., None]
  k_at = k_at[..., None, :]
  return pattern.mask(q_at, k_at) & (q_at >= 0) & (k_at >= 0)


def _softmax_of_tile(q, keys, pairs, scores, bias):
  """The softmax over one tile of keys, to be continued.

  Args:
    q: tiles of queries [A, B, H, T, K], scaled by `_scale`.
    keys: tiles of keys and values, [A, B, H, S, ...].
    pairs: their mask, which broadcasts to [A, B, H, T, S].
    scores: how scores follow from products.
    bias: what is added to scores; None for nothing.
  """
  s, _ = _scores(q, keys.k, pairs, scores, bias)

  maximum = s.max(-1, keepdims=True)
  p = jnp.exp(s - _finite(maximum))
  normalizer = p.sum(-1, keepdims=True)

  # The product takes weights rounded to the dtype of values; the normalizer has
  # summed them before.
  v = keys.v
  out = _dot("abhts,abhse->abhte", p.astype(v.dtype), v)
  out = out.astype(p.dtype)
  return Running(out, maximum, normalizer)


def _gradients_of_tile(queries, transposed, keys, pairs, scores, bias):
  """The gradients of a step, with queries that are scaled.

  Args:
    queries: the tiles of a group.
    transposed: its queries and the gradients of their outputs, [..., K, T].
    keys: the tiles that they meet.
    pairs: their mask.
    scores: how scores follow from products.
    bias: what is added to scores; None for nothing.

  Returns:
    (dq, dk, dv), and the gradients of the scores [A, B, H, T, S].
  """
  q_T, dout_T = transposed
  s, slope = _scores(queries.q, keys.k, pairs, scores, bias)
  lse = queries.lse[..., None]
  delta = queries.delta[..., None]
  p = jnp.exp(s - lse)

  # Through the softmax: ds = p (dout v^T - delta).
  dp = _dot("abhte,abhse->abhts", queries.dout, keys.v)
  dp = dp.astype(p.dtype)
  ds = p * (dp - delta)

  # Those of products, which have no bias and no soft cap.
  dtype = queries.q.dtype
  p = p.astype(dtype)
  dproducts = ds * slope
  dproducts = dproducts.astype(dtype)
  dv = _dot("abhet,abhts->abhes", dout_T, p)
  dv = dv.swapaxes(-1, -2)
  dv = dv.astype(ds.dtype)  # that of values, until here
  dk = _dot("abhkt,abhts->abhks", q_T, dproducts)
  dk = dk.swapaxes(-1, -2)
  dq = _dot("abhts,abhsk->abhtk", dproducts, keys.k)
  return (dq, dk, dv), ds


def softmax(
  q: Array,
  keys: Keys,
  pairs: Array,
  scores: Scores,
  bias: Array | None = None,
) -> Softmax:
  """(out, lse) of queries over one tile of keys."""
  q = q * _scale(q, scores)
  return _finish(_softmax_of_tile(q, keys, pairs, scores, bias))


def _combine(first: Running, second: Running) -> Running:
  """The softmax over the keys of both: sums are rescaled to one maximum."""
  maximum = jnp.maximum(first.maximum, second.maximum)
  decay_1 = jnp.exp(first.maximum - _finite(maximum))
  decay_2 = jnp.exp(second.maximum - _finite(maximum))
  accumulator = first.accumulator * decay_1 + second.accumulator * decay_2
  normalizer = first.normalizer * decay_1 + second.normalizer * decay_2
  return Running(accumulator, maximum, normalizer)


def _finish(running: Running) -> Softmax:
  """(out, log-sum-exp) of a running softmax: 0 and -inf without any keys."""
  accumulator, maximum, normalizer = running
  out = accumulator / jnp.where(normalizer == 0, 1, normalizer)
  return out, _log_sum(maximum, normalizer)


def _log_sum(maximum, normalizer):
  """The log-sum-exp, -inf for a sum of 0, where log has no derivative."""
  # A sum of 1 where the result is not used: the gradient of log(0) is infinite,
  # and 0 times that NaN.
  is_empty = normalizer == 0
  lse = maximum + jnp.log(jnp.where(is_empty, 1, normalizer))
  return jnp.where(is_empty, -jnp.inf, lse)


def merge(results: Sequence[Softmax]) -> Softmax:
  """Merges softmaxes over disjoint sets of keys into the one over all keys.

  With lse the log of the sum of exp(lse_i), out is the sum of
  exp(lse_i - lse) out_i: exact, not an approximation.

  Args:
    results: (out [..., E], lse [...]) of each set, at least one.

  Returns:
    (out, lse) over the union; 0 and -inf where no set has a key.
  """
  if len(results) == 1:
    return results[0]

  lses = [lse for _, lse in results]
  maximum = functools.reduce(jnp.maximum, lses)
  terms = [jnp.exp(x - _finite(maximum)) for x in lses]
  normalizer = functools.reduce(jnp.add, terms)
  lse = _log_sum(maximum, normalizer)

  # The weights of the results, rather than a division by their sum.
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
  """The results with a sink, a key whose score is given and whose value is 0.

  The share of the other keys is exp(lse) / (exp(lse) + exp(sink)), a sigmoid.

  Source: Xiao et al. 2023, arXiv 2309.17453, section 3.3, with a value of 0.

  Args:
    out_BLHE: outputs without sinks.
    lse_BLH: their log-sum-exps, in nats.
    sinks_H: the score of each head's sink, in nats; -inf for none.

  Returns:
    (out_BLHE, lse_BLH) with sinks, in the dtypes of those without.
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


def _scores(q, k, mask, scores, bias):
  """The scores of a tile, and their derivatives by products.

  Args:
    q: queries, scaled by `_scale`.
    k: keys.
    mask: which pairs there are.
    scores: how scores follow from products.
    bias: what is added after the soft cap; None for nothing.

  Returns:
    (s, slope): scores, -inf outside the mask, and ds / d(q k^T), a number
    without a soft cap.
  """
  # What `_scale` leaves.
  factor = scores.factor(q.shape[-1]) if q.dtype.itemsize == 2 else 1.0
  s = _dot("abhtk,abhsk->abhts", q, k) * factor
  slope: Array | float = factor
  if scores.softcap:
    ratio = jnp.tanh(s / scores.softcap)
    s = scores.softcap * ratio
    slope = factor * (1 - ratio**2)

  if bias is not None:
    s = s + bias
  # Last of all: a capped -inf would be -c, and a pair.
  return jnp.where(mask, s, -jnp.inf), slope


def _finite(maximum):
  """0 while no key has been seen: exp(-inf - 0) is 0, not NaN."""
  return jnp.where(maximum == -jnp.inf, 0, maximum)


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
  factor = 1 if is_narrow else scores.factor(q.shape[-1])
  return np.asarray(factor, q.dtype)
