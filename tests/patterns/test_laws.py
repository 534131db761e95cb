"""Laws of every pattern, which hold a new class to account once registered.

Everything derived from a pattern must agree with its matrix, which is simply
its mask at all pairs of positions.
"""

import dataclasses

import hypothesis
import numpy as np
import pytest
from helpers import catalogue, examples
from helpers.cases import soak
from helpers.catalogue import Masked
from helpers.errors import refused
from hypothesis import strategies as st

from sparse_transformer import patterns
from sparse_transformer.patterns import (
  Block,
  Causal,
  Local,
  Pattern,
  Strided,
  Summary,
  analysis,
)

MILLION = 2**20
LENGTHS = [2**16, soak(MILLION)]


def check_pattern(pattern, n, tile):
  matrix = pattern.matrix(n)
  check_keys(pattern, matrix)
  check_parts(pattern, matrix, tile)
  check_readers(pattern, matrix)
  check_leaks(pattern, matrix)


def check_keys(pattern, matrix):
  n = len(matrix)
  assert pattern.pairs(n) == matrix.sum()
  counts = analysis.keys_per_query(pattern, n)
  np.testing.assert_array_equal(counts, matrix.sum(1))
  for i in {0, n // 2, n - 1}:
    np.testing.assert_array_equal(pattern.keys(i, n), np.flatnonzero(matrix[i]))


def check_parts(pattern, matrix, tile):
  """Every pair is in exactly one part."""
  n = len(matrix)
  total = sum(part.matrix(n).astype(int) for part in pattern.parts())
  np.testing.assert_array_equal(total, matrix)
  for part in pattern.parts():
    check_layout(part, n, tile)


def check_layout(part, n, tile):
  """The layout has the tiles that hold pairs, sorted, with exact counts."""
  layout = part.layout(n, tile)
  num_tiles = -(-n // tile)

  for order in (layout.query_order, layout.key_order):
    np.testing.assert_array_equal(np.sort(order), np.arange(n))

  padded = np.zeros((num_tiles * tile,) * 2, int)
  padded[:n, :n] = part.matrix(n)[layout.query_order][:, layout.key_order]
  inside = np.zeros_like(padded)
  inside[:n, :n] = 1
  pairs, area = (
    x.reshape(num_tiles, tile, num_tiles, tile).sum((1, 3))
    for x in (padded, inside)
  )
  rows, cols = np.nonzero(pairs)

  np.testing.assert_array_equal(layout.rows, rows)
  np.testing.assert_array_equal(layout.cols, cols)
  np.testing.assert_array_equal(layout.pairs, pairs[rows, cols])
  np.testing.assert_array_equal(layout.full, (pairs == area)[rows, cols])
  assert analysis.count_tiles(part, n, tile) == len(rows)


def check_readers(pattern, matrix):
  n = len(matrix)
  queries = np.arange(n)[:, None]
  last = np.where(matrix, queries, -1).max(0)
  np.testing.assert_array_equal(analysis.last_readers(pattern, n), last)


def check_leaks(pattern, matrix):
  n = len(matrix)
  queries, keys = np.nonzero(np.triu(matrix, 1))
  leak = min(zip(keys, queries, strict=True), default=None)
  assert patterns.first_leak(pattern, n) == (leak and leak[::-1])
  assert analysis.is_causal(pattern, n) == (leak is None)


def check_32_bits(pattern):
  """The mask at a million positions does not overflow 32 bits."""
  i = np.random.RandomState(0).randint(0, MILLION, 4000)
  i[:100] = MILLION - 1 - np.arange(100)
  for q, k in [(i[:, None], i[None, :800]), (i, np.maximum(i - 64, 0))]:
    with np.errstate(over="raise"):
      narrow = pattern.mask(q.astype(np.int32), k.astype(np.int32))
    np.testing.assert_array_equal(narrow, pattern.mask(q, k))


def check_class(cls, found):
  for pattern in (*found.small, found.large):
    assert type(pattern) is cls
    check_value(pattern)
  for pattern in found.small:
    check_pattern(pattern, 90, 16)

  for pattern in found.causal:
    assert analysis.is_causal(pattern, 90)
  for pattern in found.bidirectional:
    assert not analysis.is_causal(pattern, 90)

  forms = [found.large]
  if hasattr(found.large, "causal"):
    assert found.bidirectional
    forms.append(dataclasses.replace(found.large, causal=False))
  for pattern in forms:
    check_32_bits(pattern)
    pattern.check(2**17)


def check_value(pattern):
  """Equal by value, parsed back from its text, for any type of integer."""
  assert patterns.parse(str(pattern)) == ((pattern,),)
  fields = vars(pattern).items()
  integers = {k: np.int64(v) for k, v in fields if type(v) is int}
  same = dataclasses.replace(pattern, **integers)
  assert same == pattern
  assert hash(same) == hash(pattern)
  np.testing.assert_array_equal(same.matrix(50), pattern.matrix(50))


def check_count(pattern, n):
  """Queries of a long sequence have as many keys as their masks say."""
  counts = analysis.keys_per_query(pattern, n)
  assert pattern.pairs(n) == counts.sum()
  queries = np.random.RandomState(0).randint(0, n, 250)
  for i in (0, n // 3, n - 1, *queries):
    assert len(pattern.keys(i, n)) == counts[i]


def test_every_registered_class_has_examples():
  assert examples.STATIC.keys() == patterns.CATALOGUE.keys()
  assert examples.CONTENT.keys() == patterns.CONTENT.keys()


@pytest.mark.parametrize("name", examples.STATIC)
def test_registered_class_obeys_all_laws(name):
  check_class(patterns.CATALOGUE[name], examples.STATIC[name])


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", examples.STATIC)
def test_pairs_of_the_large_example_are_counted_exactly(name, n):
  check_count(examples.STATIC[name].large, n)


def test_new_class_obeys_all_laws_once_it_is_registered():
  with refused("unknown"):
    patterns.parse("Comb(20, 3)")
  with catalogue.registered(catalogue.Comb) as cls:
    found = examples.of("Comb(20, 3)", "", "Comb(1000, 8)")
    check_class(cls, found)
    check_count(found.large, 2**16)
    check_pattern(patterns.parse("Strided(5) | Comb(20, 3)")[0][0], 70, 8)
  assert "Comb" not in patterns.CATALOGUE


def test_names_of_registered_classes_are_unique():
  class Full(Pattern):
    pass

  with refused("Full already exists in sparse_"):
    patterns.register(Full)
  # A class that is defined again, as in a notebook, replaces itself.
  assert patterns.register(Local) is Local


def compositions():
  """Random patterns: small ones, combined with | & -."""
  combine = [Pattern.__or__, Pattern.__and__, Pattern.__sub__]
  return st.recursive(
    st.sampled_from(catalogue.ALL),
    lambda inner: st.builds(
      lambda f, a, b: f(a, b), st.sampled_from(combine), inner, inner
    ),
    max_leaves=4,
  )


@pytest.mark.parametrize("examples", [60, soak(2000)])
def test_compositions_obey_the_laws_of_patterns(examples):
  sizes = st.integers(1, 130), st.sampled_from([1, 3, 8, 16, 64])
  check = hypothesis.given(compositions(), *sizes)(check_pattern)
  hypothesis.settings(deadline=None, max_examples=examples)(check)()


@pytest.mark.parametrize("size, n", [(1, 1), (2, 17), (5, 2)])
def test_smallest_settings_obey_the_laws_of_patterns(size, n):
  for pattern in (Local(size), Strided(size), Block(size), Summary(size, 1)):
    check_pattern(pattern, n, 4)


@pytest.mark.parametrize(
  "pattern",
  [p for p in catalogue.BIDIRECTIONAL if "Summary" not in str(p)],
  ids=str,
)
def test_bidirectional_patterns_are_symmetric(pattern):
  matrix = pattern.matrix(90)
  np.testing.assert_array_equal(matrix, matrix.T)


def test_masks_with_large_fields_fit_in_32_bits():
  check_32_bits(patterns.RandomBlocks(1, 3, seed=123456789))
  check_32_bits(patterns.RandomBlocks(4, 1, causal=False))
  check_32_bits(Strided(2**30, offset=2**30 - 1))


EVEN = Masked(lambda q, k: k % 2 == 0)  # its mask has no query axis


@pytest.mark.parametrize(
  "pattern, pairs",
  [
    (EVEN, 15),
    (Causal() & EVEN, 9),
    (Causal() - Causal(), 0),
    (Masked(lambda q, k: True), 25),
    (Masked(lambda q, k: (k == q) | ~(q % 2 == 0)), 13),
    (Masked(lambda q, k: (k <= q) | ~(k < 3)), 22),
    (Causal() - Masked(lambda q, k: False), 15),
    (Causal() & Masked(lambda q, k: (k <= q) | True), 15),
  ],
)
def test_conditions_on_one_side_or_none_hold_for_all_of_the_other(
  pattern, pairs
):
  check_pattern(pattern, 21, 4)
  assert pattern.pairs(5) == pairs


RANDOM = np.random.default_rng(0).random((90, 90)) < 0.1


@pytest.mark.parametrize("n, tile", [(90, 16), (90, 1), (1, 4), (33, 8)])
def test_given_patterns_obey_all_laws(n, tile):
  for matrix in (RANDOM, np.tril(RANDOM), RANDOM | True, RANDOM & False):
    pattern = patterns.explicit(matrix[:n, :n])
    check_pattern(pattern, n, tile)
    check_pattern(Strided(5) | pattern, n, tile)
    check_pattern(Local(9, causal=False) - pattern, n, tile)

  pattern = patterns.where(catalogue.similar)
  check_pattern(pattern, n, tile)
  check_pattern(patterns.where(lambda q, k: abs(q - k) % 7 < 3), n, tile)
  check_32_bits(pattern)
