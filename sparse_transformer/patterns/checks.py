"""Checks patterns: one that is not well defined gives wrong results."""

import functools
import operator
from typing import Any, TypeAlias

import numpy as np

from sparse_transformer.patterns import intervals

PatternLike: TypeAlias = Any  # a `base.Pattern`; `base` imports this module

SHORT = 100  # the most characters of a value that an error message quotes


def check_pattern(pattern: PatternLike, n: int) -> None:
  """Checks that a pattern is well defined, as `base.Pattern.check` describes.

  Args:
    pattern: any pattern.
    n: positions in a sequence.

  Raises:
    ValueError: the pattern is not well defined, or n is out of range.
  """
  if not 1 <= n < intervals.LIMIT:
    raise ValueError(f"{n=} must be at least 1 and fit in 32 bits")
  # Plans and programs are cached by pattern, which requires a hash.
  try:
    hash(pattern)
  except TypeError as error:
    raise ValueError(
      f"{shorten(pattern)}: fields must be hashable, such as tuples: {error}"
    ) from None

  # n becomes a Python integer, so that equal NumPy integers share its entry in
  # the cache.
  _check(pattern, operator.index(n))


# Calls that raise an error are not cached, so they raise it every time.
@functools.lru_cache(maxsize=1024)
def _check(pattern, n):
  _check_value(pattern)
  _check_mask(pattern, n)
  orders(pattern, n)


@functools.lru_cache(maxsize=16)
def orders(pattern: PatternLike, n: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the query order and the key order of a pattern, as int32 [n].

  Entry i of an order is the position that comes i-th in that order.

  Raises:
    ValueError: one of the two orders is not a permutation of range(n).
  """
  queries, keys = map(np.asarray, pattern.orders(n))

  # A position that is missing or repeated would give wrong sums.
  for side, order in ("query", queries), ("key", keys):
    if not np.array_equal(np.sort(order), np.arange(n)):
      raise ValueError(
        f"{shorten(pattern)}: orders({n}) must return two permutations of"
        f" range({n}); the {side} order is not one"
      )

  return queries.astype(np.int32), keys.astype(np.int32)


def shorten(value: object) -> str:
  """Returns the text of a value, without its middle if it is too long."""
  text = str(value)
  if len(text) <= SHORT:
    return text

  half = SHORT // 2
  return f"{text[:half]}...{text[-half:]}"


def _check_value(pattern):
  """Checks that equality compares all attributes.

  Equal patterns share plans. If equality ignored an attribute, a pattern could
  run with the pairs of another pattern that differs in that attribute. Cached
  properties are allowed, because they follow from the other attributes.
  """
  cls = type(pattern)
  # A class that defines its own `__eq__`, as every dataclass does, is trusted.
  definer = next(base for base in cls.__mro__ if "__eq__" in vars(base))
  if definer is cls:
    return

  # An `__eq__` that is inherited from a dataclass compares only the fields of
  # that dataclass.
  compared = getattr(definer, "__dataclass_fields__", vars(pattern))
  unseen = []
  for name in vars(pattern):
    is_cached = isinstance(getattr(cls, name, None), functools.cached_property)
    if name not in compared and not is_cached:
      unseen.append(name)

  if unseen:
    raise ValueError(
      f"{cls.__name__} must be a frozen dataclass, so that patterns are equal"
      f" if all fields are; its equality ignores {', '.join(unseen)}"
    )


def _check_mask(pattern, n):
  """Evaluates the mask once, on the interval of positions from 0 to n - 1."""
  position = intervals.Int32(0, n - 1)
  try:
    intervals.as_truth(pattern.mask(position, position))
  except OverflowError as error:
    raise ValueError(
      f"{shorten(pattern)}: {error} with {n} positions, but all values in a"
      " mask must fit in 32 bits"
    ) from error
  except (TypeError, AttributeError, IndexError) as error:
    raise ValueError(
      f"{shorten(pattern)}: a mask may use {intervals.OPERATORS} only, and"
      f" must return booleans: {error}"
    ) from error
