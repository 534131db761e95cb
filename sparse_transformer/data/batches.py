"""Lazy sequences of examples, and batches as a function of (seed, step)."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeVar

import numpy as np

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Lazy(Sequence[T]):
  """A sequence of `size` items that calls `item(i)` for item i.

  Nothing is kept: an item that is needed twice is made twice.

  Example:
    >>> squares = Lazy(4, lambda i: i * i)
    >>> len(squares), squares[-1]
    (4, 9)
  """

  size: int
  item: Callable[[int], T]

  def __len__(self) -> int:
    return self.size

  # One item at a time: slices are not needed.
  def __getitem__(self, i: SupportsIndex) -> T:  # type: ignore[override]
    return self.item(range(self.size)[operator.index(i)])


def chosen(items: Sequence[T], numbers: Any) -> Lazy[T]:
  """The items of some numbers, integers [n], in their order."""
  return Lazy(len(numbers), lambda i: items[numbers[i]])


def batches(examples: Any, batch_size: int, seed: int) -> Sequence[np.ndarray]:
  """Returns an endless sequence of shuffled batches, one for each step.

  A batch depends only on (seed, step), so a run can resume at any step. Each
  epoch has its own order; a batch may extend into the next one.

  Args:
    examples: arrays of one shape and dtype, in any object with `len` and `[]`.
    batch_size: the number of examples in a batch.
    seed: of the shuffle.

  Returns:
    Arrays [batch_size, ...], by step.
  """
  # Only training shuffles; other commands start faster without grain.
  import grain

  # Nothing is read or shuffled here: index i of a shuffle is a function of the
  # seed and of i, so that any batch costs as much as the first.
  shuffled = grain.MapDataset.source(examples).seed(seed).shuffle()
  return shuffled.repeat().batch(batch_size)
