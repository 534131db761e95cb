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

  Items are not cached, so an item that is read twice is computed twice.

  Example:
    >>> squares = Lazy(4, lambda i: i * i)
    >>> len(squares), squares[-1]
    (4, 9)
  """

  size: int
  item: Callable[[int], T]

  def __len__(self) -> int:
    return self.size

  # Slices are not supported, because nothing needs them.
  def __getitem__(self, i: SupportsIndex) -> T:  # type: ignore[override]
    return self.item(range(self.size)[operator.index(i)])


def chosen(items: Sequence[T], numbers: Any) -> Lazy[T]:
  """Returns the items at some indices, in the order of the indices.

  Args:
    items: any sequence.
    numbers: the indices, integers [n].
  """
  return Lazy(len(numbers), lambda i: items[numbers[i]])


def batches(examples: Any, batch_size: int, seed: int) -> Sequence[np.ndarray]:
  """Returns an endless sequence of shuffled batches, one for each step.

  A batch depends only on (seed, step), so a run can resume at any step. Each
  epoch is shuffled differently. A batch may extend into the next epoch.

  Args:
    examples: arrays of one shape and dtype, in any object with `len` and `[]`.
    batch_size: the number of examples in a batch.
    seed: the seed of the shuffle.

  Returns:
    A sequence of arrays [batch_size, ...], indexed by step.
  """
  # Import grain here, because only training needs it, and other commands start
  # faster without it.
  import grain

  # This neither reads nor shuffles anything. Index i of the shuffle is computed
  # from the seed and i, so any batch takes as long as the first.
  shuffled = grain.MapDataset.source(examples).seed(seed).shuffle()
  return shuffled.repeat().batch(batch_size)
