"""Patterns: sets of pairs (query, key), their definition and their algebra."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from sparse_transformer.patterns import checks, intervals, layout as layout_lib

# NumPy or JAX arrays, possibly traced, or the tile values of `intervals`.
Integers: TypeAlias = Any
Booleans: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Pattern:
  """A set of pairs (query, key) of positions, which are counted from 0.

  A subclass is a frozen dataclass that defines `mask`. If the pairs are
  scattered in the natural order of positions, the subclass also defines
  `orders`.
  """

  def mask(self, q: Integers, k: Integers) -> Booleans:
    """Returns whether pairs are in the set. This defines the pattern.

    The mask may use only + - * // % abs < <= > >= == != & | ~, and may divide
    only by positive integers, because NumPy, XLA and the interval arithmetic of
    layouts all evaluate it. All intermediate values must fit in 32 bits. A
    product of two positions, for example, may be too large. `check` verifies
    these rules.

    Args:
      q, k: positions of queries and of keys, integers whose shapes broadcast.

    Returns:
      Booleans of the broadcast shape. A mask that depends only on `q`, or only
      on `k`, may keep the shape of that argument.
    """
    raise NotImplementedError(f"{type(self).__name__} defines no mask")

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns orders of queries and keys in which the pairs fill whole tiles.

    Both are permutations of range(n), as `check` verifies. The default is the
    natural order.
    """
    return np.arange(n), np.arange(n)

  def parts(self) -> tuple["Pattern", ...]:
    """Splits the pattern into disjoint patterns, each with its own orders."""
    return (self,)

  def beginning(self, n: int) -> "Pattern":
    """Returns this pattern, restricted to the first n positions.

    Most patterns are defined for any length and return themselves. A pattern
    made from a matrix has a fixed length and is cut.
    """
    return self

  # The next methods are about content-based patterns, see `content`. A static
  # pattern contains none, so it is its own support and its own static part.

  def contents(self) -> tuple[Any, ...]:
    """Returns the content-based patterns in this one, or () if it is static."""
    return ()

  def support(self) -> "Pattern":
    """Returns a static pattern that contains every pair this one may have."""
    return self

  def split(self) -> tuple["Pattern | None", tuple["Pattern", ...]]:
    """Splits the pattern into disjoint static and content-based parts.

    Returns:
      (static part, content-based parts). The static part is None if there is
      none.
    """
    return self, ()

  def static_part(self) -> "Pattern":
    """Returns the static part of `split`, or a pattern without pairs."""
    static, _ = self.split()
    # No class represents the empty set, so subtract a pattern from itself.
    return self.support() - self.support() if static is None else static

  def bind(self, sets: Mapping["Pattern", "Pattern"]) -> "Pattern":
    """Replaces each content-based pattern with the pairs found for it.

    Args:
      sets: maps each pattern in `contents` to the set of pairs found for one
        batch.
    """
    return self

  def check(self, n: int) -> None:
    """Checks that the pattern is well defined for n positions.

    All code that uses a pattern calls this first. The check is fast: it
    evaluates the mask only once, on an interval of positions, and caches the
    result.

    Raises ValueError in any of these cases: the mask uses operators that are
    not allowed, does not return booleans, or has intermediate values that may
    not fit in 32 bits; `orders` does not return permutations; the pattern has
    fields that cannot be hashed, or attributes that equality ignores; n is less
    than 1 or does not fit in 32 bits.
    """
    checks.check_pattern(self, n)

  def __or__(self, other: "Pattern") -> "Union":
    return Union(self, other)

  def __and__(self, other: "Pattern") -> "Intersection":
    return Intersection(self, other)

  def __sub__(self, other: "Pattern") -> "Difference":
    return Difference(self, other)

  def __bool__(self) -> bool:
    # Without this error, `p and q` would silently return q.
    raise TypeError(
      f"{checks.shorten(self)}: combine patterns with | & - only; write"
      " Full() - p for all pairs that are not in p"
    )

  def __str__(self) -> str:
    """Returns an expression that `parse` reads if the class is registered."""
    shown = []
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      # Required fields are shown by position. Others are shown by name, and
      # only if they differ from their defaults.
      if field.default is dataclasses.MISSING:
        shown.append(str(value))
      elif field.default != value:
        shown.append(f"{field.name}={value}")
    return f"{type(self).__name__}({', '.join(shown)})"

  def matrix(self, n: int) -> np.ndarray:
    """Returns the set as a boolean matrix [n, n] with one row per query."""
    self.check(n)
    positions = np.arange(n)
    # A mask that depends only on queries or only on keys may have the shape of
    # that side alone.
    return np.broadcast_to(self.mask(positions[:, None], positions), (n, n))

  def keys(self, i: int, n: int) -> np.ndarray:
    """Returns the sorted positions, out of n, that query i attends to."""
    self.check(n)
    # The query is an array, because a mask of a plain integer may be a plain
    # bool, for which ~ returns an integer.
    mask = self.mask(np.asarray(i), np.arange(n))
    return np.flatnonzero(np.broadcast_to(mask, n))

  def pairs(self, n: int) -> int:
    """Counts the pairs among n positions exactly, without n x n work."""
    self.check(n)
    return sum(layout_lib.pairs_of_part(part, n) for part in self.parts())

  def layout(self, n: int, tile: int) -> layout_lib.Layout:
    """Returns the tiles that contain pairs, in this pattern's own orders."""
    self.check(n)
    return layout_lib.lay_out(self, n, tile)


@dataclasses.dataclass(frozen=True)
class Combination(Pattern):
  """Two patterns, combined by an operator."""

  left: Pattern
  right: Pattern

  operator: ClassVar[str]

  def __post_init__(self) -> None:
    if not isinstance(self.right, Pattern):
      raise TypeError(
        f"{checks.shorten(self.left)}: | & - combine a pattern only with"
        f" another pattern, not with {checks.shorten(repr(self.right))};"
        " parse(text) makes a pattern from text"
      )

  def beginning(self, n: int) -> Pattern:
    return type(self)(self.left.beginning(n), self.right.beginning(n))

  def contents(self) -> tuple[Any, ...]:
    both = self.left.contents() + self.right.contents()
    return tuple(dict.fromkeys(both))

  def support(self) -> Pattern:
    return type(self)(self.left.support(), self.right.support())

  def bind(self, sets: Mapping[Pattern, Pattern]) -> Pattern:
    return type(self)(self.left.bind(sets), self.right.bind(sets))

  def check(self, n: int) -> None:
    self.left.check(n)
    self.right.check(n)
    # `split` raises an error if content-based pairs are subtracted from static
    # ones.
    self.split()

  def __str__(self) -> str:
    sides = []
    for side in (self.left, self.right):
      is_nested = isinstance(side, Combination)
      sides.append(f"({side})" if is_nested else str(side))
    return f" {self.operator} ".join(sides)


@dataclasses.dataclass(frozen=True)
class Union(Combination):
  """Pairs in either pattern."""

  operator = "|"

  def mask(self, q: Integers, k: Integers) -> Booleans:
    return self.left.mask(q, k) | self.right.mask(q, k)

  def parts(self) -> tuple[Pattern, ...]:
    left = self.left.parts()
    right = self.right.parts()
    # Parts that are all in natural order run as a single part.
    if all(_is_natural(part) for part in left + right):
      return (self,)

    # Pairs that both sides contain are removed from the right side, because
    # attention would otherwise count them twice.
    return left + tuple(part - self.left for part in right)

  def split(self) -> tuple[Pattern | None, tuple[Pattern, ...]]:
    left_static, left_parts = self.left.split()
    right_static, right_parts = self.right.split()

    # Pairs that both sides contain are removed from the right side.
    right_parts = tuple(part - self.left for part in right_parts)
    if right_static is None:
      return left_static, left_parts + right_parts

    # Static pairs of the right side are an exception. They stay in the static
    # part, because pairs that are found at run time cannot be removed from it.
    # Instead, they are removed from the content-based parts of the left side.
    static = right_static
    if left_static is not None:
      static = left_static | right_static
    left_parts = tuple(part - right_static for part in left_parts)
    return static, left_parts + right_parts


@dataclasses.dataclass(frozen=True)
class _Restriction(Combination):
  """Pairs of `left` that meet a condition, in the orders of `left`."""

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    return self.left.orders(n)

  def parts(self) -> tuple[Pattern, ...]:
    return tuple(type(self)(part, self.right) for part in self.left.parts())


@dataclasses.dataclass(frozen=True)
class Intersection(_Restriction):
  """Pairs in both patterns, in the orders of the left one."""

  operator = "&"

  def mask(self, q: Integers, k: Integers) -> Booleans:
    return self.left.mask(q, k) & self.right.mask(q, k)

  def split(self) -> tuple[Pattern | None, tuple[Pattern, ...]]:
    static, parts = self.left.split()
    parts = tuple(part & self.right for part in parts)
    if static is None:
      return None, parts
    if not self.right.contents():
      return static & self.right, parts

    # Content-based pairs go to the left side, because the left side determines
    # the order of positions.
    static, right_parts = (self.right & static).split()
    return static, parts + right_parts


@dataclasses.dataclass(frozen=True)
class Difference(_Restriction):
  """Pairs of the left pattern that are not in the right one."""

  operator = "-"

  def mask(self, q: Integers, k: Integers) -> Booleans:
    left = self.left.mask(q, k)
    right = self.right.mask(q, k)
    # For a plain Python bool, ~ would return an integer.
    return left & (not right if isinstance(right, bool) else ~right)

  def support(self) -> Pattern:
    # Whether the content-based pairs on the right are subtracted depends on the
    # content, so the support keeps them.
    if self.right.contents():
      return self.left.support()
    return super().support()

  def split(self) -> tuple[Pattern | None, tuple[Pattern, ...]]:
    static, parts = self.left.split()
    parts = tuple(part - self.right for part in parts)
    if static is None:
      return None, parts

    # Static pairs are laid out before any content is known, so content-based
    # pairs cannot be subtracted from them.
    if self.right.contents():
      raise ValueError(
        f"{checks.shorten(self)} subtracts content-based pairs from"
        f" {checks.shorten(static)}, which is static; subtract them from a"
        " content-based pattern only"
      )
    return static - self.right, parts


def _is_natural(pattern):
  """Returns whether a part keeps positions in natural order."""
  # Restrictions use the orders of their left side.
  if isinstance(pattern, _Restriction):
    return _is_natural(pattern.left)
  return type(pattern).orders is Pattern.orders


class Checked(Pattern):
  """A pattern whose integer fields are checked.

  Each integer field must be at least 1, or at least 0 if its default is 0.
  """

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      if field.type is int:
        check_fields(self, field.name, minimum=int(field.default != 0))
        # NumPy integers become plain Python integers.
        object.__setattr__(self, field.name, int(getattr(self, field.name)))


def check_fields(pattern: Pattern, *fields: str, minimum: int = 1) -> None:
  """Checks integer fields of a pattern, and `causal` if it has that field.

  Args:
    pattern: a dataclass.
    *fields: names of fields that must be integers.
    minimum: the smallest allowed value of each field.

  Raises:
    ValueError: a field is not an integer of at least `minimum` that fits in 32
      bits, or `causal` is not a boolean.
  """
  for field in fields:
    value = getattr(pattern, field)
    is_integer = isinstance(value, (int, np.integer))

    # Python's booleans are integers.
    if not is_integer or isinstance(value, bool):
      _refuse(pattern, field, "an integer")
    if not minimum <= value < intervals.LIMIT:
      _refuse(pattern, field, f"at least {minimum}, and fit in 32 bits")

  if not isinstance(getattr(pattern, "causal", True), (bool, np.bool_)):
    _refuse(pattern, "causal", "True or False")


def _refuse(pattern, field, rule):
  value = repr(getattr(pattern, field))
  raise ValueError(
    f"{checks.shorten(pattern)}: {field} must be {rule}, not"
    f" {checks.shorten(value)}"
  )


CATALOGUE: dict[str, type[Pattern]] = {}
CONTENT: dict[str, type[Pattern]] = {}  # the content-based ones

_Class = TypeVar("_Class", bound=type[Pattern])


def register(cls: _Class) -> _Class:
  """Adds a pattern class to `CATALOGUE`, or to `CONTENT` if content-based.

  Expressions that `parse` reads can then use the class. A class that is defined
  again, as in a notebook, replaces its earlier version. Returns the class, so
  that `register` can be used as a decorator.

  Raises:
    ValueError: a different class is registered under the same name.
  """
  known = (CATALOGUE | CONTENT).get(cls.__name__, cls)
  # The module and the qualified name distinguish a class that is defined again
  # from a different class of the same name.
  place = cls.__module__, cls.__qualname__
  if place != (known.__module__, known.__qualname__):
    raise ValueError(
      f"a pattern {cls.__name__} already exists in {known.__module__}; "
      "choose another name"
    )

  is_static = cls.contents is Pattern.contents
  registry = CATALOGUE if is_static else CONTENT
  registry[cls.__name__] = cls
  return cls


def signature(cls: type[Pattern]) -> str:
  """Returns the name and the arguments of a pattern class, as a call."""
  parameters = inspect.signature(cls).parameters.values()
  # Types are left out, because error messages and tables show what to write.
  plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
  return f"{cls.__name__}{inspect.Signature(plain)}"
