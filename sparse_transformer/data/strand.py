"""Windows of a bacterial chromosome, labelled with their strand of replication.

The chromosome is copied from the origin to the terminus, both ways around the
circle. The strand that runs from origin to terminus, leading, has more G than C
in most bacteria: counted from any base, G minus C is least at the origin and
greatest at the terminus (Grigoriev 1998, Nucleic Acids Research 26(10)).
"""

import functools
import pathlib
import random
from collections.abc import Sequence

import numpy as np

from sparse_transformer.data import codecs, files as files_lib
from sparse_transformer.data.sources import (
  ConfigDict,
  Lazy,
  Sequences,
  register,
)
from sparse_transformer.data.splits import SPLITS, divide

CLASSES = "leading", "lagging"
# The range of G minus C in random bases, in square roots of the number of both,
# is beyond this about once in a million times.
RANDOM = 5


@register("strand")
def strand(config: ConfigDict) -> Sequences:
  """Windows of the chromosome in a FASTA file, and whether they lead or lag."""
  n, fractions = config.length, config.fractions
  path = lambda: files_lib.check_path(config.path)
  load = functools.cache(lambda: splits(read(path()), n, fractions))
  shape, codec = (-(-n // config.columns), config.columns), codecs.Fasta()
  return Sequences(
    *(n, shape, codec.vocab_size, CLASSES, load),
    files=lambda: [path()],
    symbols=codec.symbols,
    unit_of_symbols="bits/base",
  )


def read(path: pathlib.Path) -> np.ndarray:
  """The bases of a chromosome, uint8 [n], from a FASTA file with one record.

  Raises:
    ValueError: the file has more records, or characters other than bases.
  """
  data = files_lib.read(path)
  bases = codecs.Fasta().decode(data, path)
  number = sum(line.startswith(b">") for line in data.split(b"\n"))
  if number > 1:
    raise ValueError(
      f"{path} has {number:,} records, but must have one, a chromosome; remove"
      " the others, or choose another file"
    )
  return bases


def skew(bases: np.ndarray) -> np.ndarray:
  """G minus C among the first 0, 1, ..., n bases, integers [n + 1]."""
  g, c = (bases == codecs.BASES.index(x) for x in "GC")
  return np.concatenate([[0], np.cumsum(g.astype(np.int64) - c)])


def locate(bases: np.ndarray) -> tuple[int, int]:
  """The numbers of bases before the origin and before the terminus.

  Raises:
    ValueError: G minus C varies no more than it does in random bases.
  """
  found = skew(bases)
  limit = RANDOM * np.count_nonzero(np.diff(found)) ** 0.5
  if (extent := np.ptp(found)) <= limit:
    raise ValueError(
      f"no origin is found: G minus C varies by {extent:,} in {len(bases):,}"
      f" bases, and by {limit:,.0f} in random ones; use the whole chromosome of"
      " a bacterium"
    )
  return int(found.argmin()), int(found.argmax())


def splits(
  bases: np.ndarray,
  length: int,
  fractions: Sequence[float] = (0.9, 0.05, 0.05),
  seed: int = 0,
) -> dict[str, Lazy[tuple[np.ndarray, int]]]:
  """Windows of a circular chromosome, of bases uint8 [n], and their labels.

  Each split has its part of both arms, between origin and terminus. Windows
  start at each base in the training split, and don't overlap in the others.
  None is within `length` of origin or terminus. Half of them, a function of
  (seed, split, index), are the other strand, read in its direction.

  Raises:
    ValueError: `locate` finds no origin, or an arm is too short for a window in
      each split.
  """
  origin, terminus = locate(bases)
  bases = np.roll(bases, -origin)
  terminus = (terminus - origin) % len(bases)
  starts: dict[str, list] = {split: [] for split in SPLITS}
  for first, last in (0, terminus), (terminus, len(bases)):
    if (last - first - 2 * length) * min(fractions) < length + 1:
      raise ValueError(
        f"data.{length=} is too long: each split needs a window in an arm of"
        f" {last - first:,} bases, data.fractions={tuple(fractions)}; use"
        " smaller windows, other fractions or a larger genome"
      )
    parts = divide(range(first + length, last - length), fractions)
    for split, part in parts.items():
      step = 1 if split == "train" else length
      starts[split].append(range(part.start, part.stop - length + 1, step))

  def read_window(split: str, i: int) -> tuple[np.ndarray, int]:
    leading, lagging = starts[split]
    label = int(i >= len(leading))
    start = lagging[i - len(leading)] if label else leading[i]
    window = bases[start : start + length]
    if random.Random(f"{seed} {split} {i}").random() < 0.5:
      return len(codecs.BASES) - 1 - window[::-1], 1 - label  # A-T, C-G
    return window, label

  return {
    split: Lazy(sum(map(len, found)), functools.partial(read_window, split))
    for split, found in starts.items()
  }
