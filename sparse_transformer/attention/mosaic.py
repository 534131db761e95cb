"""The executor for TPUs: three fused kernels.

One launch computes the forward pass, one dq, and one dk and dv, each for all
heads and all parts of the patterns; see `mosaic_kernels`. They have been
compiled for TPUs, and run in Pallas' interpreter only.
"""

import dataclasses
import functools

import jax

from sparse_transformer.attention import mosaic_tables, worklists
from sparse_transformer.attention.contract import (
  Case,
  Heads,
  Plan,
  heads_of_parts,
)
from sparse_transformer.attention.sharding import divide_batch
from sparse_transformer.patterns import Pattern, analysis

TILES = 128, 256, 512  # positions; with 1,024, VMEM may not suffice
WIDEST = 256
DTYPES = "bfloat16", "float32"
# Three tables of integers take 768 KiB of 1 MiB of scalar memory.
MOST_STEPS = 2**16
# Seconds that a tile takes in all three kernels, as modelled: a step of a grid
# takes 0.35 microseconds, besides the instructions of the program compiled for
# a v5e, in bfloat16.
STEP, PAIR = 3 * 0.35e-6, 12e-12


@dataclasses.dataclass(frozen=True)
class Mosaic:
  """Runs all heads and parts in one launch.

  Attributes:
    interpret: whether to interpret the kernels, on any platform.
  """

  interpret: bool = False

  def unsupported(self, case: Case) -> str | None:
    """Why a case cannot run, as the end of an error message."""
    if case.tile and case.tile not in (32, 64, *TILES):
      return (
        f"tiles must have 32 to {TILES[-1]} positions, a power of two, got"
        f" attention.tile={case.tile}; 0 chooses"
      )
    if self.interpret:
      return None
    if case.platform != "tpu":
      return "it needs a TPU"
    if case.dtype not in DTYPES:
      return f"it needs {' or '.join(DTYPES)}, got {case.dtype}"
    widths = case.qk_width, case.value_width
    if max(widths) > WIDEST:
      return f"widths of heads must be at most {WIDEST}, got {widths}"
    return None

  def tile_size(self, part: Pattern, case: Case) -> int:
    """The tile that `plans` chooses for one part."""
    return _choose_tile((part,), case.length)

  def plans(
    self, patterns: tuple[Pattern, ...], case: Case, tile: int = 0
  ) -> list[tuple[Plan, Heads]]:
    """One plan for all heads.

    Raises:
      ValueError: the kernels cannot run tiles of this size.
    """
    n = case.length
    tile = worklists.check_tile(tile or _choose_tile(patterns, n), n)
    tables = mosaic_tables.make_tables(patterns, n, tile, MOST_STEPS)
    return [(worklists.plan_of(tables, n, tile), None)]

  def forward(
    self, plan: Plan, q_BLHK: jax.Array, k_BMHK: jax.Array, v_BMHE: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """(out_BLHE, lse_BLH) over the pairs of a plan."""
    from sparse_transformer.attention import mosaic_kernels

    def run(tables, *arrays):
      slots = mosaic_kernels.forward(tables, *arrays, interpret=self.interpret)
      return worklists.merge_slots(*slots, tables.by_query.written)

    return divide_batch(run, plan.tables, q_BLHK, k_BMHK, v_BMHE)

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

    def run(tables, *arrays):
      slots = mosaic_kernels.backward(tables, *arrays, interpret=self.interpret)
      launches = tables.by_query, tables.by_key, tables.by_key
      return tuple(
        worklists.add_slots(x, launch.written)
        for x, launch in zip(slots, launches, strict=True)
      )

    of_queries = q_BLHK, dout_BLHE, lse_BLH, delta_BLH
    return divide_batch(run, plan.tables, *of_queries, k_BMHK, v_BMHE)


@functools.lru_cache(maxsize=256)
def _choose_tile(patterns: tuple[Pattern, ...], n: int) -> int:
  """The tile with which the kernels take least time, as modelled.

  Larger tiles take fewer steps, but cover more than the pairs.
  """

  def seconds(tile):
    num_tiles = sum(
      analysis.count_tiles(part, n, tile)
      * (len(patterns) if heads is None else len(heads))
      for part, heads in heads_of_parts(patterns, n)
    )
    return num_tiles * (STEP + tile**2 * PAIR)

  return min((t for t in TILES if t < 2 * n or t == TILES[0]), key=seconds)
