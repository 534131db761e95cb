"""The executor for TPUs: three fused kernels.

One launch computes the forward pass, one dq, and one dk and dv, each for all
heads and all parts of the patterns; see `mosaic_kernels`. They have been
compiled for TPUs, but never run on one: only Pallas' interpreter has run them.
"""

import functools
from collections.abc import Sequence
from typing import Any

from sparse_transformer.attention import contract
from sparse_transformer.attention.executors import mosaic_tables, worklists
from sparse_transformer.patterns import Layout, Pattern, analysis

TILES = 128, 256, 512  # positions; with 1,024, VMEM may not suffice
WIDEST = 256
DTYPES = "bfloat16", "float32"
# Three tables of integers take 768 KiB of 1 MiB of scalar memory.
MOST_STEPS = 2**16
# Seconds that a tile takes in all three kernels, as modelled: a step of a grid
# takes 0.35 microseconds, besides the instructions of the program compiled for
# a v5e, in bfloat16.
STEP, PAIR = 3 * 0.35e-6, 12e-12


class Mosaic(worklists.Fused):
  """Runs all heads and parts in one launch on TPUs."""

  def unsupported(self, case: contract.Case) -> str | None:
    if not self.interpret and case.platform != "tpu":
      return "it needs a TPU"
    if case.tile and case.tile not in (32, 64, *TILES):
      return (
        f"tiles must have 32 to {TILES[-1]} positions, a power of two, got"
        f" tile={case.tile}; 0 chooses"
      )
    if self.interpret:
      return None
    if case.dtype not in DTYPES:
      return f"it needs {' or '.join(DTYPES)}, got {case.dtype}"
    widths = case.qk_width, case.value_width
    if max(widths) > WIDEST:
      return f"widths of heads must be at most {WIDEST}, got {widths}"
    return None

  def tile_size(self, part: Pattern, case: contract.Case) -> int:
    return _tile_of((part,), case)

  def common_tile(self, patterns: tuple[Pattern, ...], n: int) -> int:
    """The tile that `plans` chooses for all heads."""
    return _choose_tile(patterns, n)

  def plans(
    self, patterns: tuple[Pattern, ...], case: contract.Case
  ) -> contract.Plans:
    tile = _tile_of(patterns, case)
    tables = mosaic_tables.make_tables(
      patterns, case.length, tile, _limits(case), case.group
    )
    return [(contract.Plan(None, tile, tables), None)]

  def shares(
    self, part: Pattern, layouts: Sequence[Layout], case: contract.Case
  ) -> list[mosaic_tables.Tables]:
    heads = case.num_heads, case.group
    return mosaic_tables.make_shares(part, layouts, *heads, _limits(case))

  def kernels(self) -> Any:
    from sparse_transformer.attention.executors import mosaic_kernels

    return mosaic_kernels


def _limits(case):
  """Two cores, if the chip has them, share a sequence that is left over."""
  cores = 1 + contract.number(case.batch) % 2
  return mosaic_tables.Limits(MOST_STEPS, cores)


def _tile_of(patterns, case):
  """The tile with which patterns run in one launch."""
  tile = case.tile or _choose_tile(patterns, case.length)
  return worklists.check_tile(tile, case.length)


@functools.lru_cache(maxsize=256)
def _choose_tile(patterns: tuple[Pattern, ...], n: int) -> int:
  """The tile with which the kernels take least time, as modelled.

  Larger tiles take fewer steps, but cover more than the pairs.
  """

  def seconds(tile):
    num_tiles = sum(
      analysis.count_tiles(part, n, tile)
      * (len(patterns) if heads is None else len(heads))
      for part, heads in contract.heads_of_parts(patterns, n)
    )
    return num_tiles * (STEP + tile**2 * PAIR)

  return min((t for t in TILES if t < 2 * n or t == TILES[0]), key=seconds)
