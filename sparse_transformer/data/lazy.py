"""A sequence whose items are computed on access."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import SupportsIndex, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Lazy(Sequence[T]):
  """A sequence of `size` items that calls `item(i)` for item i.

  >>> squares = Lazy(4, lambda i: i * i)
  >>> squares[-1], list(squares)
  (9, [0, 1, 4, 9])
  """

  size: int
  item: Callable[[int], T]

  def __len__(self) -> int:
    return self.size

  # One item at a time: slices are not needed.
  def __getitem__(self, i: SupportsIndex) -> T:  # type: ignore[override]
    return self.item(range(self.size)[operator.index(i)])
