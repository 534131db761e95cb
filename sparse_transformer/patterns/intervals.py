"""Interval arithmetic, which evaluates the mask of a pattern on whole tiles.

A mask also accepts the values of this module, which represent an unknown
position in a tile. For each pair of tiles, the result then says whether some
pair of positions may be in the pattern, and whether all pairs of positions must
be in it. The result is conservative: if bounds cannot classify a tile pair, the
result says that some pairs may be in the pattern, but not that all must be.

>>> pairs = TilePairs(4, rows=np.array([0, 1]), cols=np.array([1, 0]))
>>> q, k = pairs.query(np.arange(8)), pairs.key(np.arange(8))
>>> causal = k <= q
>>> causal.may.tolist(), causal.must.tolist()
([False, True], [False, True])
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

# The operators that this module, NumPy and XLA share.
OPERATORS = "+ - * // % abs < <= > >= == != & | ~"
LIMIT = 2**31  # integers whose magnitude is smaller fit in 32 bits

# One value for each tile pair, or one value for all of them.
Array: TypeAlias = Any


class TilePairs(NamedTuple):
  """Pairs of a query tile and a key tile of `size` positions."""

  size: int
  rows: np.ndarray  # int [pairs], the index of the query tile
  cols: np.ndarray  # the index of the key tile

  def query(self, positions: np.ndarray) -> "QueryPlusKey":
    """Returns the unknown query position of each tile pair.

    `positions` lists all positions, in the order of the tiles.
    """
    return QueryPlusKey(self, positions, 0)

  def key(self, positions: np.ndarray) -> "QueryPlusKey":
    """Returns the unknown key position of each tile pair.

    `positions` lists all positions, in the order of the tiles.
    """
    return QueryPlusKey(self, 0, positions)

  def reduce(self, ufunc: np.ufunc, values: Array, tiles: Any) -> Array:
    """Reduces the values of each of the given tiles.

    Args:
      ufunc: the operation.
      values: one value for each position, in the order of the tiles, or a
        scalar for all, which is returned unchanged.
      tiles: indices of tiles, or a slice.
    """
    if np.ndim(values) == 0:
      return values

    starts = np.arange(0, len(values), self.size)
    return ufunc.reduceat(values, starts)[tiles]

  def may_be_equal(self, u: Array, v: Array) -> Array:
    """Returns whether some u of a query tile may equal some v of a key tile.

    The test uses the values of the side that varies more within its tiles. It
    checks whether one of these values lies between the smallest and the largest
    value of the other side.
    """
    if np.ndim(u) == 0 or np.ndim(v) == 0:
      return True  # always safe, because bounds still apply

    num_tiles = -(-len(u) // self.size)
    if len(self.rows) < 64 * num_tiles:  # splitting is cheaper than testing
      return True

    # The side that varies more leaves gaps between its values.
    u_low, u_high = self._tile_bounds(u)
    v_low, v_high = self._tile_bounds(v)
    if (v_high - v_low).sum() > (u_high - u_low).sum():
      return self._may_lie_between(
        v, self.cols, u_low[self.rows], u_high[self.rows]
      )
    return self._may_lie_between(
      u, self.rows, v_low[self.cols], v_high[self.cols]
    )

  def _tile_bounds(self, values):
    """Returns the smallest and the largest value of every tile."""
    every = ...
    low = self.reduce(np.minimum, values, every)
    high = self.reduce(np.maximum, values, every)
    return low, high

  def _may_lie_between(self, values, tiles, low, high):
    """Returns whether some value of each given tile lies between bounds."""
    # Values are shifted and sorted in one array, so that each tile has its own
    # range of integers.
    first = min(values.min(), low.min())
    last = max(values.max(), high.max())
    width = 1 + last - first
    tile_of_value = np.arange(len(values)) // self.size
    in_tiles = np.sort(tile_of_value * width + values)

    # Find the first value of a tile that is at least `low`, and the first that
    # exceeds `high`. Values in between exist if the former comes first.
    offset = tiles * width
    begin = np.searchsorted(in_tiles, offset + low)
    end = np.searchsorted(in_tiles, offset + high, "right")
    return begin < end


class Truth:
  """A condition on tile pairs, in three-valued logic.

  For each tile pair it is always true (`must`), never true (not `may`), or
  undecided.
  """

  def __init__(self, may: Array, must: Array):
    self.may = may  # whether it may be true for some pair of positions
    self.must = must  # whether it is known to be true for all of them

  def __and__(self, other: "Truth | bool") -> "Truth":
    other = as_truth(other)
    return Truth(self.may & other.may, self.must & other.must)

  def __or__(self, other: "Truth | bool") -> "Truth":
    other = as_truth(other)
    return Truth(self.may | other.may, self.must | other.must)

  def __invert__(self) -> "Truth":
    # The inverse may be true unless the condition must be true, and must be
    # true if the condition cannot be.
    return Truth(np.logical_not(self.must), np.logical_not(self.may))

  # Here and below, comparisons return conditions instead of booleans. The type
  # of `object.__eq__` does not allow this, and hashing would make no sense.
  def __eq__(self, other: "Truth | bool") -> "Truth":  # type: ignore[override]
    other = as_truth(other)
    return (self & other) | (~self & ~other)

  def __ne__(self, other: "Truth | bool") -> "Truth":  # type: ignore[override]
    return ~(self == other)

  def __bool__(self) -> bool:
    # Without this error, `and` and `or` would return one of their two sides.
    raise TypeError(
      "combine the conditions of a mask with & | ~, not with and/or/not"
    )

  __rand__ = __and__
  __ror__ = __or__
  __hash__ = None  # type: ignore[assignment]
  __array_ufunc__ = None  # NumPy's functions raise a TypeError


def as_truth(x: Any) -> Truth:
  """Converts a condition, or a plain True or False, to a `Truth`.

  Raises:
    TypeError: x has any other type.
  """
  if isinstance(x, Truth):
    return x
  if not isinstance(x, (bool, np.bool_)):
    raise TypeError(f"{type(x).__name__} is not a boolean condition")
  return Truth(np.bool_(x), np.bool_(x))


class Integer:
  """The operators that all kinds of unknown integers share."""

  __array_ufunc__ = None  # NumPy's functions raise a TypeError

  def bounds(self) -> tuple[Array, Array]:
    """Returns the smallest and the largest possible value."""
    raise NotImplementedError

  def __add__(self, other: Any) -> Any:
    raise NotImplementedError

  def __mul__(self, other: Any) -> Any:
    raise NotImplementedError

  def __radd__(self, other: Any) -> Any:
    return self + other

  def __rmul__(self, other: Any) -> Any:
    return self * other

  def __neg__(self) -> Any:
    return self * -1

  def __sub__(self, other: Any) -> Any:
    return self + other * -1

  def __rsub__(self, other: Any) -> Any:
    return self * -1 + other

  def _difference(self, other: Any) -> tuple[Array, Array]:
    """Returns the bounds of `self - other`, which decide a comparison.

    The bounds are exact if both integers are known at every position, because
    the values are then subtracted before bounds are taken.
    """
    return (self - other).bounds()

  def __lt__(self, other: Any) -> Truth:
    low, high = self._difference(other)
    return Truth(low < 0, high < 0)

  def __le__(self, other: Any) -> Truth:
    low, high = self._difference(other)
    return Truth(low <= 0, high <= 0)

  def __eq__(self, other: Any) -> Truth:  # type: ignore[override]
    low, high = self._difference(other)
    return Truth((low <= 0) & (high >= 0), (low == 0) & (high == 0))

  def __gt__(self, other: Any) -> Truth:
    return ~(self <= other)

  def __ge__(self, other: Any) -> Truth:
    return ~(self < other)

  def __ne__(self, other: Any) -> Truth:  # type: ignore[override]
    return ~(self == other)

  __hash__ = None  # type: ignore[assignment]


class QueryPlusKey(Integer):
  """An integer u(query) + v(key), with both terms known at every position.

  Each term is an array of its values at all positions, in the order of the
  tiles, or a single integer. Integers of any other form are `Interval`s.
  """

  def __init__(self, pairs: TilePairs, u: Array, v: Array):
    self.pairs = pairs
    self.u = u
    self.v = v

  def bounds(self) -> tuple[Array, Array]:
    return self._reduce(np.minimum), self._reduce(np.maximum)

  def _reduce(self, ufunc):
    # Query and key vary independently, so the bounds of the sum are the sums of
    # the bounds.
    u = self.pairs.reduce(ufunc, self.u, self.pairs.rows)
    v = self.pairs.reduce(ufunc, self.v, self.pairs.cols)
    return np.asarray(u + v)

  def __eq__(self, other: Any) -> Truth:  # type: ignore[override]
    equal = super().__eq__(other)
    difference = self - other
    if not isinstance(difference, QueryPlusKey):
      return equal

    # Bounds may overlap although no values are equal, as happens with residues.
    possible = self.pairs.may_be_equal(difference.u, difference.v * -1)
    return Truth(equal.may & possible, equal.must)

  __hash__ = None  # type: ignore[assignment]

  def _map(self, function: Callable[[Any], Any]) -> Any:
    """Applies a function to all values, or to bounds.

    If the integer depends only on the query or only on the key, the function is
    applied to each value. Otherwise, it is applied to the bounds of the sum.

    Args:
      function: maps an array of integers, or an `Interval`.
    """
    if np.ndim(self.v) == 0:
      return QueryPlusKey(self.pairs, function(self.u + self.v), 0)
    if np.ndim(self.u) == 0:
      return QueryPlusKey(self.pairs, 0, function(self.u + self.v))
    return function(Interval(*self.bounds()))

  def __add__(self, other: Any) -> Any:
    if isinstance(other, Interval):
      return other + self
    if isinstance(other, QueryPlusKey):
      return QueryPlusKey(self.pairs, self.u + other.u, self.v + other.v)
    return QueryPlusKey(self.pairs, self.u + _constant(other), self.v)

  def __mul__(self, other: Any) -> Any:
    if isinstance(other, QueryPlusKey):
      # The product is exact if both depend only on the query, or only on the
      # key.
      is_of_query = np.ndim(self.v) == np.ndim(other.v) == 0
      is_of_key = np.ndim(self.u) == np.ndim(other.u) == 0
      if is_of_query or is_of_key:
        value = other.u + other.v
        return self._map(lambda x: x * value)
    if isinstance(other, Integer):
      return Interval(*self.bounds()) * other

    factor = _constant(other)
    return QueryPlusKey(
      self.pairs,
      self.u * factor,
      self.v * factor,
    )

  def __abs__(self) -> Any:
    return self._map(abs)

  def __floordiv__(self, divisor: int) -> Any:
    divisor = _divisor(divisor)
    return self._map(lambda x: x // divisor)

  def __mod__(self, divisor: int) -> Any:
    divisor = _divisor(divisor)
    # Take the residues of both terms before adding them. If each term has a
    # single residue in a tile, the sum then has a single residue too, however
    # wide the bounds of the terms are.
    residues = QueryPlusKey(self.pairs, self.u % divisor, self.v % divisor)
    return residues._map(lambda x: x % divisor)


class Interval(Integer):
  """An integer between `low` and `high`, both included, for each tile pair."""

  def __init__(self, low: Array, high: Array):
    self.low = low
    self.high = high

  def bounds(self) -> tuple[Array, Array]:
    return self.low, self.high

  def _difference(self, other: Any) -> tuple[Array, Array]:
    low, high = _bounds(other)
    return self.low - high, self.high - low

  def __add__(self, other: Any) -> "Interval":
    low, high = _bounds(other)
    return type(self)(self.low + low, self.high + high)

  def __abs__(self) -> "Interval":
    # The lower bound is 0 if the interval contains 0. Otherwise it is the
    # magnitude of the bound that is nearer to 0.
    low = np.maximum(np.maximum(self.low, -self.high), 0)
    high = np.maximum(-self.low, self.high)
    return type(self)(low, high)

  def __mul__(self, other: Any) -> "Interval":
    # The extremes of a product of intervals are products of their bounds.
    corners = [x * y for x in self.bounds() for y in _bounds(other)]
    return type(self)(np.minimum.reduce(corners), np.maximum.reduce(corners))

  def __floordiv__(self, divisor: int) -> "Interval":
    divisor = _divisor(divisor)
    return type(self)(self.low // divisor, self.high // divisor)

  def __mod__(self, divisor: int) -> "Interval":
    divisor = _divisor(divisor)
    # Within one period, residues increase with the value. In an interval that
    # spans several periods, any residue may occur.
    is_one_period = self.low // divisor == self.high // divisor
    return type(self)(
      np.where(is_one_period, self.low % divisor, 0),
      np.where(is_one_period, self.high % divisor, divisor - 1),
    )


class Int32(Interval):
  """A single interval; bounds must fit in int32, which devices compute with.

  Operations return intervals of this class, so every intermediate value is
  checked.

  Raises:
    OverflowError: a value may not fit.
  """

  def __init__(self, low: int, high: int):
    largest = max(abs(int(low)), abs(int(high)))
    if largest >= LIMIT:
      raise OverflowError(f"an intermediate value may reach {largest:,}")
    super().__init__(low, high)


def _bounds(x):
  """Returns the smallest and the largest value of any integer."""
  if isinstance(x, Integer):
    return x.bounds()
  value = _constant(x)
  return value, value


def _constant(x):
  """Checks and returns an integer constant of a mask.

  Arrays and floats raise a TypeError.
  """
  value = operator.index(x)
  if abs(value) >= LIMIT:
    raise OverflowError(f"a constant is {value:,}")
  return value


def _divisor(x):
  """Checks and returns a divisor.

  The divisor must be positive, because a negative divisor would swap the lower
  and the upper bound.
  """
  value = _constant(x)
  if value <= 0:
    raise TypeError(f"a mask may divide by positive integers only, got {x}")
  return value
