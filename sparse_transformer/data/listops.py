"""ListOps: nested operations on lists of digits, labelled with their value.

Nangia and Bowman 2018, arXiv 1804.06028; depth and arguments as in Long Range
Arena (Tay et al. 2020, arXiv 2011.04006).
"""

import functools
import random
import statistics
import zlib
from collections.abc import Callable

import numpy as np

from sparse_transformer.data.batches import Lazy
from sparse_transformer.data.sources import (
  ConfigDict,
  Digest,
  Sequences,
  register,
)
from sparse_transformer.data.splits import SPLITS

OPERATORS: dict[str, Callable[[list[int]], int]] = {
  "[MIN": min,
  "[MAX": max,
  "[MED": lambda values: int(statistics.median(values)),  # rounded down
  "[SM": lambda values: sum(values) % 10,
}
# What the symbols 0, 1, ... stand for; 0 is padding.
SYMBOLS = (" ", *"0123456789", *OPERATORS, "]")
# The depth of the tree, with its digits.
DEPTH = 10
# The arguments of an operation, at most.
MOST = 10
# The probability that an argument is an operation.
NESTED = 0.25
# Expressions are drawn until the length fits. The first must be found within
# `DRAWS`, so that later ones are found within a hundred times as many.
DRAWS = 20_000


@register("listops", reads_path=False)
def listops(config: ConfigDict) -> Sequences:
  """Expressions of `data.length / 4` to `data.length` symbols.

  For example [MAX 2 9 [MIN 4 7 ] 0 ], with the label 9. Splits have
  `data.sizes` examples.

  Raises ValueError if expressions of such lengths are too rare.
  """
  n = config.length
  find = functools.partial(example, n // 4, n)
  # Fails at once if data.length is so odd that expressions are hardly found.
  find("train", 0, draws=DRAWS)
  splits = {
    split: Lazy(size, functools.partial(find, split))
    for split, size in zip(SPLITS, config.sizes, strict=True)
  }
  return _Expressions(
    length=n,
    shape=(-(-n // config.columns), config.columns),
    vocab_size=len(SYMBOLS),
    classes=SYMBOLS[1:11],
    load=lambda: splits,
    symbols="padding, 0 to 9, MIN, MAX, MED, SM, end",
  )


class _Expressions(Sequences):
  def digest(self) -> Digest:
    """The digest of the first examples: reading all would take minutes."""
    # Examples are functions of their index, and the sizes are in the digest.
    first = b"".join(bytes(self.examples(split)[0]) for split in SPLITS)
    sizes = self.sizes()
    crc = zlib.crc32(first)
    return dict(examples=sizes[0], splits=sizes, crc32=f"{crc:08x}")


def example(
  least: int, most: int, split: str, index: int, draws: int = 100 * DRAWS
) -> tuple[np.ndarray, int]:
  """A random expression and its value, a function of the arguments alone.

  Args:
    least: the fewest symbols.
    most: the most symbols.
    split: distinguishes examples with the same index.
    index: of the example.
    draws: how many expressions are tried at most.

  Returns:
    Indices into `SYMBOLS`, uint8 [from `least` to `most`]; the value, from 0 to
    9.

  Raises:
    ValueError: none of `draws` random expressions has such a length.
  """
  # Its `random` has the same results in all versions, unlike `randrange`.
  draw = random.Random(f"0 {split} {index}").random
  for _ in range(draws):
    symbols: list[int] = []
    value = _append(symbols, most, draw, depth=1)
    if least <= len(symbols) <= most:
      return np.array(symbols, np.uint8), value

  raise ValueError(
    f"none of {draws:,} random expressions has {least} to {most} symbols; set"
    " data.length to another number"
  )


def _append(symbols, most, draw, depth):
  """Appends a random expression to the symbols, and returns its value.

  Args:
    symbols: indices into `SYMBOLS`, to which others are appended.
    most: beyond so many symbols, it stops early; the value is then wrong.
    draw: returns a random number in [0, 1).
    depth: of the expression in the tree, from 1.
  """
  if len(symbols) > most:
    return 0  # all is drawn again
  if depth == DEPTH or draw() >= NESTED:
    value = int(10 * draw())
    symbols.append(1 + value)
    return value

  name = list(OPERATORS)[int(len(OPERATORS) * draw())]
  symbols.append(SYMBOLS.index(name))
  # From 2 to MOST arguments, each as likely.
  count = 2 + int((MOST - 1) * draw())
  values = [_append(symbols, most, draw, depth + 1) for _ in range(count)]
  symbols.append(SYMBOLS.index("]"))
  return OPERATORS[name](values)
