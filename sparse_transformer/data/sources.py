"""Sources of byte sequences, and batches as a pure function of (seed, step).

A source is made from the `data` group of a config. It knows its vocabulary and
its geometry without the data, which it reads at the first use of a split.

  python -m sparse_transformer.data prepare cifar10|enwik8 [--data_dir=DIR]

downloads a data set and writes it where its source looks for it.
"""

import dataclasses
import functools
import math
import pathlib
import sysconfig
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from sparse_transformer.data import codecs, files as files_lib, lazy, tfds

SPLITS = ("train", "validation", "test")
# Images of the training set that make the validation set. CIFAR-10: as many as
# Child et al. 2019 hold out; ImageNet: as Jun et al. 2020, whose code follows
# it (https://github.com/openai/distribution_augmentation).
HELD_OUT = {"cifar10": 2_000, "imagenet64": 50_000}
TEXT8 = 90_000_000, 5_000_000, 5_000_000  # characters, as of enwik8's bytes


@dataclasses.dataclass(frozen=True)
class Images:
  """Images of shape (rows, columns, channels), each a sequence of its own.

  A sequence runs row by row, and within a pixel over its channels.
  """

  shape: tuple[int, int, int]
  vocab_size: int
  load: Callable[[], Mapping[str, Sequence[np.ndarray]]]
  files: Callable[[], Sequence[pathlib.Path]] | None = None  # that hold them
  unit: ClassVar[str] = "bits/dim"

  @property
  def length(self):
    return math.prod(self.shape)

  def examples(self, split):
    """Images of `split` as uint8 [length]."""
    images = _split(self, split)
    return lazy.Lazy(len(images), lambda i: images[i].reshape(self.length))

  def digest(self):
    """Number of training images, CRC-32 of the files, or of all images.

    Raises ValueError if a file of records is damaged.
    """
    number = len(self.examples("train"))
    if self.files:
      return dict(images=number, crc32=files_lib.crc32(self.files()))
    images = np.concatenate([self.load()[split] for split in SPLITS])
    return dict(images=number, crc32=f"{zlib.crc32(images):08x}")

  def windows(self, split, min_context=0):
    """Images of `split` as (tokens, scored), both [length]; all is scored."""
    if min_context:
      raise ValueError(
        f"{min_context=} must be 0 for images: each starts without a context"
      )
    examples = self.examples(split)
    scored = np.ones(self.length, bool)
    return lazy.Lazy(len(examples), lambda i: (examples[i], scored))


@dataclasses.dataclass(frozen=True)
class Stream:
  """One long row of symbols, cut into sequences of `length`.

  For the position embedding a sequence is laid out in a matrix of `columns`,
  whose last row may be left unfinished.
  """

  length: int
  columns: int
  load: Callable[[], Mapping[str, np.ndarray]]
  codec: Any = codecs.Text()  # what the symbols stand for

  def __post_init__(self):
    if self.length < 1 or self.columns < 1:
      raise ValueError(
        f"data.length={self.length} and data.columns={self.columns} must be"
        " at least 1"
      )

  @property
  def vocab_size(self):
    return self.codec.vocab_size

  @property
  def unit(self):
    return self.codec.unit

  @property
  def shape(self):
    return (-(-self.length // self.columns), self.columns)

  def examples(self, split):
    """Windows that start at any symbol of `split`, uint8 [length]."""
    data = _split(self, split)
    if len(data) < self.length:
      raise ValueError(
        f"{split} has {len(data)} symbols, fewer than"
        f" data.length={self.length}; use more data, other data.fractions or"
        " a smaller data.length"
      )
    size = len(data) - self.length + 1
    return lazy.Lazy(size, lambda i: data[i : i + self.length])

  def digest(self):
    """Of the symbols of all splits: their number and CRC-32."""
    data = np.concatenate([self.load()[split] for split in SPLITS])
    return dict(symbols=len(data), crc32=f"{zlib.crc32(data):08x}")

  def windows(self, split, min_context=0):
    """Windows (tokens, scored) that score each symbol of `split` once.

    The first scores all of its positions, the others only those that have at
    least `min_context` positions before them. The last is padded on the right
    with zeros that are not scored.
    """
    if not 0 <= min_context < self.length:
      raise ValueError(
        f"{min_context=} must be at least 0 and less than"
        f" data.length={self.length}"
      )
    data = _split(self, split)
    step = self.length - min_context

    def window(i):
      tokens = data[i * step :][: self.length]
      position = np.arange(self.length)
      scored = position < len(tokens)
      if i:
        scored &= position >= min_context
      return np.pad(tokens, (0, self.length - len(tokens))), scored

    return lazy.Lazy(1 + max(0, -(-(len(data) - self.length) // step)), window)


Source = Images | Stream


def source(config) -> Source:
  """The source that `config`, the `data` group of a config, asks for."""
  if config.name not in SOURCES:
    raise ValueError(
      f"unknown data.name={config.name!r}; known: {', '.join(SOURCES)}"
    )
  return SOURCES[config.name](config)


def batches(examples, batch_size, seed):
  """Endless batches uint8 [batch_size, length]: batches[step] for any step.

  A pure function of (seed, step), so that a run can be cut anywhere. Each
  epoch is shuffled anew; a batch may run across its end, nothing is dropped.
  """
  import grain

  if batch_size < 1:
    raise ValueError(f"{batch_size=} must be at least 1")
  shuffled = grain.MapDataset.source(examples).seed(seed).shuffle()
  return shuffled.repeat().batch(batch_size)


def _split(source, split):
  if split not in SPLITS:
    raise ValueError(f"unknown {split=}; known: {', '.join(SPLITS)}")
  return source.load()[split]


def _subset(items, indices):
  return lazy.Lazy(len(indices), lambda i: items[indices[i]])


def _permutation(n):
  # NumPy promises the stream of RandomState, not of Generator, to all versions
  # (NEP 19): a held-out image must stay held out.
  return np.random.RandomState(0).permutation(n)


# Images.


def _digits(config):
  del config  # bundled with scikit-learn

  def load():
    import sklearn.datasets

    images = sklearn.datasets.load_digits().images.astype(np.uint8)
    parts = np.split(_permutation(len(images)), [-400, -200])
    return {k: images[part] for k, part in zip(SPLITS, parts, strict=True)}

  return Images((8, 8, 1), 17, functools.cache(load))


def _cifar10(config):
  def load():
    folder = tfds.find(config, "cifar10", "cifar10_bytes")
    train = tfds.records(folder, "train", "image")
    order = _permutation(len(train))
    held_out = HELD_OUT["cifar10"]
    return {
      "train": _subset(train, np.sort(order[held_out:])),
      "validation": _subset(train, np.sort(order[:held_out])),
      "test": tfds.records(folder, "test", "image"),
    }

  def files():
    folder = tfds.find(config, "cifar10", "cifar10_bytes")
    return tfds.verified_files(folder)

  return Images((32, 32, 3), 256, functools.cache(load), files)


def _imagenet64(config):
  shape, name = (64, 64, 3), "downsampled_imagenet/64x64"
  path = pathlib.Path(config.path).expanduser()
  arrays = [path / f"{split}_64x64.npy" for split in ("train", "valid")]

  def in_arrays():
    return config.path and arrays[0].exists()

  def files():
    if in_arrays():
      return arrays
    return tfds.verified_files(tfds.find(config, name))

  def load():
    if in_arrays():
      train, test = (_array(path, shape) for path in arrays)
    else:
      folder = tfds.find(config, name)
      train, test = (
        tfds.records(folder, split, "image")
        for split in ("train", "validation")
      )
    first = len(train) - HELD_OUT["imagenet64"]
    if first < 1:
      raise ValueError(
        f"{len(train)} training images, of which {HELD_OUT['imagenet64']:,}"
        " are held out for validation"
      )
    return {
      "train": _subset(train, range(first)),
      "validation": _subset(train, range(first, len(train))),
      "test": test,
    }

  return Images(shape, 256, functools.cache(load), files)


def _array(path, shape):
  """Images uint8 [number, *shape] in a .npy file, read when they are asked."""
  try:
    images = np.load(path, mmap_mode="r")
  except FileNotFoundError:
    raise FileNotFoundError(f"no file {path}: see data.path") from None
  except (ValueError, EOFError, OSError) as error:
    raise files_lib.damaged(path, error) from error
  if images.shape[1:] != shape or images.dtype != np.uint8:
    raise ValueError(
      f"{path} holds {images.dtype} {images.shape}; images are uint8"
      f" (number, {', '.join(map(str, shape))})"
    )
  return images


# Streams.


def _bytes(config):
  return _files(config, codecs.Text())


def _fasta(config):
  return _files(config, codecs.Fasta(), ".fasta", ".fa", ".fna")


def _audio(config):
  return _files(config, codecs.Audio(config.rate), ".wav")


def _files(config, codec, *suffixes):
  """A stream of the files at `config.path`, in a folder by their suffix."""

  def load():
    if not config.path:
      raise FileNotFoundError("data.path is not set: name a file or a folder")
    path = pathlib.Path(config.path).expanduser()
    if not path.is_dir():
      return [path]
    names = sorted(file for file in path.rglob("*") if not file.is_dir())
    if not suffixes:
      return names
    chosen = [f for f in names if {s.lower() for s in f.suffixes} & {*suffixes}]
    if not chosen:
      raise FileNotFoundError(
        f"{path} has no file that ends in {', '.join(suffixes)}"
      )
    return chosen

  return _stream(config, codec, load)


def _stdlib(config):
  # Installed packages differ from machine to machine, as do the tests, which
  # some distributions leave out.
  skipped = {"site-packages", "dist-packages", "__pycache__"}
  skipped |= {"test", "tests", "idle_test"}

  def load():
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [file.relative_to(root) for file in sorted(root.rglob("*.py"))]
    return [root / f for f in files if skipped.isdisjoint(f.parts[:-1])]

  return _stream(config, codecs.Text(), load)


def _stream(config, codec, files):
  """A stream of the contents of `files()`, split by `config.fractions`."""
  fractions = tuple(config.fractions)
  if (
    len(fractions) != 3
    or min(fractions) <= 0
    or not math.isclose(sum(fractions), 1)
  ):
    raise ValueError(
      f"data.{fractions=} must be three positive numbers with sum 1, for"
      " train, validation and test"
    )

  def load():
    parts = [codec.decode(files_lib.read(path), path) for path in files()]
    data = np.concatenate([np.zeros(0, np.uint8), *parts])
    ends = [round(len(data) * sum(fractions[:k])) for k in (1, 2)]
    splits = dict(zip(SPLITS, np.split(data, ends), strict=True))
    for split, part in splits.items():
      if not len(part):
        raise ValueError(
          f"{split} is empty: {len(data)} symbols in all, data.{fractions=};"
          " use more data or other fractions"
        )
    return splits

  return Stream(config.length, config.columns, functools.cache(load), codec)


def _text8(config):
  def load():
    if not config.path:
      raise FileNotFoundError("data.path is not set: name text8 or text8.zip")
    path = pathlib.Path(config.path).expanduser()
    data = codec.decode(files_lib.read(path), path)
    if len(data) != sum(TEXT8):
      raise ValueError(
        f"{path} has {len(data):,} characters, text8 {sum(TEXT8):,}; for other"
        " text there is data.name=bytes"
      )
    parts = np.split(data, np.cumsum(TEXT8)[:2])
    return dict(zip(SPLITS, parts, strict=True))

  codec = codecs.Letters()
  return Stream(config.length, config.columns, functools.cache(load), codec)


def _enwik8(config):
  def load():
    from sparse_transformer.data.builders import enwik8

    path = pathlib.Path(config.path).expanduser()
    if path.is_file():
      return enwik8.Enwik8.splits(files_lib.read(path), path)
    folder = tfds.find(config, "enwik8")
    return {
      split: np.concatenate(list(tfds.records(folder, split, "bytes")))
      for split in SPLITS
    }

  return Stream(config.length, config.columns, functools.cache(load))


SOURCES = {
  "digits": _digits,
  "cifar10": _cifar10,
  "imagenet64": _imagenet64,
  "bytes": _bytes,
  "stdlib": _stdlib,
  "enwik8": _enwik8,
  "text8": _text8,
  "fasta": _fasta,
  "audio": _audio,
}
