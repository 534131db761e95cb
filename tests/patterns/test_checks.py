"""Patterns that are not well defined are rejected, wherever they are used."""

import dataclasses
import functools
import operator
import warnings

import hypothesis
import numpy as np
import pytest
from helpers import catalogue
from helpers.catalogue import Masked
from helpers.errors import refused
from hypothesis import strategies as st

from sparse_transformer import patterns
from sparse_transformer.patterns import (
  BigBird,
  Block,
  Causal,
  Global,
  Local,
  LogSparse,
  Neighborhood,
  Pattern,
  RandomBlocks,
  Strided,
  analysis,
)


@dataclasses.dataclass(frozen=True)
class Ordered(Pattern):
  """A causal pattern with given orders of queries and keys."""

  function: object

  def mask(self, q, k):
    return k <= q

  def orders(self, n):
    return self.function(n)


def error_of(pattern, n):
  """The message of the ValueError, which is a short line."""
  with pytest.raises(ValueError) as error:
    pattern.check(n)
  assert "\n" not in str(error.value)
  assert len(str(error.value)) < 400
  return str(error.value)


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.lists(st.integers(-2, 7), min_size=1, max_size=6))
def test_orders_are_accepted_if_and_only_if_they_are_permutations(order):
  n = len(order)
  order = np.array(order)
  for function in (lambda n: (order, np.arange(n)), lambda n: [order, order]):
    if sorted(order) == list(range(n)):
      Ordered(function).check(n)
    else:
      assert f"permutations of range({n}); the" in error_of(
        Ordered(function), n
      )


@pytest.mark.parametrize(
  "mask, n",
  [
    (lambda q, k: q * q * q * k % 7 == 0, 400),
    (lambda q, k: (q + k) * 100_000 < 10, 2**14),
    (lambda q, k: q - 2_000_000_000 < k + 2_000_000_000 - q * 9, 2**28),
    (lambda q, k: q < 3_000_000_000, 9),
    (lambda q, k: q % 2**31 == 0, 9),
  ],
)
def test_masks_that_overflow_32_bits_are_rejected(mask, n):
  with warnings.catch_warnings(action="error"):
    message = error_of(Masked(mask), n)
  assert "32 bits" in message
  assert f"{n} positions" in message


def test_products_that_fit_in_32_bits_are_accepted():
  Masked(lambda q, k: q * q * q * k % 7 == 0).check(216)  # 215 ** 4 < 2 ** 31
  Masked(lambda q, k: (q % 999) * (k % 999) % 5 == 0).check(10**6)


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(catalogue.numbers(2**20), st.integers(1, 2**18))
def test_accepted_masks_are_the_same_in_32_and_64_bits(number, n):
  pattern = Masked(lambda q, k: number(q, k) % 7 == 3)
  try:
    pattern.check(n)
  except ValueError:
    return

  i = np.unique(np.random.RandomState(0).randint(0, n, 50))
  i = np.unique(np.append(i, [0, n - 1]))
  q = i[:, None].astype(np.int32)
  k = i.astype(np.int32)
  exact = number(i[:, None].astype(object), i.astype(object))

  np.testing.assert_array_equal(
    np.broadcast_to(number(q, k), exact.shape), exact
  )


@pytest.mark.parametrize(
  "mask",
  [
    lambda q, k: round(q - k) < 3,
    lambda q, k: q >> 2 == k >> 2,
    lambda q, k: (k <= q) ^ (k == 0),
    lambda q, k: ~q < k,
    lambda q, k: q / 2 < k,
    lambda q, k: q < 2.5,
    lambda q, k: q // k < 2,
    lambda q, k: q % -3 == 0,
    lambda q, k: max(q, k) < 3,
    lambda q, k: k <= q and q == k,
    lambda q, k: np.where(q < k, 1, 0) == 1,
    lambda q, k: np.logical_and(k <= q, q < 5),
    lambda q, k: q[0] < k,
    lambda q, k: (k <= q) + (q < 5),
    lambda q, k: (k <= q) & 1,
    lambda q, k: (k <= q) == 1,
    lambda q, k: q - k,
    lambda q, k: None,
  ],
)
def test_other_operators_are_rejected_with_a_list_of_those_allowed(mask):
  message = error_of(Masked(mask), 9)
  assert "may use + - * // % abs < <= > >= == != & | ~ only" in message
  assert "must return booleans" in message


@pytest.mark.parametrize("compare", [operator.eq, operator.ne])
def test_conditions_can_be_compared(compare):
  pattern = Masked(lambda q, k: compare(k <= q, (q % 3 == 0) | (k % 4 == 1)))
  for tile in (1, 4, 64):
    assert pattern.layout(50, tile).pairs.sum() == pattern.matrix(50).sum()
  assert Masked(lambda q, k: compare(k <= q, True)).pairs(9) in (45, 36)


@dataclasses.dataclass(frozen=True)
class Windows(Pattern):
  """A pattern that cannot be hashed if its field is a list."""

  sizes: object

  def mask(self, q, k):
    return (k <= q) & (q - k < self.sizes[0])


def test_fields_must_be_hashable():
  message = error_of(Windows([3, 4]), 9)
  assert "Windows([3, 4]): fields must be hashable, such as tuples" in message
  assert Windows((3, 4)).pairs(9) == Local(3).pairs(9)


def nothing(n):
  return np.zeros(n, int), np.arange(n)


@pytest.mark.parametrize(
  "use",
  [
    lambda p: p.matrix(20),
    lambda p: p.keys(3, 20),
    lambda p: p.pairs(20),
    lambda p: p.layout(20, 4),
    lambda p: patterns.has_pairs(p, 20),
    lambda p: patterns.first_leak(p, 20),
    lambda p: analysis.is_causal(p, 20),
    lambda p: analysis.keys_per_query(p, 20),
    lambda p: analysis.last_readers(p, 20),
    lambda p: analysis.count_tiles(p, 20, 4),
    lambda p: analysis.measure_reach(((p,),), 20),
  ],
)
@pytest.mark.parametrize(
  "broken", [Ordered(nothing), Masked(max), Windows([3, 4])]
)
def test_every_use_of_a_pattern_checks_it(use, broken):
  for pattern in (
    broken,
    Local(3) | broken,
    broken | Strided(3),
    Causal() & (broken - Local(2)),
  ):
    with refused(type(broken).__name__):
      use(pattern)


def test_a_pattern_is_checked_once_for_each_number_of_positions():
  calls = []
  pattern = Masked(lambda q, k: [calls.append(q), k <= q][1])
  for n in (20, 20, 30, 20):
    (pattern | Local(3)).check(n)
  assert len(calls) == 2


@pytest.mark.parametrize("n", [0, 2**31])
def test_number_of_positions_that_is_none_is_rejected(n):
  assert f"{n=} must be at least 1 and fit in 32 bits" in error_of(Causal(), n)


def window_of(pattern, q, k):
  return (k <= q) & (q - k < pattern.window)


class Plain(Pattern):
  mask = window_of

  def __init__(self, window):
    self.window = window


@dataclasses.dataclass(frozen=True)
class Caching(Pattern):
  given: int

  mask = window_of

  @functools.cached_property
  def window(self):
    return self.given


class Extended(catalogue.Comb):
  def __init__(self, window, step, more):
    super().__init__(window, step)
    object.__setattr__(self, "more", more)


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda x: Plain(x), ["Plain", "ignores window"]),
    (lambda x: Extended(9, 2, x), ["Extended", "ignores more"]),
  ],
)
def test_patterns_that_are_no_values_are_rejected(make, words):
  # Equality that ignores a field would give one pattern the plan of another.
  for pattern in (make(3), make(5)):
    message = error_of(pattern, 20)
    for word in ("frozen dataclass", *words):
      assert word in message


def test_patterns_with_cached_values_are_accepted():
  assert [Caching(w).pairs(9) for w in (2, 2, 3)] == [17, 17, 24]


@pytest.mark.parametrize("field", [10**6, 2**31 - 1])
@pytest.mark.parametrize(
  "cls", [Local, Global, Block, LogSparse, lambda x: Neighborhood(x, x, 64)]
)
def test_fields_far_beyond_the_sequence_give_all_pairs(cls, field):
  assert cls(field).pairs(100) == cls(field).matrix(100).sum() == 5050


@pytest.mark.parametrize(
  "make",
  [
    lambda x: patterns.Dilated(x, x),
    lambda x: Neighborhood(3, 3, x, x),
    lambda x: RandomBlocks(1, 2, first=x, last=x),
    lambda x: patterns.BigBird(window=x),
  ],
)
def test_fields_whose_product_or_sum_overflows_are_rejected(make):
  assert "32 bits" in error_of(make(2**31 - 1), 100)


# Constructors and operators.


def test_union_of_patterns_in_natural_order_is_one_part():
  assert len((Local(4) | Block(3) | Global(2)).parts()) == 1
  assert len((Local(4) | Strided(3)).parts()) == 2
  assert len(BigBird(4).parts()) == 1


def test_patterns_are_values():
  pattern = Local(4) | Strided(4)
  same = Local(4) | Strided(4)
  others = Local(4) | Strided(5), Local(4) & Strided(4)
  assert pattern == same
  assert hash(pattern) == hash(same)
  assert pattern not in others


def test_fields_are_compared_and_shown_by_value():
  assert Strided(4, 0) == Strided(4)
  assert Strided(4, 1) != Strided(4)
  assert str(Strided(4, 0)) == "Strided(4)"
  assert repr(Strided(np.int64(4))) == repr(Strided(4))


@pytest.mark.parametrize(
  "combine, other, words",
  [
    (lambda a, b: a and b, Local(1), r"^Causal\(\): combine patterns with"),
    (lambda a, b: a or b, Local(1), r"Full\(\) - p for all pairs"),
    (lambda a, b: not a, None, r"Full\(\) - p for all pairs"),
    (
      operator.or_,
      "Local(1)",
      r"pattern, not with 'Local\(1\)'; parse\(text",
    ),
    (operator.sub, None, "another pattern, not with None"),
    (operator.add, Local(1), "unsupported operand"),
    (lambda a, b: b & a, "Local(1)", "unsupported operand"),
    (lambda a, b: ~a, None, "bad operand"),
  ],
)
def test_other_operators_and_operands_are_rejected(combine, other, words):
  with pytest.raises(TypeError, match=words) as error:
    combine(Causal(), other)
  assert "\n" not in str(error.value)
