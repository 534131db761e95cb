"""Patterns that follow the content, before they are bound."""

import dataclasses
import functools
import operator

import jax.numpy as jnp
import numpy as np
import pytest

from sparse_transformer import patterns
from sparse_transformer.patterns import (
  LSH,
  AdaptiveSpan,
  Block,
  Causal,
  Local,
  Pattern,
  Routing,
  Strided,
  TopBlocks,
  analysis,
)

SPAN = AdaptiveSpan(96, ramp=16)
ALL = (
  LSH(64, 192, rounds=4, seed=3),
  Routing(64, 128),
  TopBlocks(64, 8),
  SPAN,
  AdaptiveSpan(1),
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
  with pytest.raises(ValueError, match="no pairs before it is bound"):
    pattern.matrix(9)
  with pytest.raises(ValueError, match="no pairs before it is bound"):
    (Local(3) | pattern).matrix(9)
  reach = Local(pattern.max + pattern.ramp) if pattern in ALL[3:] else Causal()
  assert pattern.support() == reach
  assert (Strided(7) | pattern).support() == Strided(7) | reach


A, B, LOCAL, STRIDED = LSH(4, 6), TopBlocks(4, 2), Local(5), Strided(3)


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


@dataclasses.dataclass(frozen=True, eq=False)
class Known(Pattern):
  """A pattern with given pairs, in place of one that follows the content."""

  pairs_of: np.ndarray

  def mask(self, q, k):
    return self.pairs_of[q, k]


@pytest.mark.parametrize(
  "pattern",
  [
    LOCAL | A | STRIDED | B,
    (A | LOCAL) & (B | STRIDED),
    (LOCAL & (A | STRIDED)) | (B - A),
    ((A | LOCAL) - STRIDED) | (B & A),
  ],
  ids=str,
)
def test_split_has_each_pair_once(pattern):
  n = 24
  i = np.arange(n)
  random = np.random.RandomState(0)
  sets = {c: Known(random.rand(n, n) < 0.5) for c in (A, B)}
  static, content = pattern.split()
  parts = [*content] if static is None else [static, *content]
  masks = [part.bind(sets).mask(i[:, None], i) for part in parts]
  total = np.sum([mask.astype(int) for mask in masks], axis=0)
  np.testing.assert_array_equal(total, pattern.bind(sets).mask(i[:, None], i))
  sets = {c: Known(np.tri(n, dtype=bool)) for c in (A, B)}
  bound = pattern.bind(sets).mask(i[:, None], i)
  assert not (bound & ~pattern.support().matrix(n)).any()


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
  assert [SPAN.most_keys(n) for n in (9, 1000)] == [9, 112]
  assert (Block(8) | TopBlocks(8, 2)).contents() == (TopBlocks(8, 2),)


# What is known before run time.

N = 40


def random_masks(pattern):
  """Masks [many, n, n] with labels drawn evenly at random."""
  random = np.random.RandomState(0)

  def draw(content):
    shape = 1, 1000, N
    match content:
      case LSH():
        labels = random.randint(0, content.buckets, (*shape, content.rounds))
      case Routing():
        labels = random.randint(0, content.clusters, (*shape, 1))
      case TopBlocks():
        blocks = random.rand(*shape, -(-N // content.size)).argsort(-1)
        is_past = blocks < np.arange(N)[:, None] // content.size
        labels = np.where(is_past, blocks, -1)
        labels = np.take_along_axis(labels, (~is_past).argsort(-1), -1)
        labels = labels[..., : content.num]
    sets = content.sets(jnp.asarray(labels, jnp.int32))
    return functools.reduce(operator.or_, sets)

  bound = pattern.bind({c: draw(c) for c in pattern.contents()})
  i = np.arange(N).reshape(1, 1, N, 1)
  return np.asarray(bound.mask(i, i.swapaxes(2, 3)))[0]


@pytest.mark.parametrize(
  "pattern",
  [
    LSH(3, 6, 2),
    Routing(3, 4),
    Routing(1, 4),
    TopBlocks(6, 2),
    LOCAL | LSH(3, 6),
    (Strided(3) | Routing(3, 4)) & TopBlocks(6, 2),
    (LSH(3, 6) - LOCAL) | Block(7),
  ],
  ids=str,
)
def test_expected_pairs_are_those_of_even_labels(pattern):
  masks = random_masks(pattern)
  counts = masks.sum(-1)
  mean = counts.mean(0).sum()
  assert analysis.count_pairs(pattern, N) == pytest.approx(mean, rel=0.02)
  assert counts.max() <= analysis.most_keys(pattern, N)
  if pattern in pattern.contents():
    i = np.arange(N)
    chances = pattern.chances(i[:, None], i, N)
    np.testing.assert_allclose(masks.mean(0), chances, atol=0.06)


def test_expected_pairs_of_long_sequences_are_counted_at_some_queries():
  pattern = Block(64) | TopBlocks(64, 8)
  n = 2**15
  past = np.minimum(8, np.arange(n) // 64)
  expected = int(past.sum()) * 64 + Block(64).pairs(n)
  assert analysis.count_pairs(pattern, n) == pytest.approx(expected, rel=0.01)
  assert analysis.count_pairs(Strided(7), n) == Strided(7).pairs(n)


def test_leaks_are_those_of_the_support():
  assert patterns.has_pairs(LSH(8, 4), 9)
  assert patterns.first_leak(Local(3) | LSH(8, 4), 9) is None
  around = Local(3, causal=False) | LSH(8, 4)
  assert patterns.first_leak(around, 9) == (0, 1)
  assert patterns.first_leak(around & Causal(), 9) is None
