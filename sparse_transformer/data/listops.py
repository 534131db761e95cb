"""ListOps: nested operations on lists of digits, labelled with their values.

Source: Nangia and Bowman 2018, arXiv 1804.06028. The maximum depth and the
  maximum number of arguments are the same as in Long Range Arena (Tay et al.
  2020, arXiv 2011.04006).
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
# The meanings of the symbols 0, 1, ...; 0 is padding.
SYMBOLS = (" ", *"0123456789", *OPERATORS, "]")
# The maximum depth of the tree, including its digits.
DEPTH = 10
# The maximum number of arguments of an operation.
MOST = 10
# The probability that an argument is an operation.
NESTED = 0.25
# Expressions are drawn until one has a suitable length. The first expression
# must be found within `DRAWS` draws. Then later ones are almost certainly found
# within 100 times as many.
DRAWS = 20_000


@register("listops", reads_path=False)
def listops(config: ConfigDict) -> Sequences:
  """Expressions of `data.length / 4` to `data.length` symbols.

  An example is [MAX 2 9 [MIN 4 7 ] 0 ], with the label 9. `data.sizes` sets the
  number of examples in each split.

  Raises ValueError if expressions of these lengths are too rare.
  """
  n = config.length
  find = functools.partial(example, n // 4, n)
  # This raises an error at once if expressions of this length are too rare.
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
    """Returns a description of the data with a checksum of the first examples.

    The first example of each split suffices, because examples depend only on
    the split and the index. Generating all examples would take minutes.
    """
    first = b"".join(bytes(self.examples(split)[0]) for split in SPLITS)
    sizes = self.sizes()
    crc = zlib.crc32(first)
    return dict(examples=sizes[0], splits=sizes, crc32=f"{crc:08x}")


def example(
  least: int, most: int, split: str, index: int, draws: int = 100 * DRAWS
) -> tuple[np.ndarray, int]:
  """Returns a random expression and its value.

  The result depends only on the arguments.

  Args:
    least: the minimum number of symbols.
    most: the maximum number of symbols.
    split: the split. Examples of different splits differ even if their indices
      are equal.
    index: the index of the example.
    draws: the maximum number of expressions to draw.

  Returns:
    (symbols, value): indices into `SYMBOLS`, uint8 [n] with n from `least` to
    `most`; and the value, from 0 to 9.

  Raises:
    ValueError: none of `draws` random expressions has a suitable length.
  """
  # Use the method `random`, whose results are the same in all versions of
  # Python, unlike those of `randrange`.
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
    symbols: indices into `SYMBOLS`, to which the expression is appended.
    most: the maximum number of symbols. If the expression is longer, the
      function stops early and returns a wrong value.
    draw: a function that returns a random number in [0, 1).
    depth: the depth of the expression in the tree, counted from 1.
  """
  if len(symbols) > most:
    return 0  # the caller discards the expression
  if depth == DEPTH or draw() >= NESTED:
    value = int(10 * draw())
    symbols.append(1 + value)
    return value

  name = list(OPERATORS)[int(len(OPERATORS) * draw())]
  symbols.append(SYMBOLS.index(name))
  # Draw the number of arguments uniformly from 2 to MOST.
  count = 2 + int((MOST - 1) * draw())
  values = [_append(symbols, most, draw, depth + 1) for _ in range(count)]
  symbols.append(SYMBOLS.index("]"))
  return OPERATORS[name](values)
