"""Kinds of data sources, and their registry.

A source loads data when one of its splits is first used.
"""

import dataclasses
import math
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from sparse_transformer.data import arrangements, files as files_lib, text
from sparse_transformer.data.arrangements import Arrangement
from sparse_transformer.data.batches import Lazy
from sparse_transformer.data.codecs import Codec
from sparse_transformer.data.splits import SPLITS

# The class is part of ml_collections, which only commands need.
ConfigDict = Any
# The data of each split.
Splits = Mapping[str, Any]
Files = Callable[[], Sequence[pathlib.Path]] | None
# A description of data: sizes and a checksum. "splits" is the size of each
# split.
Digest = dict[str, int | str | list[int]]
# (tokens, whether each is scored).
Window = tuple[np.ndarray, np.ndarray]


class _Data:
  """The base class of all sources."""

  load: Callable[[], Splits]
  classes: tuple[str, ...]  # the names of labels; () if there are none
  separator: int | None = None  # the symbol after each document, or None
  arrangement = Arrangement()

  def sizes(self) -> list[int]:
    """Returns the size of each of `SPLITS`, in examples.

    For a stream, sizes are in symbols.
    """
    data = self.load()
    return [len(data[split]) for split in SPLITS]

  def _split(self, split: str) -> Any:
    """Returns the data of a split; raises ValueError if empty or unknown."""
    if split not in SPLITS:
      raise ValueError(f"unknown {split=}; known: {', '.join(SPLITS)}")

    data = self.load()[split]
    if not len(data):
      raise ValueError(f"the {split} split is empty; add data to it")
    return data


class _Apart(_Data):
  """The base class of sources whose examples are scored separately."""

  noun: str  # how checkpoints and error messages refer to examples
  files: Files = None  # returns the files of all splits, see `Images`

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """Returns the examples of a split as rows."""
    raise NotImplementedError

  def digest(self) -> Digest:
    """Returns a description that identifies these data, for checkpoints.

    It includes the numbers of examples and a checksum. The checksum combines
    the CRC-32 of the names of classes with the CRC-32 of the files or, without
    files, of the examples.
    """
    # Include the names of classes, because labels are indices of the sorted
    # names.
    crc = zlib.crc32(os.fsencode("\n".join(self.classes)))
    if self.files:
      # Read files as stored, which is much faster than decoding all images.
      crc ^= files_lib.crc32(*self.files())
    else:
      for split in SPLITS:
        for row in self.examples(split):
          crc = zlib.crc32(row.data, crc)

    sizes = self.sizes()
    return {self.noun: sizes[0], "splits": sizes, "crc32": f"{crc:08x}"}

  def windows(self, split: str, min_context: int = 0) -> Lazy[Window]:
    """Returns the windows to score in a split, one per example.

    Args:
      split: one of `SPLITS`.
      min_context: must be 0, because no example continues another.

    Returns:
      Pairs (row, is scored). The row is as in `examples`. If there are classes,
      only the label is scored, and the second item is bool [1]. Otherwise, all
      symbols are scored, and the second item is bool with the shape of the row.
    """
    if min_context:
      what = "labels" if self.classes else self.noun
      raise ValueError(
        f"{min_context=} must be 0 for {what}, each of which is scored"
        " separately"
      )

    rows = self.examples(split)

    def window(i):
      row = rows[i]
      return row, np.ones(1 if self.classes else row.shape, bool)

    return Lazy(len(rows), window)


def count_frames(shape: tuple[int, int, int]) -> int:
  """Returns the number of frames of a clip; 1 for an image.

  A gray image whose height is at least 4 times its width, and a multiple of it,
  is a clip of square frames.

  Args:
    shape: (rows, columns, channels).
  """
  rows, columns, channels = shape
  is_clip = channels == 1 and rows % columns == 0 and rows > 3 * columns
  return rows // columns if is_clip else 1


@dataclasses.dataclass(frozen=True)
class Images(_Apart):
  """Images as sequences, row by row, with the channels of a pixel innermost.

  Attributes:
    shape: (rows, columns, channels).
    vocab_size: the number of levels of a channel.
    load: returns {split: uint8 images of this shape}. It must cache its result.
    files: a function that returns the files of all splits, or raises ValueError
      if a file is damaged; or None if the data are not read from files.
    unit: the unit of losses.
    symbols: describes what the symbols mean, in order.
    optimum: the expected loss of the optimal predictor, or None if unknown.
    arrangement: the orders in which images are generated.
  """

  shape: tuple[int, int, int]
  vocab_size: int
  load: Callable[[], Splits]
  files: Files = None
  unit: str = "bits/dim"
  symbols: str = "levels"
  optimum: float | None = None
  arrangement: Arrangement = Arrangement()
  noun = "images"
  classes = ()

  @property
  def length(self) -> int:
    """The number of symbols of an image."""
    return math.prod(self.shape)

  @property
  def frames(self) -> int:
    """The number of frames of a clip, see `count_frames`; 1 for an image."""
    return count_frames(self.shape)

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """Returns the images of a split, each as uint8 [length]."""
    images = self._split(split)
    return Lazy(len(images), lambda i: images[i].reshape(self.length))


@dataclasses.dataclass(frozen=True)
class Sequences(_Apart):
  """Sequences of up to `length` symbols, each with a label.

  Attributes:
    length: the maximum number of symbols of an example.
    shape: the sizes of the axes of positions, see `Stream.shape`.
    vocab_size: the number of distinct symbols.
    classes: the names of the labels 0, 1, ...
    load: returns {split: examples}, where an example is (symbols [n], label).
      It must cache its result.
    files: returns the files of all splits, see `Images`.
    symbols: describes what the symbols mean, in order.
  """

  length: int
  shape: tuple[int, ...]
  vocab_size: int
  classes: tuple[str, ...]
  load: Callable[[], Splits]
  files: Files = None
  symbols: str = "symbols"
  noun = "examples"
  unit = "bits/label"

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """Returns the examples of a split as rows of integers [length + 2].

    A row consists of the symbols, zeros up to `length`, the label, and the
    number of symbols.

    Raises:
      ValueError: an example has no symbols, too many symbols, or an unknown
        label. The error is raised only when this example is read.
    """
    examples = self._split(split)

    def row(i):
      symbols, label = examples[i]
      number = len(self.classes)
      if not (0 <= label < number and 1 <= len(symbols) <= self.length):
        raise ValueError(
          f"example {i} of {split} has {len(symbols)} symbols and {label=}; it"
          f" must have 1 to {self.length:,} symbols and a label from 0 to"
          f" {number - 1}"
        )
      return self._row(symbols, label)

    return Lazy(len(examples), row)

  def _row(self, symbols, label):
    """Returns the row of an example, see `examples`, in the smallest dtype."""
    number = len(symbols)
    # Use one array for everything, so that a batch is one array, too.
    largest = max(self.vocab_size - 1, self.length, len(self.classes) - 1)
    dtype = np.min_scalar_type(largest)
    row = np.zeros(self.length + 2, dtype)
    row[:number] = symbols
    row[-2:] = label, number
    return row


@dataclasses.dataclass(frozen=True)
class Stream(_Data):
  """One long stream of symbols, cut into sequences.

  Attributes:
    length: the number of symbols in a sequence.
    columns: the number of columns of the grid used to embed positions: each
      position is embedded by its row and its column.
    load: returns {split: symbols}, where symbols are an array [n] of uint8,
      uint16 or uint32, or a `streams.Joined`. The function must cache its
      result.
    codec: the codec that reads data files and writes files of samples.
  """

  length: int
  columns: int
  load: Callable[[], Splits]
  codec: Codec = text.Text()

  classes = ()
  vocab_size = property(lambda self: self.codec.vocab_size)
  unit = property(lambda self: self.codec.unit)
  symbols = property(lambda self: self.codec.symbols)
  separator = property(lambda self: self.codec.separator)

  @property
  def shape(self) -> tuple[int, int]:
    """The rows and columns of the grid used to embed positions."""
    return -(-self.length // self.columns), self.columns

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """Returns the sequences [length] that start at each symbol of a split.

    Raises ValueError if the split is shorter than a sequence.
    """
    data = self._split(split)
    if len(data) < self.length:
      raise ValueError(
        f"{split} has {len(data)} symbols, fewer than"
        f" data.length={self.length}; use more data, other data.fractions or"
        " a smaller data.length"
      )

    # Sequences start at every symbol, not only at multiples of the length, so
    # that a network sees each symbol at each position.
    size = len(data) - self.length + 1
    return Lazy(size, lambda i: np.asarray(data[i : i + self.length]))

  def num_bytes(self, split: str, size: int) -> int | None:
    """Returns the number of bytes of text in the first symbols of a split.

    Args:
      split: one of `SPLITS`.
      size: the number of symbols.

    Returns:
      The number of bytes, or None if it is unknown.
    """
    # If the table of bytes is missing, the first block already returns None.
    total = 0
    for block in _blocks(self._split(split)[:size]):
      number = self.codec.num_bytes(block)
      if number is None:
        return None
      total += number
    return total

  def digest(self) -> Digest:
    """Returns the numbers of symbols and their CRC-32, for checkpoints."""
    crc = 0
    for split in SPLITS:
      for block in _blocks(self.load()[split]):
        crc = zlib.crc32(block.data, crc)

    sizes = self.sizes()
    return dict(symbols=sum(sizes), splits=sizes, crc32=f"{crc:08x}")

  def windows(self, split: str, min_context: int = 0) -> Lazy[Window]:
    """Returns overlapping windows that together score each symbol once.

    Args:
      split: one of `SPLITS`.
      min_context: the minimum number of positions before a scored position in
        its window, in [0, length). The first window is an exception: all of its
        positions are scored.

    Returns:
      Pairs (tokens, is scored): symbols [length] and bool [length]. The last
      window is padded with zeros, which are not scored.
    """
    if not 0 <= min_context < self.length:
      raise ValueError(
        f"{min_context=} must be at least 0 and less than"
        f" data.length={self.length}"
      )

    data = self._split(split)
    step = self.length - min_context

    def window(i):
      tokens = np.asarray(data[i * step : i * step + self.length])

      # Each window but the first repeats `min_context` symbols of the previous
      # one.
      position = np.arange(self.length)
      is_new = position >= (min_context if i else 0)
      scored = is_new & (position < len(tokens))
      return np.pad(tokens, (0, self.length - len(tokens))), scored

    # The first window scores `length` symbols, and each further one scores
    # `step` more.
    left = max(0, len(data) - self.length)
    return Lazy(1 + -(-left // step), window)


Source = Images | Stream | Sequences


def _blocks(data: Any) -> Iterator[np.ndarray]:
  """Yields the symbols of a split in blocks, as all may not fit in memory."""
  for start in range(0, len(data), files_lib.BLOCK):
    yield np.ascontiguousarray(data[start : start + files_lib.BLOCK])


# The registry of sources, to which other modules add theirs.

Factory = TypeVar("Factory", bound=Callable[..., Source])

SOURCES: dict[str, Callable[..., Source]] = {}
# The names of sources that do not read `data.path`.
WITHOUT_PATH: set[str] = set()


def register(
  name: str, reads_path: bool = True
) -> Callable[[Factory], Factory]:
  """Registers a function that maps the `data` group of a config to a source.

  `data.name` selects a source by its name. A config file may register a source:

    @data.register("mine")
    def mine(config):
      return data.Stream(config.length, config.columns, load=...)

  Args:
    name: the name of the source.
    reads_path: whether the source reads `data.path`. If not, setting
      `data.path` is an error.

  Returns:
    A decorator, which returns the function unchanged.

  Raises:
    ValueError: the name is already registered.
  """
  if name in SOURCES:
    raise ValueError(f"source {name!r} is already registered")

  def add(factory: Factory) -> Factory:
    SOURCES[name] = factory
    if not reads_path:
      WITHOUT_PATH.add(name)
    return factory

  return add


def source(config: ConfigDict) -> Source:
  """Returns the source that the `data` group of a config selects.

  Args:
    config: the `data` group.

  Raises:
    ValueError: the name is unknown, or a field is invalid.
  """
  name = config.name
  if name not in SOURCES:
    raise ValueError(
      f"unknown data.name={name!r}; known: {', '.join(SOURCES)}; other sources"
      " must be registered by the config file, --config=FILE"
    )
  if config.path and name in WITHOUT_PATH:
    raise ValueError(
      f"data.path={config.path} is not read with data.name={name}; leave"
      " data.path empty, or set data.name=bytes to read it"
    )

  made = SOURCES[name](config)
  if config.documents and made.separator is None:
    raise ValueError(
      f"data.documents=True, but data.name={name} has no documents; set"
      " data.name to bytes, jsonl or fasta, or leave data.documents=False"
    )

  if isinstance(made, Images):
    arrangement = arrangements.of(config.orders, made.shape)
    return dataclasses.replace(made, arrangement=arrangement)
  if config.orders:
    raise ValueError(
      f"data.orders={config.orders} requires images, but data.name={name} has"
      " none; leave data.orders empty"
    )
  return made
