"""The kinds of sources: images, streams, sequences with labels.

A source knows its vocabulary and its geometry without the data, which it loads
when a split is first used.
"""

import dataclasses
import itertools
import math
import pathlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from sparse_transformer.data import codecs, files as files_lib
from sparse_transformer.data.batches import Lazy
from sparse_transformer.data.splits import SPLITS

T = TypeVar("T")
Window = tuple[np.ndarray, np.ndarray]  # tokens, and which of them are scored


class _Apart:
  """What sources share whose examples are scored one by one."""

  separator: ClassVar[None] = None  # an example is one document

  def digest(self: Any) -> dict[str, int | str]:
    """Number of training examples; CRC-32 of classes, and files or examples."""
    crc = zlib.crc32("\n".join(self.classes).encode())
    if self.files:
      crc ^= files_lib.crc32(*self.files())
    else:
      for row in itertools.chain(*map(self.examples, SPLITS)):
        crc = zlib.crc32(row.data, crc)
    return {self.noun: len(self.examples("train")), "crc32": f"{crc:08x}"}

  def windows(self: Any, split: str, min_context: int = 0) -> Lazy[Window]:
    """The examples of a split as (row, scored): one label, or all symbols."""
    if min_context:
      what = "labels" if self.classes else self.noun
      raise ValueError(
        f"{min_context=} must be 0 for {what}: each is scored separately"
      )
    rows = self.examples(split)
    scored = lambda row: np.ones(1, bool) if self.classes else row >= 0
    return Lazy(len(rows), lambda i: (row := rows[i], scored(row)))


@dataclasses.dataclass(frozen=True)
class Images(_Apart):
  """Images as sequences: row by row, the channels of a pixel innermost.

  Attributes:
    shape: (rows, columns, channels).
    vocab_size: number of levels of a channel.
    load: returns the images of each split, uint8 of this shape, from a cache.
    files: returns the files of the images, and raises ValueError if one is
      damaged; None without files.
    unit: of losses.
    symbols: what they stand for, in order.
    optimum: expected loss of the best predictor, if it is known.
  """

  shape: tuple[int, int, int]
  vocab_size: int
  load: Callable[[], Mapping[str, np.ndarray | Sequence[np.ndarray]]]
  files: Callable[[], Sequence[pathlib.Path]] | None = None
  unit: str = "bits/dim"
  symbols: str = "levels"
  optimum: float | None = None
  classes: ClassVar[tuple[str, ...]] = ()
  noun: ClassVar[str] = "images"  # in digests of checkpoints

  @property
  def length(self) -> int:
    return math.prod(self.shape)

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """The images of a split, each as uint8 [length]."""
    images = _split(self.load, split)

    def example(i: int) -> np.ndarray:
      image = images[i]
      if (image.size, image.dtype) != (self.length, np.uint8):
        raise ValueError(
          f"image {i} of {split} is {image.dtype} {image.shape}, not uint8"
          f" {self.shape}; prepare the data set again"
        )
      return image.reshape(self.length)

    return Lazy(len(images), example)


@dataclasses.dataclass(frozen=True)
class Stream:
  """One long stream of symbols, cut into sequences.

  Attributes:
    length: symbols in a sequence.
    columns: width of the table in which each position has a row and a column to
      embed. Its last row may be partial.
    load: returns the symbols of each split, a row of uint8, uint16 or uint32,
      from a cache.
    codec: what the symbols stand for.
  """

  length: int
  columns: int
  load: Callable[[], Mapping[str, np.ndarray]]
  codec: codecs.Codec = codecs.Text()
  classes: ClassVar[tuple[str, ...]] = ()

  vocab_size = property(lambda self: self.codec.vocab_size)
  unit = property(lambda self: self.codec.unit)
  symbols = property(lambda self: self.codec.symbols)
  separator = property(lambda self: self.codec.separator)

  @property
  def shape(self) -> tuple[int, int]:
    return (-(-self.length // self.columns), self.columns)

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """Sequences that start at each symbol of a split, [length].

    Raises ValueError if the split is shorter than a sequence.
    """
    data = _split(self.load, split)
    if len(data) < self.length:
      raise ValueError(
        f"{split} has {len(data)} symbols, fewer than"
        f" data.length={self.length}; use more data, other data.fractions or"
        " a smaller data.length"
      )
    size = len(data) - self.length + 1
    return Lazy(size, lambda i: data[i : i + self.length])

  def num_bytes(self, split: str) -> int | None:
    """The bytes that the symbols of a split stand for; None if unknown."""
    return self.codec.num_bytes(_split(self.load, split))

  def digest(self) -> dict[str, int | str]:
    """Number and CRC-32 of the symbols in all splits."""
    number, crc = 0, 0
    for split in SPLITS:
      symbols = np.ascontiguousarray(self.load()[split])
      number, crc = number + len(symbols), zlib.crc32(symbols.data, crc)
    return dict(symbols=number, crc32=f"{crc:08x}")

  def windows(self, split: str, min_context: int = 0) -> Lazy[Window]:
    """Overlapping sequences that together score each symbol exactly once.

    At least `min_context` positions, in [0, length), are before a scored one,
    except in the first window, which is scored entirely.

    Returns:
      (tokens, scored): integers, as loaded, and bool [length]. The last window
      is padded on the right with zeros, which are not scored.
    """
    if not 0 <= min_context < self.length:
      raise ValueError(
        f"{min_context=} must be at least 0 and less than"
        f" data.length={self.length}"
      )
    data = _split(self.load, split)
    step = self.length - min_context

    def window(i: int) -> Window:
      tokens = data[i * step :][: self.length]
      position = np.arange(self.length)
      scored = position < len(tokens)
      if i:
        scored &= position >= min_context
      return np.pad(tokens, (0, self.length - len(tokens))), scored

    return Lazy(1 + max(0, -(-(len(data) - self.length) // step)), window)


@dataclasses.dataclass(frozen=True)
class Sequences(_Apart):
  """Sequences of up to `length` symbols, each with a label.

  Attributes:
    length: most symbols in a sequence.
    shape: sizes of the axes of positions, see `Stream.shape`.
    vocab_size: number of symbols.
    classes: names of the labels 0, 1, ...; () if labels are not used.
    load: returns (symbols [n], label) for each example of each split, from a
      cache.
    files: as of `Images`.
    symbols: what they stand for, in order.
    unit_of_symbols: of losses without labels.
  """

  length: int
  shape: tuple[int, ...]
  vocab_size: int
  classes: tuple[str, ...]
  load: Callable[[], Mapping[str, Sequence[tuple[np.ndarray, int]]]]
  files: Callable[[], Sequence[pathlib.Path]] | None = None
  symbols: str = "symbols"
  unit_of_symbols: str = "bits/symbol"
  noun: ClassVar[str] = "examples"

  @property
  def unit(self) -> str:
    return "bits/label" if self.classes else self.unit_of_symbols

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """The examples of a split as rows of integers.

    With classes [length + 2]: the symbols, zeros up to the length, the label,
    and how many symbols there are. Without [length]: the symbols, and -1 up to
    the length. Raises ValueError if an example does not fit the source.
    """
    examples = _split(self.load, split)
    largest = max(self.vocab_size - 1, self.length, len(self.classes) - 1)
    dtype = np.min_scalar_type(largest if self.classes else -self.vocab_size)

    def example(i: int) -> np.ndarray:
      symbols, label = examples[i]
      if not 1 <= len(symbols) <= self.length:
        raise ValueError(
          f"example {i} of {split} has {len(symbols):,} symbols; it must have"
          f" between 1 and {self.length:,}, the length of a sequence"
        )
      if not self.classes:
        rest = self.length - len(symbols)
        return np.pad(symbols.astype(dtype), (0, rest), constant_values=-1)
      if not 0 <= label < len(self.classes):
        raise ValueError(
          f"example {i} of {split} has {label=}, but there are"
          f" {len(self.classes)} classes, from 0"
        )
      row = np.zeros(self.length + 2, dtype)
      row[: len(symbols)], row[-2:] = symbols, (label, len(symbols))
      return row

    return Lazy(len(examples), example)


Source = Images | Stream | Sequences


def _split(load: Callable[[], Mapping[str, T]], split: str) -> T:
  """The data of a split; ValueError if they are none, or it is unknown."""
  if split not in SPLITS:
    raise ValueError(f"unknown {split=}; known: {', '.join(SPLITS)}")
  found: Any = load()[split]
  if not len(found):
    raise ValueError(f"the {split} split is empty; add data to it")
  return found
