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
  """A set of pairs (query, key), both counted from 0.

  A subclass is a frozen dataclass that defines `mask`, and `orders` if its
  pairs are scattered in natural order.
  """

  def mask(self, q: Integers, k: Integers) -> Booleans:
    """The definition: which pairs are in the set.

    It may use + - * // % abs < <= > >= == != & | ~ only, and divide by
    positive integers only, so that NumPy, XLA and the interval arithmetic of
    layouts share it. All intermediate values must fit in 32 bits: a product of
    two positions may not. `check` verifies this.

    Args:
      q, k: positions of queries and of keys, of shapes that broadcast. A
        condition on one side may have the shape of that side.
    """
    raise NotImplementedError(f"{type(self).__name__} defines no mask")

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders of queries and of keys in which the pairs fill whole tiles.

    They are permutations of range(n), as `check` verifies; by default, natural.
    """
    return np.arange(n), np.arange(n)

  def parts(self) -> tuple["Pattern", ...]:
    """Disjoint patterns whose union is this one, each with its own orders."""
    return (self,)

  def beginning(self, n: int) -> "Pattern":
    """This pattern for the first n positions.

    It is the pattern itself, unless that has a length of its own, as one made
    from a matrix does.
    """
    return self

  # What follows is for content-based patterns, see `content`: a static pattern
  # has none, and is its own static part.

  def contents(self) -> tuple[Any, ...]:
    """The content-based patterns in this one; none if it is static."""
    return ()

  def support(self) -> "Pattern":
    """A static pattern that has every pair that this one may have."""
    return self

  def split(self) -> tuple["Pattern | None", tuple["Pattern", ...]]:
    """Splits the pattern into disjoint patterns whose union it is.

    Returns:
      (the static part, or None without one; the content-based parts).
    """
    return self, ()

  def static_part(self) -> "Pattern":
    """The static part of `split`; a pattern without pairs if there is none."""
    static, _ = self.split()
    # No class stands for the empty set: subtract any pattern from itself.
    return self.support() - self.support() if static is None else static

  def bind(self, sets: Mapping["Pattern", "Pattern"]) -> "Pattern":
    """Replaces the content-based patterns by the sets that were found.

    Args:
      sets: for each of `contents`, its set of pairs for one batch.
    """
    return self

  def check(self, n: int) -> None:
    """Checks that the pattern is well defined for n positions.

    Whatever uses a pattern calls this, which is quick: the result is cached,
    and the mask is evaluated once, on bounds.

    Raises ValueError if the mask uses operators that are not allowed, does not
    return booleans, or has intermediate values that may not fit in 32 bits;
    `orders` are not permutations; the pattern has fields that cannot be hashed,
    or attributes that equality ignores; n is less than 1.
    """
    checks.check_pattern(self, n)

  def __or__(self, other: "Pattern") -> "Union":
    return Union(self, other)

  def __and__(self, other: "Pattern") -> "Intersection":
    return Intersection(self, other)

  def __sub__(self, other: "Pattern") -> "Difference":
    return Difference(self, other)

  def __bool__(self) -> bool:
    # Otherwise `p and q` would be q, without a word.
    raise TypeError(
      f"{checks.shorten(self)}: combine patterns with | & - only; Full() - p"
      " has all pairs but those of p"
    )

  def __str__(self) -> str:
    """The expression that `parse` reads back if the class is registered."""
    shown = []
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      # Required fields by position, the others by name, if they differ.
      if field.default is dataclasses.MISSING:
        shown.append(str(value))
      elif field.default != value:
        shown.append(f"{field.name}={value}")
    return f"{type(self).__name__}({', '.join(shown)})"

  def matrix(self, n: int) -> np.ndarray:
    """The set as booleans [n, n], with one row per query."""
    self.check(n)
    positions = np.arange(n)
    # A condition on queries or keys alone has the shape of its side.
    return np.broadcast_to(self.mask(positions[:, None], positions), (n, n))

  def keys(self, i: int, n: int) -> np.ndarray:
    """The sorted positions, among n, that query i attends to."""
    self.check(n)
    # The query is an array, since ~ makes an integer of a plain True or False.
    mask = self.mask(np.asarray(i), np.arange(n))
    return np.flatnonzero(np.broadcast_to(mask, n))

  def pairs(self, n: int) -> int:
    """The exact number of pairs among n positions, without n x n work."""
    self.check(n)
    return sum(layout_lib.pairs_of_part(part, n) for part in self.parts())

  def layout(self, n: int, tile: int) -> layout_lib.Layout:
    """The tiles that hold pairs, in this pattern's own orders."""
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
        f"{checks.shorten(self.left)}: combine patterns with | & - only, and"
        f" with patterns, not with {checks.shorten(repr(self.right))};"
        " parse(text) reads text"
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
    # This raises where content-based pairs are subtracted from static ones.
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
    # Parts in natural order run together.
    if all(_is_natural(part) for part in left + right):
      return (self,)

    # The left side keeps the pairs that both have: attention would otherwise
    # count them twice.
    return left + tuple(part - self.left for part in right)

  def split(self) -> tuple[Pattern | None, tuple[Pattern, ...]]:
    left_static, left_parts = self.left.split()
    right_static, right_parts = self.right.split()

    # Each pair is kept once, by the left side where both have it.
    right_parts = tuple(part - self.left for part in right_parts)
    if right_static is None:
      return left_static, left_parts + right_parts

    # The static pairs of the right side are kept by the static part instead: it
    # cannot lose pairs that are found at run time.
    static = right_static
    if left_static is not None:
      static = left_static | right_static
    left_parts = tuple(part - right_static for part in left_parts)
    return static, left_parts + right_parts


@dataclasses.dataclass(frozen=True)
class _Restriction(Combination):
  """Pairs of the left pattern that meet a condition, run in its orders."""

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    return self.left.orders(n)

  def parts(self) -> tuple[Pattern, ...]:
    return tuple(type(self)(part, self.right) for part in self.left.parts())


@dataclasses.dataclass(frozen=True)
class Intersection(_Restriction):
  """Pairs in both patterns, run in the orders of the left one."""

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

    # Content-based pairs come first: they decide the order of positions.
    static, right_parts = (self.right & static).split()
    return static, parts + right_parts


@dataclasses.dataclass(frozen=True)
class Difference(_Restriction):
  """Pairs of the left pattern that are not in the right one."""

  operator = "-"

  def mask(self, q: Integers, k: Integers) -> Booleans:
    left = self.left.mask(q, k)
    right = self.right.mask(q, k)
    # ~ makes an integer of a plain True or False.
    return left & (not right if isinstance(right, bool) else ~right)

  def support(self) -> Pattern:
    # Pairs that are subtracted for some content may stay for another.
    if self.right.contents():
      return self.left.support()
    return super().support()

  def split(self) -> tuple[Pattern | None, tuple[Pattern, ...]]:
    static, parts = self.left.split()
    parts = tuple(part - self.right for part in parts)
    if static is None:
      return None, parts

    # Static pairs are laid out before any content is known.
    if self.right.contents():
      raise ValueError(
        f"{checks.shorten(self)} subtracts content-based pairs from"
        f" {checks.shorten(static)}, which is static: only a"
        " content-based pattern can lose such pairs"
      )
    return static - self.right, parts


def _is_natural(pattern):
  """Returns whether the pairs of a part fill tiles in natural order."""
  # Restrictions run in the orders of their left side.
  if isinstance(pattern, _Restriction):
    return _is_natural(pattern.left)
  return type(pattern).orders is Pattern.orders


class Checked(Pattern):
  """A pattern whose integers are at least 1, or 0 if that is their default."""

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      if field.type is int:
        check_fields(self, field.name, minimum=int(field.default != 0))
        # NumPy's integers become Python's, whose text `parse` reads.
        object.__setattr__(self, field.name, int(getattr(self, field.name)))


def check_fields(pattern: Pattern, *fields: str, minimum: int = 1) -> None:
  """Checks the fields of a pattern, and `causal` if it has one.

  Args:
    pattern: a dataclass.
    *fields: names of fields that must be integers.
    minimum: the least value of each.

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
  """Adds a class of patterns to `CATALOGUE`, or to `CONTENT`.

  Expressions (`parse`) can then name it. A class defined again, as in a
  notebook, replaces itself. Returns the class, so that this is a decorator.

  Raises:
    ValueError: another class has its name.
  """
  known = (CATALOGUE | CONTENT).get(cls.__name__, cls)
  # The place tells a class that is defined again from another of its name.
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
  """Returns the expression of a class of patterns: its name and arguments."""
  parameters = inspect.signature(cls).parameters.values()
  # Without types: error messages and tables show what to write.
  plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
  return f"{cls.__name__}{inspect.Signature(plain)}"
