"""Kinds of sources, which load data when a split is first used; their names."""

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

# The class is in ml_collections, which only commands need.
ConfigDict = Any
# The data of each split.
Splits = Mapping[str, Any]
Files = Callable[[], Sequence[pathlib.Path]] | None
# Numbers and a checksum; "splits" has the size of each split.
Digest = dict[str, int | str | list[int]]
# Tokens, and which of them are scored.
Window = tuple[np.ndarray, np.ndarray]


class _Data:
  """What all sources have in common."""

  load: Callable[[], Splits]
  classes: tuple[str, ...]  # names of labels, if examples have them
  separator: int | None = None  # the symbol after each document, if any
  arrangement = Arrangement()

  def sizes(self) -> list[int]:
    """The size of each of `SPLITS`: in examples or, of a stream, in symbols."""
    data = self.load()
    return [len(data[split]) for split in SPLITS]

  def _split(self, split: str) -> Any:
    """The data of a split; ValueError if it is empty or unknown."""
    if split not in SPLITS:
      raise ValueError(f"unknown {split=}; known: {', '.join(SPLITS)}")

    data = self.load()[split]
    if not len(data):
      raise ValueError(f"the {split} split is empty; add data to it")
    return data


class _Apart(_Data):
  """What sources have in common if examples are scored one by one."""

  noun: str  # in digests of checkpoints
  files: Files = None  # those of all splits; ValueError if one is damaged

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """The examples of a split as rows."""
    raise NotImplementedError

  def digest(self) -> Digest:
    """What tells these data from others, for checkpoints.

    It has numbers of examples, and a CRC-32 of the names of classes together
    with the files or, without files, the examples.
    """
    # Labels are numbers of classes: other names, sorted otherwise, change them.
    crc = zlib.crc32(os.fsencode("\n".join(self.classes)))
    if self.files:
      # As stored, which is much faster than decoding all images.
      crc ^= files_lib.crc32(*self.files())
    else:
      for split in SPLITS:
        for row in self.examples(split):
          crc = zlib.crc32(row.data, crc)

    sizes = self.sizes()
    return {self.noun: sizes[0], "splits": sizes, "crc32": f"{crc:08x}"}

  def windows(self, split: str, min_context: int = 0) -> Lazy[Window]:
    """What is scored of a split, one pair for each example.

    Args:
      split: one of `SPLITS`.
      min_context: must be 0, as no example continues another.

    Returns:
      Pairs (row, scored): see `examples`; bool, [1] for its label if there are
      classes, otherwise of the row's shape, for its symbols.
    """
    if min_context:
      what = "labels" if self.classes else self.noun
      raise ValueError(
        f"{min_context=} must be 0 for {what}: each is scored separately"
      )

    rows = self.examples(split)

    def window(i):
      row = rows[i]
      return row, np.ones(1 if self.classes else row.shape, bool)

    return Lazy(len(rows), window)


def count_frames(shape: tuple[int, int, int]) -> int:
  """Frames of a gray clip, at least 4 squares from the top down; else 1.

  A tall gray image is taken for square frames below each other.

  Args:
    shape: (rows, columns, channels).
  """
  rows, columns, channels = shape
  is_clip = channels == 1 and rows % columns == 0 and rows > 3 * columns
  return rows // columns if is_clip else 1


@dataclasses.dataclass(frozen=True)
class Images(_Apart):
  """Images as sequences: row by row, the channels of a pixel innermost.

  Attributes:
    shape: (rows, columns, channels).
    vocab_size: the number of levels of a channel.
    load: returns images of this shape, uint8, of each split, from a cache.
    files: returns the files of all splits; ValueError if one is damaged.
    unit: of losses.
    symbols: what symbols stand for, in order.
    optimum: the expected loss of the best predictor, if known.
    arrangement: the order in which images are generated.
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
    """Symbols of an image."""
    return math.prod(self.shape)

  @property
  def frames(self) -> int:
    """Frames of a clip, see `count_frames`; 1 for an image."""
    return count_frames(self.shape)

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """The images of a split, each as uint8 [length]."""
    images = self._split(split)
    return Lazy(len(images), lambda i: images[i].reshape(self.length))


@dataclasses.dataclass(frozen=True)
class Sequences(_Apart):
  """Sequences of up to `length` symbols, each with a label.

  Attributes:
    length: the most symbols of an example.
    shape: the sizes of the axes of positions, see `Stream.shape`.
    vocab_size: the number of symbols.
    classes: the names of the labels 0, 1, ...
    load: returns (symbols [n], label) of each example of each split, from a
      cache.
    files: returns the files of all splits; ValueError if one is damaged.
    symbols: what symbols stand for, in order.
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
    """The examples of a split as rows of integers.

    A row is [length + 2]: the symbols, zeros up to the length, the label, the
    number of symbols.

    Raises:
      ValueError: when an example is read that has no symbols, too many, or an
        unknown label.
    """
    examples = self._split(split)

    def row(i):
      symbols, label = examples[i]
      number = len(self.classes)
      if not (0 <= label < number and 1 <= len(symbols) <= self.length):
        raise ValueError(
          f"example {i} of {split} has {len(symbols)} symbols and {label=}; it"
          f" must have 1 to {self.length:,} symbols and a label below {number}"
        )
      return self._row(symbols, label)

    return Lazy(len(examples), row)

  def _row(self, symbols, label):
    """Lays out an example as `examples` describes, in the smallest dtype."""
    number = len(symbols)
    # One array holds all, so that batches of examples are batches of arrays.
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
    columns: those of a table in which each position has a row and a column, by
      which it is embedded.
    load: returns the symbols of each split, uint8, uint16 or uint32 [n], or
      `streams.Joined`, from a cache.
    codec: what made them of files, and makes files of samples.
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
    """Rows and columns of the table that positions are embedded by."""
    return -(-self.length // self.columns), self.columns

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """The sequences that start at each symbol of a split, each [length].

    Raises ValueError if the split is shorter than one.
    """
    data = self._split(split)
    if len(data) < self.length:
      raise ValueError(
        f"{split} has {len(data)} symbols, fewer than"
        f" data.length={self.length}; use more data, other data.fractions or"
        " a smaller data.length"
      )

    # Windows at each symbol, not at multiples of the length: a network sees
    # each symbol at each position.
    size = len(data) - self.length + 1
    return Lazy(size, lambda i: np.asarray(data[i : i + self.length]))

  def num_bytes(self, split: str, size: int) -> int | None:
    """The bytes in the first `size` symbols of a split; None if unknown."""
    # A table of bytes may be missing, which the first block tells.
    total = 0
    for block in _blocks(self._split(split)[:size]):
      number = self.codec.num_bytes(block)
      if number is None:
        return None
      total += number
    return total

  def digest(self) -> Digest:
    """Numbers of symbols, and their CRC-32."""
    crc = 0
    for split in SPLITS:
      for block in _blocks(self.load()[split]):
        crc = zlib.crc32(block.data, crc)

    sizes = self.sizes()
    return dict(symbols=sum(sizes), splits=sizes, crc32=f"{crc:08x}")

  def windows(self, split: str, min_context: int = 0) -> Lazy[Window]:
    """Overlapping sequences that together score each symbol exactly once.

    Args:
      split: one of `SPLITS`.
      min_context: the least number of positions before a scored one, in
        [0, length). The first window is scored entirely nonetheless.

    Returns:
      Pairs (tokens, scored): symbols [length], the last ones padded with zeros
      that are not scored; bool [length].
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

      # All but the first window repeat `min_context` symbols of the one before.
      position = np.arange(self.length)
      is_new = position >= (min_context if i else 0)
      scored = is_new & (position < len(tokens))
      return np.pad(tokens, (0, self.length - len(tokens))), scored

    # The first window covers `length` symbols, and each other one `step` more.
    left = max(0, len(data) - self.length)
    return Lazy(1 + -(-left // step), window)


Source = Images | Stream | Sequences


def _blocks(data: Any) -> Iterator[np.ndarray]:
  """The symbols of a split, some at a time: they may not fit into memory."""
  for start in range(0, len(data), files_lib.BLOCK):
    yield np.ascontiguousarray(data[start : start + files_lib.BLOCK])


# What other modules add.

Factory = TypeVar("Factory", bound=Callable[..., Source])

SOURCES: dict[str, Callable[..., Source]] = {}
# The names of those that read no `data.path`.
WITHOUT_PATH: set[str] = set()


def register(
  name: str, reads_path: bool = True
) -> Callable[[Factory], Factory]:
  """Decorates a function that maps the `data` group of a config to a source.

  `data.name` selects the source by its name. A config file may register its
  own:

    @data.register("mine")
    def mine(config):
      return data.Stream(config.length, config.columns, load=...)

  Args:
    name: of the source.
    reads_path: whether it reads `data.path`; if not, setting that is an error.

  Raises:
    ValueError: the name is taken.
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
  """Makes the source that the `data` group of a config selects.

  Args:
    config: the `data` group.

  Raises:
    ValueError: the name is unknown, or a field is invalid.
  """
  name = config.name
  if name not in SOURCES:
    raise ValueError(
      f"unknown data.name={name!r}; known: {', '.join(SOURCES)}; others must be"
      " registered first, for commands by a config file, --config=FILE"
    )
  if config.path and name in WITHOUT_PATH:
    raise ValueError(
      f"data.path={config.path} is not read with data.name={name}; leave it"
      " empty, or set data.name to bytes"
    )

  made = SOURCES[name](config)
  if config.documents and made.separator is None:
    raise ValueError(
      f"data.documents=True, but data.name={name} has no documents; set it to"
      " bytes, jsonl or fasta, or leave documents False"
    )

  if isinstance(made, Images):
    arrangement = arrangements.of(config.orders, made.shape)
    return dataclasses.replace(made, arrangement=arrangement)
  if config.orders:
    raise ValueError(
      f"data.orders={config.orders} needs images, not data.name={name}"
    )
  return made
