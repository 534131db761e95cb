"""What the executors with fused kernels share: running them on work lists."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_transformer.attention import online_softmax
from sparse_transformer.attention.contract import Keys, Plan, Queries, Table


@dataclasses.dataclass(frozen=True)
class Fused(abc.ABC):
  """Runs all heads and parts in one launch of each kernel.

  The tables of its plans have `by_query.written` and `by_key.written`, see
  `worklists.Lists`.

  Attributes:
    interpret: whether to interpret the kernels, on any platform.
  """

  interpret: bool = False

  @abc.abstractmethod
  def kernels(self) -> Any:
    """The module with the kernels, imported only where they run.

    Its functions `forward` and `backward` take tables, arrays and `interpret`,
    and return the results of each slot.
    """

  def forward(
    self, plan: Plan, q_BLHK: jax.Array, k_BMHK: jax.Array, v_BMHE: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """(out_BLHE, lse_BLH) over the pairs of a plan."""
    tables, launch = plan.tables, self.kernels().forward
    out, lse = launch(tables, q_BLHK, k_BMHK, v_BMHE, interpret=self.interpret)
    written = tables.by_query.written
    out, lse = _written_or(0, out, written), _written_or(-jnp.inf, lse, written)
    slots = range(len(out))
    return online_softmax.merge(*((out[i], lse[i]) for i in slots))

  def backward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq_BLHK, dk_BMHK, dv_BMHE) of the pairs of a plan."""
    tables, launch = plan.tables, self.kernels().backward
    dq, dk, dv = launch(tables, *queries, *keys, interpret=self.interpret)
    return (
      _written_or(0, dq, tables.by_query.written).sum(0),
      _written_or(0, dk, tables.by_key.written).sum(0),
      _written_or(0, dv, tables.by_key.written).sum(0),
    )


def _written_or(
  fill: float, x_SBLH: jax.Array, written_SLH: Table
) -> jax.Array:
  """What a kernel has written; it leaves any values elsewhere."""
  if len(x_SBLH) == 1:  # the first slot holds all rows
    return x_SBLH
  written = jnp.asarray(written_SLH)[:, None]
  trailing = (1,) * (x_SBLH.ndim - written.ndim)
  return jnp.where(written.reshape(*written.shape, *trailing), x_SBLH, fill)
