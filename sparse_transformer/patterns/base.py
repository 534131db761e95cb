"""A pattern is a set of pairs (query, key): its base class and its algebra."""

import dataclasses
import itertools

import numpy as np

from sparse_transformer.patterns import layout as layout_lib


@dataclasses.dataclass(frozen=True)
class Pattern:
  """A set of pairs (query, key), both counted from 0.

  A subclass defines `mask`, and `orders` where its pairs lie scattered in
  natural order.
  """

  def mask(self, q, k):
    """Which pairs are in the set: integer arrays in, booleans out.

    Uses + - * // % < <= == & | ~ only, and divides by positive integers, so
    that NumPy, XLA and the bounds of whole tiles share this one definition.
    All values must fit 32 bits: a product of two positions may not.
    """
    raise NotImplementedError(f"{type(self).__name__} defines no mask")

  def orders(self, n):
    """(query order, key order): orders of positions in which tiles fill.

    Each is a permutation of range(n); natural order unless overridden.
    """
    return np.arange(n), np.arange(n)

  def parts(self):
    """Disjoint patterns whose union is this one; each has its own orders."""
    return (self,)

  def __or__(self, other):
    return Union(self, other)

  def __and__(self, other):
    return Intersection(self, other)

  def __sub__(self, other):
    return Difference(self, other)

  def __bool__(self):
    raise TypeError("combine patterns with | & -, not with and/or/not")

  def __str__(self):
    """An expression that `parse` reads, if the pattern is of this module."""
    required = [
      str(getattr(self, field.name))
      for field in dataclasses.fields(self)
      if field.default is dataclasses.MISSING
    ]
    changed = [
      f"{field.name}={getattr(self, field.name)}"
      for field in dataclasses.fields(self)
      if field.default not in (dataclasses.MISSING, getattr(self, field.name))
    ]
    return f"{type(self).__name__}({', '.join(required + changed)})"

  def matrix(self, n):
    """The set as booleans [n, n], row = query: reference and picture."""
    i = np.arange(n)
    return np.broadcast_to(self.mask(i[:, None], i), (n, n))

  def keys(self, i, n):
    """The sorted positions that query i attends to."""
    k = np.arange(n)
    return np.flatnonzero(np.broadcast_to(self.mask(i, k), (n,)))

  def pairs(self, n):
    """The exact number of pairs, without an n x n array."""
    return sum(layout_lib.count_pairs(part, n) for part in self.parts())

  def layout(self, n, tile):
    """The tiles that hold pairs, in this pattern's own orders: a `Layout`."""
    return layout_lib.make_layout(self, n, tile)


@dataclasses.dataclass(frozen=True)
class Union(Pattern):
  """Pairs in either pattern."""

  left: Pattern
  right: Pattern

  def __str__(self):
    return f"{_operand(self.left)} | {_operand(self.right)}"

  def mask(self, q, k):
    return self.left.mask(q, k) | self.right.mask(q, k)

  def parts(self):
    parts = self.left.parts(), self.right.parts()
    # What runs in natural order runs together.
    if all(_is_natural(part) for part in itertools.chain(*parts)):
      return (self,)
    return parts[0] + tuple(part - self.left for part in parts[1])


@dataclasses.dataclass(frozen=True)
class Intersection(Pattern):
  """Pairs in both patterns, run in the orders of the left one."""

  left: Pattern
  right: Pattern

  def __str__(self):
    return f"{_operand(self.left)} & {_operand(self.right)}"

  def mask(self, q, k):
    return self.left.mask(q, k) & self.right.mask(q, k)

  def orders(self, n):
    return self.left.orders(n)

  def parts(self):
    parts = self.left.parts()
    return tuple(p & self.right for p in parts) if len(parts) > 1 else (self,)


@dataclasses.dataclass(frozen=True)
class Difference(Pattern):
  """Pairs of the left pattern that are not in the right one."""

  left: Pattern
  right: Pattern

  def __str__(self):
    return f"{_operand(self.left)} - {_operand(self.right)}"

  def mask(self, q, k):
    return self.left.mask(q, k) & ~self.right.mask(q, k)

  def orders(self, n):
    return self.left.orders(n)

  def parts(self):
    parts = self.left.parts()
    return tuple(p - self.right for p in parts) if len(parts) > 1 else (self,)


def _operand(pattern):
  combined = isinstance(pattern, (Union, Intersection, Difference))
  return f"({pattern})" if combined else str(pattern)


def _is_natural(pattern):
  """Whether a pattern that is one part runs in natural order."""
  match pattern:
    case Intersection(left, _) | Difference(left, _):
      return _is_natural(left)
  return type(pattern).orders is Pattern.orders


def check_positive(pattern, *fields):
  _check_integers(pattern, *fields)
  for field in fields:
    if getattr(pattern, field) < 1:
      raise ValueError(f"{pattern}: {field} must be at least 1")


def check_not_negative(pattern, *fields):
  _check_integers(pattern, *fields)
  for field in fields:
    if getattr(pattern, field) < 0:
      raise ValueError(f"{pattern}: {field} must not be negative")


def _check_integers(pattern, *fields):
  for field in fields:
    value = getattr(pattern, field)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
      raise ValueError(f"{pattern}: {field} must be an integer")
    if abs(value) >= 2**31:
      raise ValueError(f"{pattern}: {field} must fit 32 bits")
  if not isinstance(getattr(pattern, "causal", True), (bool, np.bool_)):
    raise ValueError(f"{pattern}: causal must be True or False")
