"""Sources that read files as streams of symbols."""

import bisect
import functools
import hashlib
import itertools
import pathlib
import sysconfig
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparse_transformer.data import (
  audio as audio_lib,
  fasta as fasta_lib,
  files,
)
from sparse_transformer.data.sources import ConfigDict, Stream, register
from sparse_transformer.data.splits import SPLITS, divide, listed
from sparse_transformer.data.text import JsonLines, Letters, Text
from sparse_transformer.data.tokens import Tokens

# The number of bytes of enwik8 and text8. They are split into 90 % train, 5 %
# validation and 5 % test.
SIZE = 100_000_000
# The MD5 of enwik8.
ENWIK8 = "a1fa5ffddb56f4953e226637dabbb36a"
# Folders in the standard library that differ between machines: those of
# installed packages, and those of tests, which some distributions omit.
NOT_EVERYWHERE = {
  "site-packages",
  "dist-packages",
  "__pycache__",
  "test",
  "tests",
  "idle_test",
}


@register("bytes")
def any_bytes(config: ConfigDict) -> Stream:
  """The bytes of a file, or of all files in a folder."""
  return _from_path(config, Text(0 if config.documents else None), "")


@register("jsonl")
def jsonl(config: ConfigDict) -> Stream:
  """The field `text` of all records of JSON Lines files, as bytes.

  With `data.documents`, each record is a document.
  """
  codec = JsonLines(0 if config.documents else None)
  suffixes = [".jsonl", ".ndjson"]
  path = files.from_config(config.path)
  beside = files.below(path) if path.is_dir() else []
  # Shards may end in .json, but so may files of metadata beside them. So read
  # .json only if there is no other file.
  if not any(files.has_suffix(x, *suffixes) for x in beside):
    suffixes.append(".json")
  return _from_path(config, codec, *suffixes)


@register("fasta")
def fasta(config: ConfigDict) -> Stream:
  """The bases of a FASTA file, or of all FASTA files in a folder."""
  separator = len(fasta_lib.BASES) if config.documents else None
  codec = fasta_lib.Fasta(separator)
  return _from_path(config, codec, ".fasta", ".fa", ".fna")


@register("audio")
def audio(config: ConfigDict) -> Stream:
  """The sound of a WAV file, or of all WAV files in a folder."""
  return _from_path(config, audio_lib.Audio(config.rate), ".wav")


@register("tokens")
def tokens(config: ConfigDict) -> Stream:
  """Tokens of a tokenizer, from a .npy or .bin file, or a folder of them.

  A file token_bytes.npy beside them contains the number of bytes of text that
  each token represents, see `Tokens`.
  """
  path = files.from_config(config.path)
  folder = path if path.is_dir() else path.parent
  codec = Tokens(config.vocab_size, folder)
  return _from_path(config, codec, ".bin", ".npy")


@register("stdlib", reads_path=False)
def stdlib(config: ConfigDict) -> Stream:
  """The Python source code of the interpreter's standard library.

  The source code needs no download, but it differs between versions of Python.
  """
  codec = Text()

  def load():
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for path in sorted(root.rglob("*.py")):
      if NOT_EVERYWHERE.isdisjoint(path.relative_to(root).parts):
        paths.append(path)
    return divide({"": _read(codec, paths)}, config.fractions)

  return _stream(config, codec, load)


@register("enwik8")
def enwik8(config: ConfigDict) -> Stream:
  """The first 100,000,000 bytes of an English Wikipedia dump.

  `data.path` names the file, or a .zip that contains it.
  """
  return _published(config, Text(), ENWIK8)


@register("text8")
def text8(config: ConfigDict) -> Stream:
  """The letters of a cleaned Wikipedia dump.

  `data.path` names the file, or a .zip that contains it.
  """
  return _published(config, Letters())


def _published(config, codec, md5=""):
  """Returns the stream of a file of `SIZE` bytes; "" allows any MD5."""

  def load():
    path = files.check_path(config.path)
    data = files.read(path)
    symbols = codec.decode(data, path)
    # Check the MD5, because scores on a different file of the same size could
    # not be compared with those of papers.
    actual = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if len(data) != SIZE or not actual.startswith(md5):
      raise ValueError(
        f"{path} has {len(data):,} bytes with MD5 {actual}, but {config.name}"
        f" must have {SIZE:,}{md5 and f' with {md5}'}; for other text, set"
        " data.name=bytes"
      )

    # The splits are those of Transformer-XL and others, with the last 5 % as
    # the test.
    parts = np.split(symbols, [SIZE * 18 // 20, SIZE * 19 // 20])
    return dict(zip(SPLITS, parts, strict=True))

  return _stream(config, codec, load)


def _from_path(config, codec, *suffixes):
  """Returns the stream of files in `data.path` with one of the suffixes."""

  def load():
    path = files.check_path(config.path)
    # Two splits may consist of the same files, so cache their contents.
    read = functools.cache(functools.partial(_read, codec))
    groups = listed(path, *suffixes, by=config.splits)
    symbols = {split: read(paths) for split, paths in groups.items()}
    return divide(symbols, config.fractions)

  return _stream(config, codec, load)


def _stream(config, codec, load):
  """Returns a stream that calls `load` only when a split is first used."""
  return Stream(
    length=config.length,
    columns=config.columns,
    load=functools.cache(load),
    codec=codec,
  )


def _read(codec, paths):
  """Returns the concatenated symbols of files.

  Files of tokens with the same dtype stay memory-mapped and are not copied.
  """
  parts = []
  for path in paths:
    parts += codec.read(path)
  if not parts:
    return np.zeros(0, np.uint8)
  if len(parts) == 1:
    return parts[0]

  # Text is already in memory, so it can be copied. Tokens may not fit in
  # memory, so keep them mapped.
  are_mapped = all(isinstance(part, np.memmap) for part in parts)
  dtypes = {part.dtype for part in parts}
  if are_mapped and len(dtypes) == 1:
    return Joined(parts)
  return np.concatenate(parts)


class Joined:
  """Concatenates memory-mapped arrays of one dtype without copying them.

  A slice that lies within one array is a view of it. Otherwise, the slice is a
  `Joined` of several views. `np.asarray` copies these views into one array.

  Args:
    parts: the arrays, each [n].
  """

  def __init__(self, parts: Sequence[np.ndarray]):
    self.parts = list(parts)
    # The index at which each part starts, and the index at which the last ends.
    self.starts = [0, *itertools.accumulate(map(len, parts))]

  def __len__(self) -> int:
    return self.starts[-1]

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    return np.concatenate(self.parts, dtype=dtype)

  def __getitem__(self, key: slice) -> Any:
    start, stop, _ = key.indices(len(self))
    if start >= stop:
      return self.parts[0][:0]

    # Search, because a sequence overlaps only one or two of perhaps thousands
    # of parts.
    first = bisect.bisect_right(self.starts, start) - 1
    end = bisect.bisect_left(self.starts, stop)
    slices = []
    for i in range(first, end):
      part = self.parts[i]
      offset = self.starts[i]
      # In all parts but the first, the slice begins at index 0.
      begin = max(0, start - offset)
      slices.append(part[begin : stop - offset])
    return slices[0] if len(slices) == 1 else Joined(slices)
