"""The base of executors whose kernels follow `mosaic_tables`."""

import functools
from collections.abc import Sequence

from sparse_transformer.attention import contract
from sparse_transformer.attention.executors import mosaic_tables, worklists
from sparse_transformer.attention.heads import heads_of_parts
from sparse_transformer.patterns import Layout, Pattern, analysis


class Arranged(worklists.Fused):
  """An executor whose kernels follow tables of blocks and steps."""

  TILES: tuple[int, ...]  # positions on a side to choose from, ascending
  SMALLEST = 32  # that kernels can run
  # What each step and each pair of its tile costs, in units of one's own.
  STEP: float
  PAIR: float

  def tiles(self, case: contract.Case) -> tuple[int, ...]:
    """The values of `TILES` that a case supports."""
    del case
    return self.TILES

  def limits(self, case: contract.Case) -> mosaic_tables.Limits:
    """How the steps of each launch are cut into grids."""
    del case
    return mosaic_tables.Limits(2**31 - 1)

  def unsupported_tile(
    self, case: contract.Case, tiles: Sequence[int]
  ) -> str | None:
    """Why the tile that is asked for, if any, is none of the given ones."""
    # `attend` reduces the tile of a short sequence.
    is_short = case.length <= case.tile < self.SMALLEST
    if not case.tile or case.tile in tiles or is_short:
      return None
    return (
      f"tiles must have {' or '.join(map(str, tiles))} positions, got"
      f" tile={case.tile}; 0 chooses"
    )

  def tile_size(self, part: Pattern, case: contract.Case) -> int:
    return self._tile_of((part,), case)

  def common_tile(
    self, patterns: tuple[Pattern, ...], case: contract.Case
  ) -> int:
    """The tile that `plans` chooses for all heads."""
    tiles = self.tiles(case), self.STEP, self.PAIR
    return _choose_tile(patterns, case.length, *tiles)

  def plans(
    self, patterns: tuple[Pattern, ...], case: contract.Case
  ) -> contract.Plans:
    tile = self._tile_of(patterns, case)
    tables = mosaic_tables.make_tables(
      patterns, case.length, tile, self.limits(case), case.group
    )
    return [(contract.Plan(None, tile, tables), None)]

  def shares(
    self, part: Pattern, layouts: Sequence[Layout], case: contract.Case
  ) -> list[mosaic_tables.Tables]:
    heads = case.num_heads, case.group
    return mosaic_tables.make_shares(part, layouts, *heads, self.limits(case))

  def _tile_of(self, patterns, case):
    """The tile with which patterns run in one launch."""
    tile = case.tile or self.common_tile(patterns, case)
    return max(worklists.check_tile(tile, case.length), self.SMALLEST)


@functools.lru_cache(maxsize=256)
def _choose_tile(
  patterns: tuple[Pattern, ...],
  n: int,
  tiles: tuple[int, ...],
  step: float,
  pair: float,
) -> int:
  """The tile with which steps and their pairs cost least.

  Larger tiles take fewer steps, but cover more than the pairs.
  """

  def cost(tile):
    num_tiles = sum(
      analysis.count_tiles(part, n, tile)
      * (len(patterns) if heads is None else len(heads))
      for part, heads in heads_of_parts(patterns, n)
    )
    return num_tiles * (step + tile**2 * pair)

  return min((t for t in tiles if t < 2 * n or t == tiles[0]), key=cost)
