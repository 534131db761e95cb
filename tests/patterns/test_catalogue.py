"""The patterns of the catalogue are the sets that their sources define."""

import numpy as np
import pytest

from sparse_transformer import patterns


def grid(text):
  return np.array([[c == "1" for c in row] for row in text.split()])


@pytest.mark.parametrize(
  "pattern, expected",
  [
    (patterns.Causal(), "10000 11000 11100 11110 11111"),
    (patterns.Local(1), "10000 01000 00100 00010 00001"),
    (patterns.Local(3), "10000 11000 11100 01110 00111"),
    (patterns.Strided(2), "10000 01000 10100 01010 10101"),
    (patterns.Strided(2, offset=1), "00000 10000 01000 10100 01010"),
    (patterns.Strided(3, offset=2), "00000 10000 01000 00100 10010"),
    (
      patterns.Strided(3, offset=1, causal=False),
      "01001 00100 10010 01001 00100",
    ),
    (patterns.Block(2), "10000 11000 00100 00110 00001"),
    (patterns.Summary(2, 1), "00000 01000 01000 01010 01010"),
    (patterns.Summary(4, 1, 2), "00000 01000 01000 01000 01000"),
    (patterns.Summary(3, 2), "00000 01000 01100 01100 01101"),
    (patterns.Local(2) | patterns.Strided(2), "10000 11000 11100 01110 10111"),
    (patterns.Causal() & patterns.Strided(3), "10000 01000 00100 10010 01001"),
    (patterns.Causal() - patterns.Local(2), "00000 00000 10000 11000 11100"),
    (patterns.Full(), "11111 11111 11111 11111 11111"),
    (patterns.Local(3, causal=False), "11000 11100 01110 00111 00011"),
    (patterns.Local(4, causal=False), "11100 11110 11111 01111 00111"),
    (patterns.Dilated(2, 2), "10000 01000 10100 01010 00101"),
    (patterns.Dilated(2, 2, causal=False), "10100 01010 10101 01010 00101"),
    (patterns.Strided(2, causal=False), "10101 01010 10101 01010 10101"),
    (patterns.Block(2, previous=1), "10000 11000 11100 11110 00111"),
    (patterns.Block(2, causal=False), "11000 11000 00110 00110 00001"),
    (patterns.Block(2, 1, causal=False), "11110 11110 11111 11111 00111"),
    (patterns.Summary(2, 1, causal=False), "01010 01010 01010 01010 01010"),
    (patterns.LogSparse(), "10000 11000 11100 01110 10111"),
    (patterns.LogSparse(4), "10000 11000 11100 11110 11111"),
    (patterns.Global(2), "10000 11000 11000 11000 11000"),
    (patterns.Global(1, causal=False), "11111 10000 10000 10000 10000"),
    (patterns.RandomBlocks(1, 9, last=2), "00000 00000 10000 11000 11100"),
    (patterns.RandomBlocks(1, 9, first=1), "00000 00000 01000 01100 01110"),
    (
      patterns.RandomBlocks(1, 9, causal=False),
      "01111 10111 11011 11101 11110",
    ),
    (patterns.Longformer(2, 1), "10000 11000 11100 10110 10011"),
    (patterns.Longformer(2, 1, causal=False), "11111 11100 11110 10111 10011"),
    (patterns.Row(2, 1), "10000 11000 00100 00110 00001"),
    (patterns.Row(1, 2, causal=False), "11000 11000 00110 00110 00001"),
    (patterns.Row(2, 1, previous=1), "10000 11000 11100 11110 00111"),
    (patterns.Row(2, 1, 1, causal=False), "11110 11110 11111 11111 00111"),
    (patterns.Column(2, 1), "10000 01000 10100 01010 10101"),
    (patterns.Column(1, 2, causal=False), "11111 11111 11111 11111 11111"),
    (patterns.Neighborhood(2, 1, 2, 1), "10000 01000 10100 01010 00101"),
    (patterns.Neighborhood(2, 3, 2, 1), "10000 11000 11100 11110 00111"),
    (
      patterns.Neighborhood(3, 1, 2, 1, causal=False),
      "10100 01010 10101 01010 00101",
    ),
    # With seed 0: a pattern must stay what it was when a network was trained.
    (patterns.RandomBlocks(1, 1), "00000 10000 01000 01000 10000"),
    (patterns.BigBird(1, num_random=1), "10000 11000 11100 11110 11011"),
    (
      patterns.BigBird(1, 1, num_random=1, seed=1, causal=False),
      "11111 11100 11110 10111 10011",
    ),
  ],
)
def test_matrix_of_each_pattern(pattern, expected):
  np.testing.assert_array_equal(pattern.matrix(5), grid(expected))


@pytest.mark.parametrize(
  "n, pattern, pairs",
  [
    (3_072, patterns.Causal(), 4_720_128),
    (3_072, patterns.Local(96) | patterns.Strided(96), 337_968),
    (3_072, patterns.Local(128) | patterns.Strided(128), 420_416),
    (3_072, patterns.Block(128) | patterns.Summary(128, 8), 480_768),
    (12_288, patterns.Causal(), 75_503_616),
    (12_288, patterns.Local(128) | patterns.Strided(128), 2_148_416),
    (12_288, patterns.Block(128) | patterns.Summary(128, 32), 19_470_336),
  ],
)
def test_pairs_of_the_published_settings(n, pattern, pairs):
  assert pattern.pairs(n) == pairs


@pytest.mark.parametrize(
  "pattern, query, expected",
  [
    # 4 columns of 2 channels: pixel (2, 1), second channel.
    (patterns.Row(4, 2), 19, "16-19"),
    (patterns.Column(4, 2), 19, "2-3 10-11 18-19"),
    (patterns.Neighborhood(2, 3, 4, 2), 19, "8-13 16-19"),
    (patterns.Neighborhood(3, 3, 4, 2, causal=False), 19, "8-13 16-21 24-29"),
    # The end of a row does not wrap around to the beginning of the next.
    (patterns.Neighborhood(2, 3, 4, 2), 16, "8-11 16"),
    (patterns.BigBird(2, num_random=9), 11, "0-11"),
  ],
)
def test_keys_of_one_query(pattern, query, expected):
  found = set()
  for run in expected.split():
    first, *last = map(int, run.split("-"))
    found |= set(range(first, (last or [first])[0] + 1))
  assert set(pattern.keys(query, 32)) == found


@pytest.mark.parametrize("stride", [2, 12, 13])
def test_column_of_the_target_holds_the_bytes_above_it(stride):
  n = 90
  for q in range(n):
    held = {int(k) - 1 for k in patterns.Strided(stride, offset=1).keys(q, n)}
    above = set(range(q - stride, -1, -stride))
    assert held - {-1} == above  # key 0 holds no byte
    assert not held & {int(k) - 1 for k in patterns.Strided(stride).keys(q, n)}


@pytest.mark.parametrize("count", [1, 100, 2**14, 2**16, 2**20])
def test_draws_cover_all_eligible_blocks(count):
  chances = np.arange(patterns.catalogue._LEVELS, dtype=np.int32)
  drawn = patterns.catalogue._share(chances, np.int32(count))
  assert (np.diff(drawn) >= 0).all()
  assert drawn[0] == 0
  assert count - drawn[-1] <= -(-count // patterns.catalogue._LEVELS) + 1
  assert drawn[-1] < count


def test_random_blocks_are_distinct_and_from_the_past():
  pattern = patterns.RandomBlocks(1, 3, seed=1, first=2, last=4)
  matrix = pattern.matrix(400)
  eligible = np.clip(np.arange(400) - 4 - 2 + 1, 0, None)

  np.testing.assert_array_equal(matrix.sum(1), np.minimum(eligible, 3))
  q, k = np.nonzero(matrix)
  assert (k >= 2).all()
  assert (q - k >= 4).all()


def test_random_blocks_are_drawn_evenly():
  # A tenth of the draws of a row falls into each tenth of its past.
  shares = []
  for seed in range(8):
    q, k = np.nonzero(patterns.RandomBlocks(1, 3, seed).matrix(1000)[100:])
    shares.append(k / (q + 100))
  counts, _ = np.histogram(np.concatenate(shares), 10, (0, 1))
  assert abs(counts / counts.mean() - 1).max() < 0.05
