"""Kinds of sources, which load data when a split is first used; their names."""

import dataclasses
import itertools
import math
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from sparse_transformer.data import codecs, files as files_lib
from sparse_transformer.data.batches import Lazy
from sparse_transformer.data.image_orders import Orders
from sparse_transformer.data.splits import SPLITS

ConfigDict = Any  # of ml_collections, which only commands need
Splits = Mapping[str, Any]  # the data of each split
Files = Callable[[], Sequence[pathlib.Path]] | None  # those of all splits
Digest = dict[str, int | str | list[int]]  # "splits" has the size of each
Window = tuple[np.ndarray, np.ndarray]  # tokens, and which of them are scored


class _Apart:
  """What sources have in common if examples are scored one by one."""

  separator: ClassVar[None] = None  # an example is one document

  def digest(self: Any) -> Digest:
    """Numbers of examples; CRC-32 of classes, and files or examples."""
    crc = zlib.crc32(os.fsencode("\n".join(self.classes)))
    if self.files:
      crc ^= files_lib.crc32(*self.files())
    else:
      for row in itertools.chain(*map(self.examples, SPLITS)):
        crc = zlib.crc32(row.data, crc)
    sizes = sizes_of(self)
    return {self.noun: sizes[0], "splits": sizes, "crc32": f"{crc:08x}"}

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
  """Images as sequences: row by row, the channels of a pixel innermost."""

  shape: tuple[int, int, int]  # (rows, columns, channels)
  vocab_size: int  # levels of a channel
  load: Callable[[], Splits]  # images, uint8 of this shape, from a cache
  files: Files = None  # raises ValueError if one is damaged
  unit: str = "bits/dim"  # of losses
  symbols: str = "levels"  # what they stand for, in order
  optimum: float | None = None  # expected loss of the best predictor, if known
  orders: Orders = Orders()  # in which images are generated
  classes: ClassVar[tuple[str, ...]] = ()
  noun: ClassVar[str] = "images"  # in digests of checkpoints

  @property
  def length(self) -> int:
    return math.prod(self.shape)

  @property
  def frames(self) -> int:
    """Frames of a gray clip, at least 4 squares from the top down; else 1."""
    rows, columns, channels = self.shape
    is_clip = channels == 1 and rows % columns == 0 and rows > 3 * columns
    return rows // columns if is_clip else 1

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """The images of a split, each as uint8 [length]."""
    images = _of_split(self.load, split)
    return Lazy(len(images), lambda i: images[i].reshape(self.length))


@dataclasses.dataclass(frozen=True)
class Sequences(_Apart):
  """Sequences of up to `length` symbols, each with a label."""

  length: int
  shape: tuple[int, ...]  # sizes of the axes of positions, see `Stream.shape`
  vocab_size: int
  classes: tuple[str, ...]  # names of the labels 0, 1, ...; () without them
  load: Callable[[], Splits]  # (symbols [n], label) of each example, cached
  files: Files = None
  symbols: str = "symbols"
  unit_of_symbols: str = "bits/symbol"  # of losses without labels
  noun: ClassVar[str] = "examples"
  orders: ClassVar[Orders] = Orders()

  @property
  def unit(self) -> str:
    return "bits/label" if self.classes else self.unit_of_symbols

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """The examples of a split as rows of integers.

    With classes, a row is [length + 2]: the symbols, zeros up to the length,
    the label, the number of symbols. Without, it is [length]: the symbols, then
    -1.
    """
    examples = _of_split(self.load, split)
    largest = max(self.vocab_size - 1, self.length, len(self.classes) - 1)
    dtype = np.min_scalar_type(largest if self.classes else -self.vocab_size)

    def example(i: int) -> np.ndarray:
      symbols, label = examples[i]
      number = len(self.classes) or label + 1
      if not (0 <= label < number and 1 <= len(symbols) <= self.length):
        raise ValueError(
          f"example {i} of {split} has {len(symbols)} symbols and {label=}; it"
          f" must have 1 to {self.length:,} symbols and a label below {number}"
        )
      if not self.classes:
        rest = self.length - len(symbols)
        return np.pad(symbols.astype(dtype), (0, rest), constant_values=-1)
      row = np.zeros(self.length + 2, dtype)
      row[: len(symbols)], row[-2:] = symbols, (label, len(symbols))
      return row

    return Lazy(len(examples), example)


@dataclasses.dataclass(frozen=True)
class Stream:
  """One long stream of symbols, cut into sequences."""

  length: int  # symbols in a sequence
  columns: int  # each position has a row and a column of such a table to embed
  # Rows of uint8, uint16 or uint32, or `Joined`, from a cache.
  load: Callable[[], Splits]
  codec: codecs.Codec = codecs.Text()
  orders: ClassVar[Orders] = Orders()
  classes: ClassVar[tuple[str, ...]] = ()

  vocab_size = property(lambda self: self.codec.vocab_size)
  unit = property(lambda self: self.codec.unit)
  symbols = property(lambda self: self.codec.symbols)
  separator = property(lambda self: self.codec.separator)

  @property
  def shape(self) -> tuple[int, int]:
    return (-(-self.length // self.columns), self.columns)

  def examples(self, split: str) -> Lazy[np.ndarray]:
    """Sequences that start at each symbol of a split, [length]."""
    data = _of_split(self.load, split)
    if len(data) < self.length:
      raise ValueError(
        f"{split} has {len(data)} symbols, fewer than"
        f" data.length={self.length}; use more data, other data.fractions or"
        " a smaller data.length"
      )
    size = len(data) - self.length + 1
    return Lazy(size, lambda i: np.asarray(data[i : i + self.length]))

  def num_bytes(self, split: str, size: int) -> int | None:
    """The bytes in the first `size` symbols of a split; None if unknown."""
    total = 0
    for block in _blocks(_of_split(self.load, split)[:size]):
      if (number := self.codec.num_bytes(block)) is None:
        return None
      total += number
    return total

  def digest(self) -> Digest:
    """Numbers of symbols, and their CRC-32."""
    crc, sizes = 0, sizes_of(self)
    for block in itertools.chain(*(_blocks(self.load()[x]) for x in SPLITS)):
      crc = zlib.crc32(block.data, crc)
    return dict(symbols=sum(sizes), splits=sizes, crc32=f"{crc:08x}")

  def windows(self, split: str, min_context: int = 0) -> Lazy[Window]:
    """Overlapping sequences that together score each symbol exactly once.

    At least `min_context` positions, in [0, length), are before a scored one,
    but the first window is scored entirely. Windows are (tokens, scored): as
    loaded, the last one padded with zeros that are not scored; bool [length].
    """
    if not 0 <= min_context < self.length:
      raise ValueError(
        f"{min_context=} must be at least 0 and less than"
        f" data.length={self.length}"
      )
    data = _of_split(self.load, split)
    step = self.length - min_context

    def window(i: int) -> Window:
      tokens = np.asarray(data[i * step : i * step + self.length])
      position = np.arange(self.length)
      is_new = position >= (min_context if i else 0)
      scored = is_new & (position < len(tokens))
      return np.pad(tokens, (0, self.length - len(tokens))), scored

    return Lazy(1 + max(0, -(-(len(data) - self.length) // step)), window)


Source = Images | Stream | Sequences


def sizes_of(source: Source) -> list[int]:
  """The size of each split, in examples or, of a stream, symbols."""
  found = source.load()
  return [len(found[split]) for split in SPLITS]


def _blocks(data: Any) -> Iterator[np.ndarray]:
  """The symbols of a split, some at a time: they may not fit into memory."""
  for start in range(0, len(data), files_lib.BLOCK):
    yield np.ascontiguousarray(data[start : start + files_lib.BLOCK])


def _of_split(load: Callable[[], Splits], split: str) -> Any:
  """The data of a split; ValueError if it is empty or unknown."""
  if split not in SPLITS:
    raise ValueError(f"unknown {split=}; known: {', '.join(SPLITS)}")
  found = load()[split]
  if not len(found):
    raise ValueError(f"the {split} split is empty; add data to it")
  return found


Factory = TypeVar("Factory", bound=Callable[..., Source])

SOURCES: dict[str, Callable[..., Source]] = {}
WITHOUT_PATH: set[str] = set()  # these read no `data.path`


def register(
  name: str, reads_path: bool = True
) -> Callable[[Factory], Factory]:
  """Decorates a function that maps the `data` group of a config to a source.

  `data.name` selects it by this name; ValueError if it is taken. If it does not
  read `data.path`, setting that is an error.
  """
  if name in SOURCES:
    raise ValueError(f"source {name!r} is already registered")

  def add(factory: Factory) -> Factory:
    SOURCES[name] = factory
    if not reads_path:
      WITHOUT_PATH.add(name)
    return factory

  return add


def source(config: ConfigDict, labels: bool = True) -> Source:
  """Makes the source that the `data` group of a config selects.

  Without `labels`, labels in the data are ignored. Raises ValueError if the
  name is unknown, or a field is invalid.
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
  found = SOURCES[name](config)
  if config.documents and found.separator is None:
    raise ValueError(
      f"data.documents=True, but data.name={name} has no documents; set it to"
      " bytes, jsonl or fasta, or leave documents False"
    )
  if isinstance(found, Images):
    orders = Orders(config.orders, found.shape)
    return dataclasses.replace(found, orders=orders)
  if config.orders:
    raise ValueError(
      f"data.orders={config.orders} needs images, not data.name={name}"
    )
  if not labels and isinstance(found, Sequences):
    return dataclasses.replace(found, classes=())
  return found
