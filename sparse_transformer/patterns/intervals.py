"""Runs a pattern's mask on whole tiles at once, by bounds on integers.

A mask uses integer operators only, so it runs on anything that has them:
NumPy arrays, traced arrays, and the sets of integers of this module (interval
arithmetic). Given tiles of queries and tiles of keys it says, for each pair of
tiles, whether some pair of positions may be in the pattern and whether all
must be. Both answers are safe: an undecided tile pair is "may, not must".
"""

import numpy as np


class Grid:
  """Pairs (rows, cols) of tiles of `size` positions, decided together."""

  def __init__(self, size, rows, cols):
    self.size, self.rows, self.cols = size, rows, cols

  def query(self, positions):
    return Sum(self, positions, 0)

  def key(self, positions):
    return Sum(self, 0, positions)

  def reduce(self, ufunc, values, index):
    """One value a tile pair: `ufunc` over the positions of its tile."""
    if np.ndim(values) == 0:
      return values
    starts = np.arange(0, len(values), self.size)
    return ufunc.reduceat(values, starts)[index]

  def meets(self, u, v):
    """Whether some u of the queries may equal some v of the keys.

    Some value of the side that is more scattered within its tiles must lie
    between the smallest and the largest of the other. Always true where there
    are few tile pairs, which cost less than finding out.
    """
    if np.ndim(u) == 0 or np.ndim(v) == 0:
      return True
    tiles = np.arange(len(u)) // self.size
    if len(self.rows) < 64 * (tiles[-1] + 1):
      return True
    sides = (u, self.rows), (v, self.cols)
    (x, x_tiles), (y, y_tiles) = sorted(
      sides, key=lambda side: -self._spread(side[0])
    )
    # One number a position, sorted: those of a tile side by side.
    low, width = min(x.min(), y.min()), 1 + int(np.ptp(np.concatenate([x, y])))
    sorted_x = np.sort(tiles * width + (x - low))
    begin, end = (
      x_tiles * width + (self.reduce(ufunc, y, y_tiles) - low)
      for ufunc in (np.minimum, np.maximum)
    )
    return np.searchsorted(sorted_x, begin) < np.searchsorted(
      sorted_x, end, side="right"
    )

  def _spread(self, values):
    """The distances between the ends of the values of a tile, summed."""
    low, high = (
      self.reduce(ufunc, values, slice(None))
      for ufunc in (np.minimum, np.maximum)
    )
    return (high - low).sum()


class Truth:
  """Booleans of tile pairs: true somewhere (`may`), everywhere (`must`)."""

  def __init__(self, may, must):
    self.may, self.must = may, must

  def __and__(self, other):
    other = truth(other)
    return Truth(self.may & other.may, self.must & other.must)

  def __or__(self, other):
    other = truth(other)
    return Truth(self.may | other.may, self.must | other.must)

  def __invert__(self):
    return Truth(np.logical_not(self.must), np.logical_not(self.may))

  def __bool__(self):
    raise TypeError("a mask joins conditions with & | ~, not with and/or/not")

  __rand__, __ror__ = __and__, __or__


class _Number:
  """Operators shared by the two kinds of unknown integers."""

  def __radd__(self, other):
    return self + other

  def __rmul__(self, other):
    return self * other

  def __neg__(self):
    return self * -1

  def __sub__(self, other):
    return self + other * -1

  def __rsub__(self, other):
    return self * -1 + other

  def __lt__(self, other):
    low, high = (self - other).limits()
    return Truth(low < 0, high < 0)

  def __le__(self, other):
    low, high = (self - other).limits()
    return Truth(low <= 0, high <= 0)

  def __eq__(self, other):
    low, high = (self - other).limits()
    return Truth((low <= 0) & (high >= 0), (low == 0) & (high == 0))

  def __gt__(self, other):
    return ~(self <= other)

  def __ge__(self, other):
    return ~(self < other)

  def __ne__(self, other):
    return ~(self == other)

  __hash__ = None

  def _interval(self):
    return Interval(*self.limits())


class Sum(_Number):
  """u(query) + v(key), with the value of u and v known at every position."""

  def __init__(self, grid, u, v):
    self.grid, self.u, self.v = grid, u, v

  def limits(self):
    """Smallest and largest value in each tile pair."""
    return tuple(
      np.asarray(
        self.grid.reduce(ufunc, self.u, self.grid.rows)
        + self.grid.reduce(ufunc, self.v, self.grid.cols)
      )
      for ufunc in (np.minimum, np.maximum)
    )

  def __eq__(self, other):
    equal, difference = super().__eq__(other), self - other
    if not isinstance(difference, Sum):
      return equal
    meets = self.grid.meets(difference.u, difference.v * -1)
    return Truth(equal.may & meets, equal.must)

  __hash__ = None

  def _map(self, f):
    """f of the value, where only one side varies; None where both do."""
    if np.ndim(self.v) == 0:
      return Sum(self.grid, f(self.u + self.v), 0)
    if np.ndim(self.u) == 0:
      return Sum(self.grid, 0, f(self.u + self.v))
    return None

  def __add__(self, other):
    if isinstance(other, Interval):
      return other + self
    u, v = (other.u, other.v) if isinstance(other, Sum) else (other, 0)
    return Sum(self.grid, self.u + u, self.v + v)

  def __mul__(self, other):
    if isinstance(other, Sum):
      # Exact where both depend on the query only, or on the key only.
      if np.ndim(self.v) == np.ndim(other.v) == 0:
        return Sum(self.grid, (self.u + self.v) * (other.u + other.v), 0)
      if np.ndim(self.u) == np.ndim(other.u) == 0:
        return Sum(self.grid, 0, (self.u + self.v) * (other.u + other.v))
    if isinstance(other, _Number):
      return self._interval() * other
    return Sum(self.grid, self.u * other, self.v * other)

  def __floordiv__(self, divisor):
    _check_divisor(divisor)
    exact = self._map(lambda x: x // divisor)
    return self._interval() // divisor if exact is None else exact

  def __mod__(self, divisor):
    _check_divisor(divisor)
    # Residues are taken side by side before they are added: two tiles with
    # one residue each then give one residue, however far apart they lie.
    exact = self._map(lambda x: x % divisor)
    if exact is not None:
      return exact
    residues = Sum(self.grid, self.u % divisor, self.v % divisor)
    return residues._interval() % divisor


class Interval(_Number):
  """An integer between `low` and `high`, both included, for each tile pair."""

  def __init__(self, low, high):
    self.low, self.high = low, high

  def limits(self):
    return self.low, self.high

  def __add__(self, other):
    low, high = _limits(other)
    return Interval(self.low + low, self.high + high)

  def __mul__(self, other):
    corners = [a * b for a in self.limits() for b in _limits(other)]
    return Interval(np.minimum.reduce(corners), np.maximum.reduce(corners))

  def __floordiv__(self, divisor):
    _check_divisor(divisor)
    return Interval(self.low // divisor, self.high // divisor)

  def __mod__(self, divisor):
    _check_divisor(divisor)
    same = self.low // divisor == self.high // divisor
    return Interval(
      np.where(same, self.low % divisor, 0),
      np.where(same, self.high % divisor, divisor - 1),
    )


def _limits(x):
  return x.limits() if isinstance(x, _Number) else (x, x)


def truth(x):
  """A condition as a `Truth`; one that depends on nothing is True or False."""
  return x if isinstance(x, Truth) else Truth(np.bool_(x), np.bool_(x))


def _check_divisor(divisor):
  if isinstance(divisor, _Number) or divisor <= 0:
    raise TypeError(
      f"a mask divides by positive integers only, got {divisor!r}"
    )
