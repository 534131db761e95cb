"""Patterns: sets of pairs (query, key), their definition and their algebra."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar

import numpy as np

from sparse_transformer.patterns import checks, intervals, layout as layout_lib

# NumPy or JAX arrays, possibly traced, or the tile values of `intervals`.
Integers: TypeAlias = Any
Booleans: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Pattern:
  """A set of pairs (query, key), both counted from 0.

  A subclass is a frozen dataclass that defines `mask`, `orders` if its pairs
  are scattered in natural order, and `examples` if it is registered.
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
    """The pairs of the first n positions, if it has a length of its own."""
    return self

  def contents(self) -> tuple[Any, ...]:
    """The `content.Content` that this pattern is made of; none if static."""
    return ()

  def support(self) -> "Pattern":
    """A static pattern that has all its pairs, whatever the content."""
    return self

  def split(self) -> tuple["Pattern | None", tuple["Pattern", ...]]:
    """Its static part, and disjoint content-based parts."""
    return self, ()

  def static_part(self) -> "Pattern":
    """Its static part, which may have no pairs."""
    static, _ = self.split()
    return self.support() - self.support() if static is None else static

  def bind(self, sets: Mapping["Pattern", "Pattern"]) -> "Pattern":
    """This pattern with its `contents` replaced by what they were bound to."""
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

  @classmethod
  def examples(cls) -> "Examples":
    """The examples that tests and benchmarks run over."""
    raise NotImplementedError(f"{cls.__name__} defines no examples")

  def __or__(self, other: "Pattern") -> "Union":
    return Union(self, other)

  def __and__(self, other: "Pattern") -> "Intersection":
    return Intersection(self, other)

  def __sub__(self, other: "Pattern") -> "Difference":
    return Difference(self, other)

  def _refuse(self, *others: object) -> NoReturn:
    """Raises the TypeError of all other operators and operands."""
    wrong = [x for x in others if not isinstance(x, Pattern)]
    given = "".join(f", not with {checks.shorten(repr(x))}" for x in wrong)
    raise TypeError(
      f"{checks.shorten(self)}: combine patterns with | & - only, and with"
      f" patterns{given}; parse(text) reads text, and Full() - p has all pairs"
      " but those of p"
    )

  __ror__ = __rand__ = __rsub__ = __bool__ = __invert__ = __neg__ = _refuse
  __add__ = __radd__ = __mul__ = __rmul__ = __xor__ = __rxor__ = _refuse

  def __str__(self) -> str:
    """The expression that `parse` reads back if the class is registered."""
    shown = []
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.default is dataclasses.MISSING:
        shown.append(str(value))
      elif field.default != value:
        shown.append(f"{field.name}={value}")
    return f"{type(self).__name__}({', '.join(shown)})"

  def matrix(self, n: int) -> np.ndarray:
    """The set as booleans [n, n], with one row per query."""
    self.check(n)
    i = np.arange(n)
    return np.broadcast_to(self.mask(i[:, None], i), (n, n))

  def keys(self, i: int, n: int) -> np.ndarray:
    """The sorted positions, among n, that query i attends to."""
    self.check(n)
    # An array: ~ makes an integer of a plain True or False.
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
class Examples:
  """Examples of one class of patterns, which tests and benchmarks run over."""

  _: dataclasses.KW_ONLY
  causal: tuple[Pattern, ...] = ()  # for sequences of about 100 positions
  bidirectional: tuple[Pattern, ...] = ()  # the same, where the class has some
  large: Pattern  # for a million positions
  # (i, n) -> how many keys the queries i, an array, of `large` have among n
  # positions, in closed form.
  num_keys: Callable[[np.ndarray, int], np.ndarray | int]

  @property
  def small(self) -> tuple[Pattern, ...]:
    """All examples but the large one."""
    return self.causal + self.bidirectional


@dataclasses.dataclass(frozen=True)
class Combination(Pattern):
  """Two patterns, combined by an operator."""

  left: Pattern
  right: Pattern

  operator: ClassVar[str]

  def __post_init__(self) -> None:
    if not isinstance(self.right, Pattern):
      self.left._refuse(self.right)

  def beginning(self, n: int) -> Pattern:
    return type(self)(self.left.beginning(n), self.right.beginning(n))

  def contents(self) -> tuple[Any, ...]:
    return (*dict.fromkeys(self.left.contents() + self.right.contents()),)

  def support(self) -> Pattern:
    return type(self)(self.left.support(), self.right.support())

  def bind(self, sets: Mapping[Pattern, Pattern]) -> Pattern:
    return type(self)(self.left.bind(sets), self.right.bind(sets))

  def check(self, n: int) -> None:
    self.left.check(n)
    self.right.check(n)
    self.split()
    for content in self.contents():
      content.check_within(self)

  def __str__(self) -> str:
    return f" {self.operator} ".join(
      f"({side})" if isinstance(side, Combination) else str(side)
      for side in (self.left, self.right)
    )


@dataclasses.dataclass(frozen=True)
class Union(Combination):
  """Pairs in either pattern."""

  operator = "|"

  def mask(self, q: Integers, k: Integers) -> Booleans:
    return self.left.mask(q, k) | self.right.mask(q, k)

  def parts(self) -> tuple[Pattern, ...]:
    left, right = self.left.parts(), self.right.parts()
    # Parts in natural order run together.
    if all(_is_natural(part) for part in left + right):
      return (self,)
    return left + tuple(part - self.left for part in right)

  def split(self) -> tuple[Pattern | None, tuple[Pattern, ...]]:
    (static, of_left), (other, of_right) = self.left.split(), self.right.split()
    if other is not None:  # static pairs come first
      of_left = tuple(part - other for part in of_left)
      static = other if static is None else static | other
    return static, of_left + tuple(part - self.left for part in of_right)


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
    static, content = self.left.split()
    content = tuple(part & self.right for part in content)
    if static is None:
      return None, content
    if not self.right.contents():
      return static & self.right, content
    # Content-based pairs come first: they decide the order of positions.
    static, others = (self.right & static).split()
    return static, content + others


@dataclasses.dataclass(frozen=True)
class Difference(_Restriction):
  """Pairs of the left pattern that are not in the right one."""

  operator = "-"

  def mask(self, q: Integers, k: Integers) -> Booleans:
    left, right = self.left.mask(q, k), self.right.mask(q, k)
    # ~ makes an integer of a plain True or False.
    return left & (not right if isinstance(right, bool) else ~right)

  def support(self) -> Pattern:
    if self.right.contents():
      return self.left.support()
    return super().support()

  def split(self) -> tuple[Pattern | None, tuple[Pattern, ...]]:
    static, content = self.left.split()
    content = tuple(part - self.right for part in content)
    if static is None:
      return None, content
    if self.right.contents():
      raise ValueError(
        f"{checks.shorten(self)} subtracts content-based pairs from"
        f" {checks.shorten(static)}, which is static: only a"
        " content-based pattern can lose such pairs"
      )
    return static - self.right, content


def _is_natural(pattern: Pattern) -> bool:
  if isinstance(pattern, _Restriction):
    return _is_natural(pattern.left)
  return type(pattern).orders is Pattern.orders


class Checked(Pattern):
  """A pattern whose integers are at least 1, or 0 if that is their default."""

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      if field.type is int:
        check_fields(self, field.name, minimum=int(field.default != 0))
        # As an int, whose text `parse` reads.
        object.__setattr__(self, field.name, int(getattr(self, field.name)))


def check_fields(pattern: Pattern, *fields: str, minimum: int = 1) -> None:
  """Raises a ValueError unless fields are integers of at least `minimum`.

  The field `causal`, if there is one, must be a boolean.
  """
  for field in (*fields, "causal"):
    value, rule = getattr(pattern, field, True), ""
    is_bool = isinstance(value, (bool, np.bool_))
    if field == "causal":
      rule = "" if is_bool else "True or False"
    elif is_bool or not isinstance(value, (int, np.integer)):
      rule = "an integer"
    elif not minimum <= value < intervals.LIMIT:
      rule = f"at least {minimum}, and fit in 32 bits"
    if rule:
      raise ValueError(
        f"{checks.shorten(pattern)}: {field} must be {rule}, not"
        f" {checks.shorten(repr(value))}"
      )


CATALOGUE: dict[str, type[Pattern]] = {}
CONTENT: dict[str, type[Pattern]] = {}  # the content-based ones

_Class = TypeVar("_Class", bound=type[Pattern])


def register(cls: _Class) -> _Class:
  """Decorator that adds a class of patterns to `CATALOGUE` or to `CONTENT`.

  Expressions (`parse`) can then name it, and tests, benchmarks and tables of
  the docs include it. It needs a docstring and, if static, `examples`. A class
  defined again, as in a notebook, replaces itself; others need other names.
  """
  known = (CATALOGUE | CONTENT).get(cls.__name__, cls)
  names = {(c.__module__, c.__qualname__) for c in (known, cls)}
  if len(names) > 1:
    raise ValueError(
      f"a pattern {cls.__name__} already exists in {known.__module__}; "
      "choose another name"
    )
  is_static = cls.contents is Pattern.contents
  (CATALOGUE if is_static else CONTENT)[cls.__name__] = cls
  return cls


def examples() -> dict[str, Examples]:
  """The examples of all registered static classes, by name."""
  return {name: cls.examples() for name, cls in CATALOGUE.items()}


def signature(cls: type[Pattern]) -> str:
  """The expression of a class of patterns: its name and arguments."""
  parameters = inspect.signature(cls).parameters.values()
  plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
  return f"{cls.__name__}{inspect.Signature(plain)}"
