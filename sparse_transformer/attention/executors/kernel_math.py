"""The mathematics of the fused kernels, with exponentials to base 2.

GPUs and TPUs compute 2^x in one instruction. The kernels of GPUs are here. A
row of scores is a position of the item: scores are transposed where items are
tiles of keys.
"""

import abc
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_transformer.attention.contract import Scores

LOG2_E = math.log2(math.e)


def scaled(
  s: jax.Array, scores: Scores, width: int
) -> tuple[jax.Array, float, jax.Array | None]:
  """(scores, their factor, the slope of the soft cap or None).

  `s` are products of queries and keys of a width. The factor is above 0, so
  that it may be applied to the largest score, and -inf stays -inf.
  """
  factor, cap = scores.factor(width), scores.softcap
  if cap:
    share = jnp.tanh(s * (factor / cap))
    return share, LOG2_E * cap, 1 - share * share
  if factor <= 0:
    return s * (LOG2_E * factor), 1.0, None
  return s, LOG2_E * factor, None


def raise_max(
  old: jax.Array, found: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(the larger maximum, what to subtract, the decay of earlier sums)."""
  new = jnp.maximum(old, found)
  # A row may have no keys yet: exp2(-inf - 0) is 0, not NaN.
  shift = jnp.where(new == -jnp.inf, 0.0, new)
  return new, shift, jnp.exp2(old - shift)


def total_and_lse(
  max_: jax.Array, sum_: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(what to divide the output by, the log-sum-exp in nats)."""
  is_empty = sum_ == 0
  total = jnp.where(is_empty, 1.0, sum_)
  lse = (max_ + jnp.log2(total)) / LOG2_E
  return total, jnp.where(is_empty, -jnp.inf, lse)


def by_row(x: jax.Array, like: jax.Array) -> jax.Array:
  """A matrix with a value for each row."""
  return lax.broadcast_in_dim(x, like.shape, [0])


def by_column(x: jax.Array, like: jax.Array) -> jax.Array:
  """A matrix with a value for each column."""
  return lax.broadcast_in_dim(x, like.shape, [1])


class Item(abc.ABC):
  """One item, within a kernel; what it reads may be references to memory."""

  def __init__(self, scores: Scores):
    self._scores = scores

  @abc.abstractmethod
  def mine(self) -> Any:
    """The rows of the item, as `Queries` or `Keys`."""

  @abc.abstractmethod
  def sweep(self, body: Callable, carry: Any) -> Any:
    """body(other, mask, carry) over tiles of the other side, or parts of them.

    mask(x, fill) replaces what is not a pair.
    """

  @abc.abstractmethod
  def store(self, refs: Any, *arrays: jax.Array) -> None:
    """Writes the rows of results."""

  @abc.abstractmethod
  def dot(self, a: Any, b: Any, total: Any = None) -> jax.Array:
    """total + a b, accumulated in float32."""

  @abc.abstractmethod
  def full(self, value: float, *width: int) -> jax.Array:
    """Values for the rows of the item, [rows, width] or [rows]."""

  def start(self, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(output, maximum, sum) before any tile."""
    return self.full(0.0, width), self.full(-jnp.inf), self.full(0.0)

  def exp2(self, x: jax.Array, factor: float, minus: jax.Array) -> jax.Array:
    """2^(factor x - minus)."""
    return jnp.exp2(x * factor - minus)

  def scale(self, x: Any) -> float:
    """The factor of products of queries and keys; x is either."""
    return self._scores.factor(x.shape[-1])

  def scores(self, a: Any, b: Any) -> tuple:
    """The scores of rows a and columns b, see `scaled`."""
    s = self.dot(a, b.T)
    return scaled(s, self._scores, a.shape[-1])


def forward(item: Item, refs: Any) -> None:
  """Output and log-sum-exp of the rows of an item, by an online softmax."""
  q = item.mine().q

  def body(keys, mask, carry):
    out, max_, sum_ = carry
    s, factor, _ = item.scores(q, keys.k)
    s = mask(s, -jnp.inf)
    new, shift, decay = raise_max(max_, s.max(1) * factor)
    p = item.exp2(s, factor, by_row(shift, s))
    sum_ = sum_ * decay + p.sum(1)
    v = keys.v
    out = item.dot(p.astype(v.dtype), v, out * by_row(decay, out))
    return out, new, sum_

  out, max_, sum_ = item.sweep(body, item.start(refs[0].shape[-1]))
  total, lse = total_and_lse(max_, sum_)
  item.store(refs, out / by_row(total, out), lse)


def backward_of_queries(item: Item, refs: Any) -> None:
  """dq of the rows of an item; log-sum-exps are to base 2."""
  queries = item.mine()
  q, dout = queries.q, queries.dout
  lse, delta = queries.lse, queries.delta

  def body(keys, mask, dq):
    k, v = keys.k, keys.v
    s, factor, slope = item.scores(q, k)
    p = mask(item.exp2(s, factor, by_row(lse, s)), 0.0)
    p = p if slope is None else p * slope
    ds = p * (item.dot(dout, v.T) - by_row(delta, s))
    return item.dot(ds.astype(k.dtype), k, dq)

  dq = item.sweep(body, item.full(0.0, q.shape[-1]))
  item.store(refs, dq * item.scale(q))


def backward_of_keys(item: Item, refs: Any) -> None:
  """dk and dv of the rows of an item."""
  keys = item.mine()
  k, v = keys.k, keys.v

  def body(queries, mask, carry):
    dk, dv = carry
    q, dout = queries.q, queries.dout
    s, factor, slope = item.scores(k, q)
    lse, delta = queries.lse, queries.delta
    p = mask(item.exp2(s, factor, by_column(lse, s)), 0.0)
    # dv before ds: both gradients at once would need more registers.
    dv = item.dot(p.astype(dout.dtype), dout, dv)
    p = p if slope is None else p * slope
    ds = p * (item.dot(v, dout.T) - by_column(delta, s))
    return item.dot(ds.astype(q.dtype), q, dk), dv

  carry = item.full(0.0, k.shape[-1]), item.full(0.0, v.shape[-1])
  dk, dv = item.sweep(body, carry)
  item.store(refs, dk * item.scale(k), dv)


_PASSES = forward, backward_of_queries, backward_of_keys
KERNELS = {kernel.__name__: kernel for kernel in _PASSES}
