"""Patterns that follow the content, before they are bound."""

import dataclasses

import numpy as np
import pytest
from helpers.errors import refused

from sparse_transformer import patterns
from sparse_transformer.patterns import (
  LSH,
  Block,
  Causal,
  Local,
  Routing,
  Selected,
  Strided,
  TopBlocks,
  analysis,
)

ALL = (
  LSH(64, 192, rounds=4, seed=3),
  Routing(64, 128),
  Selected(64),
  TopBlocks(64, 8),
)


@pytest.mark.parametrize("pattern", ALL, ids=str)
def test_expressions_know_them(pattern):
  assert patterns.parse(str(pattern)) == ((pattern,),)
  assert type(pattern).__name__ in patterns.CONTENT
  pattern.check(4096)
  for combined in (Local(64) | pattern, pattern - Local(3), Local(8) & pattern):
    assert patterns.parse(str(combined)) == ((combined,),)
    combined.check(4096)


@pytest.mark.parametrize("pattern", ALL, ids=str)
def test_pairs_are_unknown_before_run_time(pattern):
  with refused("no pairs before it is bound"):
    pattern.matrix(9)
  with refused("no pairs before it is bound"):
    (Local(3) | pattern).matrix(9)
  assert pattern.support() == Causal()
  assert (Strided(7) | pattern).support() == Strided(7) | Causal()


A = LSH(4, 6)
B = TopBlocks(4, 2)
LOCAL = Local(5)
STRIDED = Strided(3)


@pytest.mark.parametrize(
  "pattern, static, content",
  [
    (LOCAL | A, LOCAL, [A - LOCAL]),
    (A | LOCAL, LOCAL, [A - LOCAL]),
    (A | B, None, [A, B - A]),
    (A & LOCAL, None, [A & LOCAL]),
    (LOCAL & A, None, [A & LOCAL]),
    (A - LOCAL, None, [A - LOCAL]),
    (A - B, None, [A - B]),
    (LOCAL | A | STRIDED, LOCAL | STRIDED, [A - LOCAL - STRIDED]),
    ((LOCAL | A) & STRIDED, LOCAL & STRIDED, [(A - LOCAL) & STRIDED]),
    (LOCAL & (STRIDED | A), STRIDED & LOCAL, [(A - STRIDED) & LOCAL]),
    ((LOCAL | A) & B, None, [(A - LOCAL) & B, B & LOCAL]),
  ],
  ids=str,
)
def test_static_pairs_are_split_off(pattern, static, content):
  assert pattern.split() == (static, tuple(content))


SPLIT = (
  LOCAL | A | STRIDED | B,
  (A | LOCAL) & (B | STRIDED),
  (LOCAL & (A | STRIDED)) | (B - A),
  ((A | LOCAL) - STRIDED) | (B & A),
)


@pytest.mark.parametrize("pattern", SPLIT, ids=str)
def test_split_has_each_pair_once(pattern):
  n = 24
  random = np.random.RandomState(0)
  # In place of the pairs that follow the content.
  sets = {c: patterns.explicit(random.rand(n, n) < 0.5) for c in (A, B)}
  static, parts = pattern.split()
  if static is not None:
    parts = static, *parts
  counts = sum(bound_mask(part, sets, n).astype(int) for part in parts)

  np.testing.assert_array_equal(counts, bound_mask(pattern, sets, n))


def test_support_has_all_pairs_of_the_past():
  n = 24
  sets = {c: patterns.explicit(np.tri(n, dtype=bool)) for c in (A, B)}
  for pattern in SPLIT:
    mask = bound_mask(pattern, sets, n)
    assert not (mask & ~pattern.support().matrix(n)).any()


def bound_mask(pattern, sets, n):
  i = np.arange(n)
  return pattern.bind(sets).mask(i[:, None], i)


def test_directions_of_lsh_are_its_own_in_each_layer():
  pattern = LSH(8, 4, rounds=3)
  shape = 1, pattern.num_directions, 5

  assert pattern.directions(5).shape == shape == (1, 6, 5)
  draws = [
    p.directions(5, layer)
    for p in (pattern, dataclasses.replace(pattern, seed=1))
    for layer in (0, 1)
  ]

  assert len({draw.tobytes() for draw in draws}) == 4
  np.testing.assert_array_equal(draws[0], pattern.directions(5))
  assert Routing(8, 4).directions(5) is None  # they are parameters
  assert TopBlocks(8, 4).num_directions == 0


def test_most_keys_of_short_sequences():
  assert [LSH(8, 4, 2).most_keys(n) for n in (1, 9, 99)] == [1, 8, 16]
  assert [Routing(4, 8).most_keys(n) for n in (1, 9)] == [1, 8]
  assert [TopBlocks(8, 2).most_keys(n) for n in (8, 9, 99)] == [0, 8, 16]
  assert [Selected(8, 2).most_keys(n) for n in (8, 9, 99)] == [0, 8, 16]
  assert (Block(8) | TopBlocks(8, 2)).contents() == (TopBlocks(8, 2),)


def test_pairs_are_counted_as_the_most_there_can_be():
  n = 40
  own = Block(6)
  local = Local(3)
  strided = Strided(7)
  past = np.minimum(2, np.arange(n) // 6).sum() * 6
  found = analysis.count_pairs(own | TopBlocks(6, 2), n)

  assert found == own.pairs(n) + past
  assert analysis.count_pairs(strided, n) == strided.pairs(n)
  # A query has one key in its bucket of each round; the first has itself.
  assert analysis.count_pairs(LSH(1, 4, 2), n) == 1 + 2 + 2 * (n - 2)
  assert analysis.count_pairs(local & Routing(4, 2), n) == 1 + 2 * (n - 1)


def test_leaks_are_those_of_the_support():
  assert patterns.has_pairs(LSH(8, 4), 9)
  assert patterns.first_leak(Local(3) | LSH(8, 4), 9) is None
  around = Local(3, causal=False) | LSH(8, 4)
  assert patterns.first_leak(around, 9) == (0, 1)
  assert patterns.first_leak(around & Causal(), 9) is None
