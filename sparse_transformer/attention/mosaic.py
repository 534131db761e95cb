"""The executor for TPUs: three fused kernels.

One launch computes the forward pass, one dq, and one dk and dv, each for all
heads and all parts of the patterns; see `mosaic_kernels`. It has been compiled
for TPUs, and run in Pallas' interpreter only.
"""

import dataclasses

import jax

from sparse_transformer.attention import mosaic_tables, worklists
from sparse_transformer.attention.contract import Case, Heads, Plan
from sparse_transformer.patterns import Pattern, analysis

TILES = 128, 256, 512  # positions; larger squares of scores exceed VMEM
DTYPES = "bfloat16", "float32"
MOST_STEPS = 2**16


@dataclasses.dataclass(frozen=True)
class Mosaic:
  """Runs all heads and parts in one launch.

  Attributes:
    interpret: whether to interpret the kernels, on any platform.
  """

  interpret: bool = False

  def unsupported(self, case: Case) -> str | None:
    """Why a case cannot run, as the end of an error message."""
    if self.interpret:
      return None
    if case.platform != "tpu":
      return "it needs a TPU"
    if case.dtype not in DTYPES:
      return f"it needs {' or '.join(DTYPES)}, got {case.dtype}"
    return None

  def tile_size(self, part: Pattern, n: int) -> int:
    """The tile that `plans` chooses for a part alone."""
    return _choose_tile((part,), n)

  def plans(
    self, patterns: tuple[Pattern, ...], case: Case, tile: int = 0
  ) -> list[tuple[Plan, Heads]]:
    """One plan for all heads."""
    n = case.length
    tile = tile or _choose_tile(patterns, n)
    worklists.check_tile(tile)
    tables = mosaic_tables.make_tables(patterns, n, tile, MOST_STEPS)
    return [(worklists.plan_of(tables, n, tile), None)]

  def forward(
    self, plan: Plan, q_BLHK: jax.Array, k_BMHK: jax.Array, v_BMHE: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """(out_BLHE, lse_BLH) over the pairs of a plan."""
    from sparse_transformer.attention import mosaic_kernels

    out_SBLHE, lse_SBLH = mosaic_kernels.forward(
      plan.tables, q_BLHK, k_BMHK, v_BMHE, interpret=self.interpret
    )
    written_SLH = plan.tables.by_query.written
    return worklists.merge_slots(out_SBLHE, lse_SBLH, written_SLH)

  def backward(
    self,
    plan: Plan,
    q_BLHK: jax.Array,
    dout_BLHE: jax.Array,
    lse_BLH: jax.Array,
    delta_BLH: jax.Array,
    k_BMHK: jax.Array,
    v_BMHE: jax.Array,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dq_BLHK, dk_BMHK, dv_BMHE) of the pairs of a plan."""
    from sparse_transformer.attention import mosaic_kernels

    tables = plan.tables
    of_queries = q_BLHK, dout_BLHE, lse_BLH, delta_BLH
    dq, dk, dv = mosaic_kernels.backward(
      tables, *of_queries, k_BMHK, v_BMHE, interpret=self.interpret
    )
    return (
      worklists.add_slots(dq, tables.by_query.written),
      worklists.add_slots(dk, tables.by_key.written),
      worklists.add_slots(dv, tables.by_key.written),
    )


def _choose_tile(patterns, n):
  del patterns, n
  return 128
