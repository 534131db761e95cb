"""Checks that a pattern is well defined, as layouts and executors require.

A pattern that breaks one of these rules would silently give wrong results.
"""

import dataclasses
import functools
import operator
from typing import Any, TypeAlias

import numpy as np

from sparse_transformer.patterns import intervals

PatternLike: TypeAlias = Any  # a `base.Pattern`; `base` imports this module

SHORT = 100  # characters of a pattern that an error message quotes
SAMPLE = 16  # positions at either end and in between, to compare parts at


def check_pattern(pattern: PatternLike, n: int) -> None:
  """See `base.Pattern.check`."""
  if not 1 <= n < intervals.LIMIT:
    raise ValueError(f"{n=} must be at least 1 and fit in 32 bits")
  try:
    hash(pattern)
  except TypeError as error:
    raise _not_a_value(pattern, f"it is not hashable ({error})") from error
  _check(pattern, operator.index(n))


@functools.lru_cache(maxsize=1024)
def _check(pattern: PatternLike, n: int) -> None:
  _check_value(pattern)
  _check_mask(pattern, n)
  orders(pattern, n)
  _check_parts(pattern, n)


@functools.lru_cache(maxsize=16)
def orders(pattern: PatternLike, n: int) -> tuple[np.ndarray, np.ndarray]:
  """The query order and the key order of a pattern, as int32 [n]."""
  found: Any = pattern.orders(n)
  flaw = f"got {type(found).__name__}"
  if isinstance(found, (tuple, list)) and len(found) == 2:
    queries, keys = map(np.asarray, found)
    flaw = _flaw("query", queries, n) or _flaw("key", keys, n)
    if not flaw:
      return queries.astype(np.int32), keys.astype(np.int32)
  raise ValueError(
    f"{shorten(pattern)}: orders({n}) must return two permutations of"
    f" range({n}); {flaw}"
  )


def shorten(value: object) -> str:
  """The text of a value for a message: its middle is cut if it is long."""
  text = str(value)
  half = SHORT // 2
  return text if len(text) <= SHORT else f"{text[:half]}...{text[-half:]}"


def _not_a_value(pattern: PatternLike, why: str) -> ValueError:
  return ValueError(
    f"{type(pattern).__name__} must be a frozen dataclass with hashable fields,"
    f" so that patterns are equal if their fields are; {why}"
  )


def _check_value(pattern: PatternLike) -> None:
  """Plans are shared by equal patterns: equality must see all attributes."""
  cls = type(pattern)
  owner = next(c for c in cls.__mro__ if "__eq__" in vars(c))
  if "__dataclass_fields__" not in vars(owner):
    return  # it defines `__eq__`
  fields = {field.name: field.compare for field in dataclasses.fields(owner)}
  unseen = {name for name, is_compared in fields.items() if not is_compared}
  if owner is not cls:  # otherwise other attributes follow from the fields
    unseen |= {
      name
      for name in vars(pattern).keys() - fields.keys()
      if not isinstance(getattr(cls, name, None), functools.cached_property)
    }
  if unseen:
    names = ", ".join(sorted(unseen))
    raise _not_a_value(pattern, f"equality ignores {names}")


def _check_mask(pattern: PatternLike, n: int) -> None:
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


def _check_parts(pattern: PatternLike, n: int) -> None:
  """Each pair must be in exactly one part; compared on a few positions."""
  parts = pattern.parts()
  if parts == (pattern,):
    return
  for part in parts:  # not `part.check`: it may be made of this pattern
    _check_mask(part, n)
    orders(part, n)
  ends = np.arange(SAMPLE)
  between = np.random.RandomState(0).randint(0, n, SAMPLE)
  i = np.unique(np.concatenate([ends, between, n - 1 - ends]).clip(0, n - 1))
  total = np.sum([_matrix(part, i) for part in parts], axis=0)
  wrong = np.argwhere(total != _matrix(pattern, i))
  if len(wrong):
    q, k = i[wrong[0]]
    raise ValueError(
      f"{shorten(pattern)}: each pair must be in exactly one of parts(), and no"
      f" other pair in any, but {total[*wrong[0]]} have query {q}, key {k}"
    )


def _matrix(pattern: PatternLike, i: np.ndarray) -> np.ndarray:
  return np.broadcast_to(pattern.mask(i[:, None], i), (len(i), len(i)))


def _flaw(side: str, order: np.ndarray, n: int) -> str:
  """Why an order is not a permutation of range(n); empty if it is one."""
  if order.shape != (n,) or order.dtype.kind not in "iu":
    return f"the {side} order has shape {order.shape}, dtype {order.dtype}"
  is_there = np.zeros(n, bool)
  is_there[order[(order >= 0) & (order < n)]] = True
  return "" if is_there.all() else f"the {side} order lacks {is_there.argmin()}"
