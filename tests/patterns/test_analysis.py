"""Reach, leaks and caches; that all agree with matrices is in test_laws.py."""

import dataclasses
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
from helpers import catalogue
from helpers.cases import soak
from helpers.reference_reach import reach
from hypothesis import strategies as st

from sparse_transformer import patterns
from sparse_transformer.patterns import (
  Block,
  Causal,
  Column,
  Dilated,
  Global,
  Local,
  LogSparse,
  Row,
  Strided,
  Summary,
  analysis,
)

NETWORKS = st.lists(
  st.lists(
    st.sampled_from(catalogue.ALL),
    min_size=1,
    max_size=2,
  ),
  max_size=4,
)


def layers(*factors):
  return tuple((factor,) for factor in factors)


@pytest.mark.parametrize(
  "factors, is_complete",
  [
    ([Local(8), Strided(8)], True),
    ([Strided(8), Local(8)], True),
    ([Local(7), Strided(8)], False),
    ([Block(8), Summary(8, 2)], True),
    ([Summary(8, 2), Block(8)], False),
    ([Block(8) | Summary(8, 2)] * 2, True),
    ([Block(8) | Summary(8, 2)], False),
    ([Block(8) | Summary(8, 2, 1)] * 2, False),
    # What is above and to the right spans more than one row.
    ([Row(8, previous=1), Column(8)], True),
    ([Row(8), Column(8)] * 4, False),
    ([Dilated(2, 2**layer) for layer in range(7)], True),
    ([Dilated(2, 2**layer) for layer in range(6)], False),
    ([LogSparse()] * 6, True),  # 95 has 6 binary digits 1
    ([LogSparse()] * 5, False),
  ],
  ids=str,
)
def test_reach_of_known_networks(factors, is_complete):
  found = analysis.measure_reach(layers(*factors), 96)
  assert (found.missing is None) == is_complete


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(NETWORKS, st.integers(1, 100), st.integers(1, 200))
def test_receptive_field_is_the_product_of_matrices(network, n, last):
  found = analysis.receptive_field(network, n, last)
  np.testing.assert_array_equal(found, reach(network, n)[-last:])


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(NETWORKS, st.integers(1, 100))
def test_measured_reach_agrees_with_the_product_of_matrices(network, n):
  found = analysis.measure_reach(tuple(map(tuple, network)), n)
  causal = all(analysis.is_causal(p, n) for heads in network for p in heads)
  wanted = np.tri(n, dtype=bool) if causal else np.ones((n, n), bool)
  missing = [
    np.argwhere(wanted & ~reach(network[:depth], n)).tolist()
    for depth in range(len(network) + 1)
  ]

  assert found.positions == n
  assert found.inputs == 0

  if missing[-1]:
    assert found.layers is None
    assert list(found.missing) == missing[-1][0]
  else:
    assert found.missing is None
    assert found.layers == [bool(pairs) for pairs in missing].index(False)


@pytest.mark.parametrize(
  "factors, n, expected",
  [
    # 20 layers of 255 positions back do not lead from query 5,101 to input 0,
    # which lies beyond the prefix in which all pairs are followed.
    ([Local(256)] * 20, 8192, (None, (20 * 255 + 1, 0), 4096, 64)),
    ([Summary(128, 32), Block(128)], 12_288, (None, (128, 0), 4096, 64)),
    ([Block(128), Summary(128, 32)], 12_288, (2, None, 4096, 64)),
    # A bidirectional network must see the entire sequence.
    ([catalogue.Around()] * 20, 64, (None, (0, 61), 64, 0)),
    ([catalogue.Around()] * 21, 64, (21, None, 64, 0)),
    ([catalogue.Around()] * 3, 5000, (None, (0, 15), 0, 64)),
  ],
)
def test_measured_reach_of_known_networks(factors, n, expected):
  found = analysis.measure_reach(layers(*factors), n)
  assert dataclasses.astuple(found) == expected


@pytest.mark.parametrize("n", [2**17, soak(2**20)])
@pytest.mark.parametrize(
  "pattern, expected",
  [
    (Causal(), None),
    (Local(1024) | Strided(1024), None),
    (Local(9, causal=False), (0, 1)),
    (Strided(1024, causal=False) | Causal(), (0, 1024)),
    (Block(96, causal=False) - Global(62_500, causal=False), (62_500, 62_501)),
  ],
  ids=str,
)
def test_first_leak_of_long_sequences(pattern, expected, n):
  assert patterns.first_leak(pattern, n) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("n", [2**17, soak(2**20)])
def test_long_sequences_take_little_memory(n):
  # The high-water mark of the new process: ru_maxrss counts its parent's.
  code = (
    "from sparse_transformer.patterns import analysis as a\n"
    "from sparse_transformer.patterns import Block, Causal, Local, Strided\n"
    "from sparse_transformer.patterns import Summary\n"
    f"n, network = {n}, ((Block(1024),), (Summary(1024, 32),))\n"
    "patterns = network[0] + network[1] + (Causal(),)\n"
    "for p in (Local(1024) | Strided(1024), *patterns):\n"
    "  print(a.keys_per_query(p, n).sum(), (a.last_readers(p, n) >= 0).sum())\n"
    "for p in (Local(1024) | Strided(1024)).parts():\n"
    "  print(len(p.layout(n, 128).rows))\n"
    "print(a.measure_reach(network, n).layers)\n"
    "print(a.measure_reach(((Local(1024),), (Strided(1024),)), n).layers)\n"
    "status = open('/proc/self/status').read()\n"
    "print(status.split('VmHWM:')[1].split()[0])\n"
  )
  out = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    check=True,
  )
  *numbers, peak = map(int, out.stdout.split())
  blocks = n // 1024
  local = 1024 * n - 1024 * 1023 // 2
  strided = 1024 * blocks * (blocks + 1) // 2 - n  # the query itself is local
  summary = 32 * 1024 * blocks * (blocks - 1) // 2 + blocks * 32 * 33 // 2

  assert numbers == [
    local + strided,
    n,
    blocks * 1024 * 1025 // 2,
    n,
    summary,
    32 * blocks,
    n * (n + 1) // 2,
    n,
    72 * blocks - 36,
    {128: 1024, 1024: 36_864}[blocks],  # tiles
    2,
    2,
  ]
  assert peak < 512 * 1024  # KiB
