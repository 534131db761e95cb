import functools
import itertools
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from sparse_transformer import patterns
from sparse_transformer.patterns import (
  Block,
  Causal,
  Local,
  Pattern,
  Strided,
  Summary,
)

SETTINGS = dict(stride=8, window=8, width=2, num_summaries=1)


class Thirds(Pattern):
  """A pattern of a user: the query's third multiples, two rows back."""

  def mask(self, q, k):
    return (k <= q) & (k * 2 % 3 == q % 3) & ((q - k) // 4 != 1)


def grid(text):
  return np.array([[c == "1" for c in row] for row in text.split()])


@pytest.mark.parametrize(
  "pattern, expected",
  [
    (Causal(), "10000 11000 11100 11110 11111"),
    (Local(1), "10000 01000 00100 00010 00001"),
    (Local(3), "10000 11000 11100 01110 00111"),
    (Strided(2), "10000 01000 10100 01010 10101"),
    (Block(2), "10000 11000 00100 00110 00001"),
    (Summary(2, 1), "00000 01000 01000 01010 01010"),
    (Summary(4, 1, 2), "00000 01000 01000 01000 01000"),
    (Summary(3, 2), "00000 01000 01100 01100 01101"),
    (Local(2) | Strided(2), "10000 11000 11100 01110 10111"),
    (Causal() & Strided(3), "10000 01000 00100 10010 01001"),
    (Causal() - Local(2), "00000 00000 10000 11000 11100"),
  ],
)
def test_matrix_of_each_pattern(pattern, expected):
  np.testing.assert_array_equal(pattern.matrix(5), grid(expected))


# Counts of the published settings: n, l, c, then pairs by pattern.
COUNTS = [
  (3072, 96, None, 4_720_128, 290_352, 50_688, 148_992, None, 337_968, None),
  (3072, 128, 8, 4_720_128, 385_088, 38_400, 198_144, 283_488, 420_416, 480_768),
  (12288, 128, 32, 75_503_616, 1_564_736, 595_968, 792_576, 18_728_448, 2_148_416, 19_470_336),
  (65536, 256, None, 2_147_516_416, 16_744_576, 8_421_376, 8_421_376, None, 25_100_416, None),
  (1048576, 1024, None, 549_756_338_176, 1_073_218_048, 537_395_200, 537_395_200, None, 1_609_564_672, None),
]  # fmt: skip


@pytest.mark.parametrize("n, l, c, *expected", [(*row,) for row in COUNTS])
def test_pairs_of_the_published_settings(n, l, c, expected):  # noqa: E741
  made = [Causal(), Local(l), Strided(l), Block(l)]
  made += [Summary(l, c) if c else None, Local(l) | Strided(l)]
  made += [Block(l) | Summary(l, c) if c else None]
  found = [pattern and pattern.pairs(n) for pattern in made]
  assert found == expected
