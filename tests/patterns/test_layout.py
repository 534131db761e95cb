"""Layouts have few and full tiles, and need neither n x n work nor memory."""

import numpy as np
import pytest

from sparse_transformer import patterns


def fill_of(layout):
  """The share of the area of all tiles that holds pairs."""
  return layout.pairs.sum() / (len(layout.pairs) * layout.tile**2)


@pytest.mark.parametrize("tile, fill", [(32, 0.758), (64, 0.455), (128, 0.227)])
def test_columns_fill_small_tiles_best(tile, fill):
  # A column has 96 positions: its triangle takes three tiles of 32 on a side,
  # full except on the diagonal. In natural order, a tile has one pair in 128.
  layout = patterns.Strided(128).layout(12288, tile)
  assert fill_of(layout) == pytest.approx(fill, abs=0.001)
  natural = (patterns.Causal() & patterns.Strided(128)).layout(12288, tile)
  assert fill_of(natural) < 0.04


def test_random_blocks_take_only_their_own_tiles():
  layout = patterns.BigBird(64).layout(12288, 64)
  window = 2 * 192 - 1
  first = 192 - 2
  drawn = np.clip(np.arange(192) - 2, 0, 3)
  assert len(layout.rows) == window + first + drawn.sum()


def test_powers_of_two_take_few_tiles():
  pattern = patterns.LogSparse()
  n = 12288
  tiles = [len(part.layout(n, 64).rows) for part in pattern.parts()]
  assert sum(tiles) < 3 * 2 * n / 64 + 3 * 192  # 3 groups of 6 distances
  # In natural order, each distance is a separate diagonal.
  natural = (patterns.Causal() & pattern).layout(n, 64)
  assert len(natural.rows) > sum(tiles)
