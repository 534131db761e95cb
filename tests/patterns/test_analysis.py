"""Tests of structure.py: numbers read off covers equal those of matrices."""

import subprocess
import sys
import time

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
  analysis as structure,
)


class Thirds(Pattern):
  """A pattern of a user: the query's third multiples, two rows back."""

  def mask(self, q, k):
    return (k <= q) & (k * 2 % 3 == q % 3) & ((q - k) // 4 != 1)


class Around(Pattern):
  """A pattern of a user that is not causal: three neighbours on each side."""

  def mask(self, q, k):
    return (q - k <= 3) & (k - q <= 3)


PATTERNS = [
  Causal(),
  Local(5),
  Strided(6),
  Block(7),
  Summary(7, 2),
  Summary(7, 2, 2),
  Local(6) | Strided(6),
  Block(7) | Summary(7, 3),
  Causal() - Local(4),
  Thirds(),
  Around(),
]


def compositions():
  """Random patterns: those above, combined by | & -."""
  combine = [Pattern.__or__, Pattern.__and__, Pattern.__sub__]
  return st.recursive(
    st.sampled_from(PATTERNS),
    lambda inner: st.builds(
      lambda f, a, b: f(a, b), st.sampled_from(combine), inner, inner
    ),
    max_leaves=4,
  )


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(compositions(), st.integers(1, 130))
def test_all_that_is_derived_agrees_with_the_matrix(pattern, n):
  matrix, i = pattern.matrix(n), np.arange(n)
  np.testing.assert_array_equal(
    structure.keys_per_query(pattern, n), matrix.sum(1)
  )
  last = np.where(matrix, i[:, None], -1).max(0)
  np.testing.assert_array_equal(structure.last_readers(pattern, n), last)
  cache = max(((i <= t) & (last >= t)).sum() for t in range(n))
  assert structure.cache_size(pattern, n) == cache
  assert structure.is_causal(pattern, n) == (not np.triu(matrix, 1).any())
  assert structure.area(pattern, n) >= matrix.sum()
  for part in pattern.parts():
    for tile in (3, 16, 64):
      tiles = len(part.layout(n, tile).rows)
      assert structure.count_tiles(part, n, tile) == tiles


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
  st.lists(st.lists(compositions(), min_size=1, max_size=2), max_size=4),
  st.integers(1, 100),
)
def test_reach_agrees_with_the_product_of_matrices(layers, n):
  found = structure.first_complete(tuple(map(tuple, layers)), n)
  used = [pattern for heads in layers for pattern in heads]
  causal = all(structure.is_causal(pattern, n) for pattern in used)
  wanted = np.tri(n, dtype=bool) if causal else np.ones((n, n), bool)
  missing = [
    np.argwhere(wanted & ~patterns.reach(layers[:depth], n)).tolist()
    for depth in range(len(layers) + 1)
  ]
  assert (found.positions, found.inputs) == (n, 0)
  if missing[-1]:
    assert found.layers is None and list(found.missing) == missing[-1][0]
  else:
    assert found.missing is None
    assert found.layers == [bool(pairs) for pairs in missing].index(False)


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(compositions(), compositions(), st.integers(17, 100))
def test_checked_inputs_find_the_first_missing_pair(first, second, n):
  causal = all(structure.is_causal(p, n) for p in (first, second))
  hypothesis.assume(causal)
  inputs = np.array([0, n // 3, n - 1])
  wanted = np.tri(n, dtype=bool)[:, inputs]
  seen = patterns.reach(((first,), (second,)), n)[:, inputs]
  missing = [(q, inputs[j]) for q, j in np.argwhere(wanted & ~seen)]
  _, found = structure._follow(((first,), (second,)), n, inputs, causal)
  assert found == (missing[0] if missing else None)


@pytest.mark.parametrize(
  "pattern, n, size",
  [
    (Local(128), 12_288, 128),
    (Local(128), 100, 100),
    (Block(128), 12_288, 128),
    (Causal(), 12_288, 12_288),
    # All but the first keys of the last block are read once more.
    (Strided(128), 12_288, 12_288 - 127),
    (Summary(128, 32), 12_288, 32 * 96),
    # A block whole, the summaries of all before it.
    (Block(128) | Summary(128, 32), 12_288, 128 + 32 * 95),
    (Causal() - Causal(), 12_288, 0),
  ],
)
def test_cache_of_known_patterns(pattern, n, size):
  assert structure.cache_size(pattern, n) == size


def test_reach_of_long_sequences_is_found_beyond_the_exact_prefix():
  # 20 layers of 255 positions back leave input 0 behind at query 5,101.
  found = structure.first_complete(((Local(256),),) * 20, 8192)
  assert found == structure.Reach(None, (20 * 255 + 1, 0), 4096, 64)
  found = structure.first_complete(((Summary(128, 32),), (Block(128),)), 12_288)
  assert found.layers is None and found.missing == (128, 0)
  found = structure.first_complete(((Block(128),), (Summary(128, 32),)), 12_288)
  assert found == structure.Reach(2, None, 4096, 64)


def test_network_that_is_not_causal_must_see_the_whole_sequence():
  assert structure.first_complete(((Around(),),) * 20, 64).layers is None
  assert structure.first_complete(((Around(),),) * 21, 64).layers == 21
  found = structure.first_complete(((Around(),),) * 3, 5000)
  assert found == structure.Reach(None, (0, 15), 0, 64)


def test_checked_inputs_are_distinct_positions():
  for n in (4097, 12_288, 2**20):
    inputs = structure._inputs(n)
    assert len(set(inputs)) == structure.INPUTS
    assert inputs[0] == 0 and inputs[-1] < n


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_million_positions_take_seconds_and_little_memory():
  # The high-water mark of the new process: ru_maxrss counts its parent's.
  code = (
    "from sparse_transformer import structure as s\n"
    "from sparse_transformer.patterns import Block, Causal, Local, Strided\n"
    "from sparse_transformer.patterns import Summary\n"
    "n, network = 2**20, ((Block(1024),), (Summary(1024, 32),))\n"
    "patterns = network[0] + network[1] + (Causal(),)\n"
    "for p in (Local(1024) | Strided(1024), *patterns):\n"
    "  print(s.keys_per_query(p, n).sum(), s.cache_size(p, n))\n"
    "print(s.first_complete(network, n).layers)\n"
    "print(s.first_complete(((Local(1024),), (Strided(1024),)), n).layers)\n"
    "status = open('/proc/self/status').read()\n"
    "print(status.split('VmHWM:')[1].split()[0])\n"
  )
  start = time.monotonic()
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert time.monotonic() - start < 60
  *numbers, peak = map(int, out.stdout.split())
  assert numbers == [
    *(1_609_564_672, 2**20 - 1023),
    *(537_395_200, 1024),
    *(Summary(1024, 32).pairs(2**20), 32 * 1024),
    *(2**19 * (2**20 + 1), 2**20),
    *(2, 2),
  ]
  assert peak < 512 * 1024  # KiB
