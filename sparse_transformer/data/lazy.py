"""A sequence whose items are made when they are asked for."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Lazy:
  """A sequence of `size` items; item i is `item(i)`, made when it is asked."""

  size: int
  item: Callable[[int], Any]

  def __len__(self):
    return self.size

  def __getitem__(self, i):
    return self.item(range(self.size)[operator.index(i)])
