"""The base of executors with fused kernels: runs them on work lists."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_transformer.attention import online_softmax
from sparse_transformer.attention.contract import Executor, Keys, Plan, Queries


@dataclasses.dataclass(frozen=True)
class Fused(Executor):
  """Runs all heads and parts in one launch of each kernel.

  There is one plan for all heads. Its tables have `by_query.written` and
  `by_key.written`, see `worklists.Lists`.
  """

  interpret: bool = False  # whether to interpret the kernels, on any platform

  @abc.abstractmethod
  def kernels(self) -> Any:
    """The module with the kernels, imported only where they run.

    Its functions `forward` and `backward` return the results of each slot.
    """

  def forward(
    self, plan: Plan, q_BLHK: jax.Array, k_BMHK: jax.Array, v_BMHE: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    tables, keys = plan.tables, Keys(k_BMHK, v_BMHE)
    out, lse = self.kernels().forward(tables, q_BLHK, keys, self.interpret)
    out = _written(0, out, tables.by_query)
    lse = _written(-jnp.inf, lse, tables.by_query)
    return online_softmax.merge(*((out[i], lse[i]) for i in range(len(out))))

  def backward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, ...]:
    tables = plan.tables
    grads = self.kernels().backward(tables, queries, keys, self.interpret)
    lists = tables.by_query, tables.by_key, tables.by_key
    return tuple(_written(0, *x).sum(0) for x in zip(grads, lists, strict=True))


def _written(fill, x_SBLH, lists):
  """The rows that a kernel wrote, and `fill` where it left them unspecified."""
  if len(x_SBLH) == 1:  # the first slot holds all rows
    return x_SBLH
  written = jnp.asarray(lists.written)[:, None]
  trailing = (1,) * (x_SBLH.ndim - written.ndim)
  return jnp.where(written.reshape(*written.shape, *trailing), x_SBLH, fill)
