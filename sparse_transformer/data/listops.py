"""ListOps: nested operations on lists of digits, labelled with their value.

Nangia and Bowman 2018, arXiv 1804.06028. Lengths, depth and arguments are by
default those of Long Range Arena (Tay et al. 2020, arXiv 2011.04006). An
example is a function of (seed, split, index) alone: nothing is stored.
"""

import dataclasses
import functools
import random
import statistics
import zlib
from collections.abc import Callable

import numpy as np

from sparse_transformer.data.sources import (
  SPLITS,
  ConfigDict,
  Labelled,
  Lazy,
  check_no_path,
  register,
)

Example = tuple[np.ndarray, int]  # symbols, and their label
OPERATORS: dict[str, Callable[[list[int]], int]] = {
  "[MIN": min,
  "[MAX": max,
  "[MED": lambda values: int(statistics.median(values)),  # rounded down
  "[SM": lambda values: sum(values) % 10,
}
# What the symbols 0, 1, ... stand for; 0 is padding.
SYMBOLS = " ", *"0123456789", *OPERATORS, "]"
SIZES = 96_000, 2_000, 2_000  # of the splits in Long Range Arena
# The probability that an argument is an operation, and draws until the length
# fits: one in 12 does by default.
NESTED, DRAWS = 0.25, 20_000


@register("listops")
def listops(config: ConfigDict) -> Labelled:
  """Expressions of `data.min_length` to `data.length` symbols."""
  check_no_path(config)
  n, sizes, least = config.length, tuple(config.sizes), config.min_length
  made = ListOps(sizes=sizes, min_length=least, length=n)
  shape, digits = (-(-n // config.columns), config.columns), SYMBOLS[1:11]
  about = "padding, 0 to 9, MIN, MAX, MED, SM, end"
  return _Source(n, shape, len(SYMBOLS), digits, made.splits, symbols=about)


class _Source(Labelled):
  """Examples that would take minutes to read."""

  def digest(self) -> dict[str, int | str]:
    """Number of training examples, and CRC-32 of the first in each split."""
    first = b"".join(bytes(self.examples(split)[0]) for split in SPLITS)
    number, crc = len(self.examples("train")), zlib.crc32(first)
    return dict(examples=number, crc32=f"{crc:08x}")


@dataclasses.dataclass(frozen=True)
class ListOps:
  """The examples of all splits.

  Attributes:
    seed: of all examples.
    sizes: number of examples of each split.
    min_length, length: least and most symbols in an example.
    max_depth: of the tree, a digit alone included.
    max_args: of an operation, at least 2.

  Raises:
    ValueError: a setting is out of bounds, or no such example is found.
  """

  seed: int = 0
  sizes: tuple[int, int, int] = SIZES
  min_length: int = 500
  length: int = 2_000
  max_depth: int = 10
  max_args: int = 10

  def __post_init__(self) -> None:
    for rule, holds in {
      f"sizes={self.sizes} must be three integers at least 1": (
        len(self.sizes) == 3 and min(self.sizes) >= 1
      ),
      f"min_length={self.min_length} must be at least 1 and at most"
      f" length={self.length}": 1 <= self.min_length <= self.length,
      f"max_depth={self.max_depth} must be between 1 and 100": (
        1 <= self.max_depth <= 100
      ),
      f"max_args={self.max_args} must be between 2 and 1,000": (
        2 <= self.max_args <= 1_000
      ),
    }.items():
      if not holds:
        raise ValueError(rule)
    self.example("train", 0)  # a bound that nothing meets is found now

  def splits(self) -> dict[str, Lazy[Example]]:
    """The examples of each split, see `example`."""
    return {
      split: Lazy(size, functools.partial(self.example, split))
      for split, size in zip(SPLITS, self.sizes, strict=True)
    }

  def example(self, split: str, index: int) -> Example:
    """One example: indices into `SYMBOLS`, uint8 [length], and its value."""
    # No other function of this module gives the same numbers in all versions.
    draw = random.Random(f"{self.seed} {split} {index}").random
    for _ in range(DRAWS):
      symbols: list[int] = []
      value = self._append(symbols, draw, 1)
      if self.min_length <= len(symbols) <= self.length:
        return np.array(symbols, np.uint8), value
    raise ValueError(
      f"none of {DRAWS:,} expressions has {self.min_length:,} to"
      f" {self.length:,} symbols with max_depth={self.max_depth} and"
      f" max_args={self.max_args}; use wider bounds"
    )

  def _append(
    self, symbols: list[int], draw: Callable[[], float], depth: int
  ) -> int:
    """Appends a random expression to the symbols, and returns its value."""
    if len(symbols) > self.length:
      return 0  # it is drawn again
    if depth == self.max_depth or draw() >= NESTED:
      value = int(10 * draw())
      symbols.append(1 + value)
      return value
    name = [*OPERATORS][int(len(OPERATORS) * draw())]
    symbols.append(SYMBOLS.index(name))
    count = 2 + int((self.max_args - 1) * draw())
    values = [self._append(symbols, draw, depth + 1) for _ in range(count)]
    symbols.append(SYMBOLS.index("]"))
    return OPERATORS[name](values)
