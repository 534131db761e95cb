"""Checks that a pattern is well defined, or it would give wrong results."""

import functools
import operator
from typing import Any, TypeAlias

import numpy as np

from sparse_transformer.patterns import intervals

PatternLike: TypeAlias = Any  # a `base.Pattern`; `base` imports this module

SHORT = 100  # characters of a pattern that an error message quotes


def check_pattern(pattern: PatternLike, n: int) -> None:
  """See `base.Pattern.check`."""
  if not 1 <= n < intervals.LIMIT:
    raise ValueError(f"{n=} must be at least 1 and fit in 32 bits")
  try:
    hash(pattern)
  except TypeError as error:
    raise ValueError(
      f"{shorten(pattern)}: fields must be hashable, as tuples are: {error}"
    ) from None
  _check(pattern, operator.index(n))


@functools.lru_cache(maxsize=1024)
def _check(pattern, n):
  _check_value(pattern)
  _check_mask(pattern, n)
  orders(pattern, n)


@functools.lru_cache(maxsize=16)
def orders(pattern: PatternLike, n: int) -> tuple[np.ndarray, np.ndarray]:
  """The query order and the key order of a pattern, as int32 [n]."""
  queries, keys = map(np.asarray, pattern.orders(n))
  for side, order in (("query", queries), ("key", keys)):
    if not np.array_equal(np.sort(order), np.arange(n)):
      raise ValueError(
        f"{shorten(pattern)}: orders({n}) must return two permutations of"
        f" range({n}); the {side} order is not one"
      )
  return queries.astype(np.int32), keys.astype(np.int32)


def shorten(value: object) -> str:
  """The text of a value for a message: its middle is cut if it is long."""
  text = str(value)
  half = SHORT // 2
  return text if len(text) <= SHORT else f"{text[:half]}...{text[-half:]}"


def _check_value(pattern):
  """Plans are shared by equal patterns: equality must see all attributes."""
  cls = type(pattern)
  owner = next(c for c in cls.__mro__ if "__eq__" in vars(c))
  if owner is cls:
    return
  fields = getattr(owner, "__dataclass_fields__", vars(pattern))
  is_cache = lambda x: isinstance(x, functools.cached_property)
  others = [name for name in vars(pattern) if name not in fields]
  unseen = [x for x in others if not is_cache(getattr(cls, x, None))]
  if unseen:
    raise ValueError(
      f"{cls.__name__} must be a frozen dataclass, so that patterns are equal"
      f" if their fields are; equality ignores {', '.join(unseen)}"
    )


def _check_mask(pattern, n):
  q, k = intervals.Int32(0, n - 1), intervals.Int32(0, n - 1)
  try:
    intervals.as_truth(pattern.mask(q, k))
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
