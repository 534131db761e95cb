"""Masks evaluated on whole tiles agree with masks on all positions."""

import operator

import hypothesis
import numpy as np
import pytest
from helpers import catalogue
from helpers.cases import soak
from hypothesis import strategies as st

from sparse_transformer.patterns import intervals

COMPARISONS = [
  operator.lt,
  operator.le,
  operator.eq,
  operator.ne,
  operator.gt,
  operator.ge,
]


def masks():
  """Functions (q, k) -> booleans."""
  compared = st.builds(
    lambda f, a, b: lambda q, k: f(a(q, k), b(q, k)),
    st.sampled_from(COMPARISONS),
    catalogue.numbers(7),
    catalogue.numbers(7),
  )

  def grow(inner):
    joined = st.builds(
      lambda f, a, b: lambda q, k: f(a(q, k), b(q, k)),
      st.sampled_from([operator.and_, operator.or_]),
      inner,
      inner,
    )
    return st.one_of(joined, inner.map(lambda a: lambda q, k: ~a(q, k)))

  return st.recursive(compared, grow, max_leaves=4)


@pytest.mark.parametrize("examples", [200, soak(10_000)])
def test_tiles_never_contradict_their_positions(examples):
  sizes = st.integers(1, 30), st.sampled_from([1, 2, 5, 8])
  check = hypothesis.given(masks(), *sizes, st.integers(0, 99))(check_tiles)
  hypothesis.settings(
    deadline=None,
    max_examples=examples,
  )(check)()


def check_tiles(mask, n, size, seed):
  rng = np.random.default_rng(seed)
  q = rng.permutation(n)
  k = rng.permutation(n)
  num_tiles = -(-n // size)
  rows, cols = (x.ravel() for x in np.indices((num_tiles, num_tiles)))
  pairs = intervals.TilePairs(size, rows, cols)
  truth = mask(pairs.query(q), pairs.key(k))
  may, must = (np.broadcast_to(x, rows.shape) for x in (truth.may, truth.must))
  exact = np.broadcast_to(mask(q[:, None], k[None]), (n, n))
  for row, col, some, every in zip(rows, cols, may, must, strict=True):
    tile = exact[row * size :, col * size :][:size, :size]
    assert some or not tile.any()
    assert tile.all() or not every
    if size == 1:
      assert some == every == tile.item()


@pytest.mark.parametrize("transposed", [False, True])
def test_equality_of_scattered_values_is_exact(transposed):
  # Each tile of the scattered side spans all values of the other side, and is
  # equal somewhere only to tiles that hold one of its values.
  size = 4
  num_tiles = 256
  values = np.random.default_rng(0).permutation(size * num_tiles)
  rows, cols = (x.ravel() for x in np.indices((num_tiles, num_tiles)))
  pairs = intervals.TilePairs(size, rows, cols)
  u = np.arange(size * num_tiles)
  v = values
  u, v = (v, u) if transposed else (u, v)
  tiles = (u[:, None] == v).reshape(num_tiles, size, num_tiles, size)
  truth = pairs.query(u) == pairs.key(v)

  np.testing.assert_array_equal(truth.may, tiles.any((1, 3)).ravel())


def positions():
  pairs = intervals.TilePairs(2, np.array([0, 1]), np.array([1, 0]))
  return pairs.query(np.arange(4)), pairs.key(np.arange(4))


@pytest.mark.parametrize("divide", [operator.floordiv, operator.mod])
@pytest.mark.parametrize("divisor", [0, -2])
def test_divisors_are_checked_before_the_division(divide, divisor):
  # Positions alone, their sums and their products: NumPy would only warn.
  q, k = positions()
  for number in (q, k, q - k, q * k):
    with pytest.raises(TypeError, match=f"positive integers.* {divisor}"):
      divide(number, divisor)
    with pytest.raises(TypeError):
      divide(number, k)


def test_the_interval_of_an_absolute_value_is_exact():
  bounds = [(a, b) for a in range(-6, 7) for b in range(a, 7)]
  low, high = np.transpose(bounds)
  found = np.transpose(abs(intervals.Interval(low, high)).bounds())
  for (a, b), pair in zip(bounds, found, strict=True):
    values = [abs(x) for x in range(a, b + 1)]
    expected = min(values), max(values)
    assert tuple(pair) == expected
    assert abs(intervals.Int32(a, b)).bounds() == expected


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
  "mask",
  [
    lambda q, k: k <= q,
    lambda q, k: q - k < 5,
    lambda q, k: q // 4 == k // 4,
    lambda q, k: k % 8 >= 6,
    lambda q, k: 3 * q - 2 * k < 11,
    # Bounds of products say nothing modulo 7, but these are of one side.
    lambda q, k: q * (q + 3) * q % 7 >= 4,
    lambda q, k: k * (k + 3) * k % 7 >= 4,
    lambda q, k: abs(q - k) < 5,
    lambda q, k: abs(k - q + 3) >= 6,
    lambda q, k: abs(q % 8 - 4) <= 1,
    lambda q, k: abs(abs(q - k) - 9) < 2,
  ],
)
def test_a_single_condition_in_natural_order_is_decided_exactly(mask, size):
  # Undecided bounds would also be safe; these must decide everything.
  i = np.arange(32)
  tiles = np.arange(32 // size)
  rows, cols = (x.ravel() for x in np.meshgrid(tiles, tiles, indexing="ij"))
  pairs = intervals.TilePairs(size, rows, cols)
  truth = mask(pairs.query(i), pairs.key(i))
  exact = np.broadcast_to(mask(i[:, None], i[None]), (32, 32))
  blocks = exact.reshape(len(tiles), size, len(tiles), size)
  for found, expected in (
    (truth.may, blocks.any((1, 3))),
    (truth.must, blocks.all((1, 3))),
  ):
    found = np.broadcast_to(found, rows.shape)
    np.testing.assert_array_equal(found, expected.ravel())
