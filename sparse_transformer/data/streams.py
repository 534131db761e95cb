"""Sources of files: streams of symbols."""

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

# Of enwik8 and text8, whose bytes are 90 % train, 5 % validation, 5 % test.
SIZE = 100_000_000
# The MD5 of enwik8.
ENWIK8 = "a1fa5ffddb56f4953e226637dabbb36a"
# Folders of the standard library that differ between machines: installed
# packages, and the tests, which some distributions omit.
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
  """The bytes of the field `text` of all records of JSON Lines files.

  With `data.documents`, each record is a document.
  """
  codec = JsonLines(0 if config.documents else None)
  suffixes = [".jsonl", ".ndjson"]
  path = files.from_config(config.path)
  beside = files.below(path) if path.is_dir() else []
  # Some shards end in .json, but so do files about data, which may be beside.
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
  """Integers of a tokenizer: a .npy or .bin file, or a folder of splits.

  A token_bytes.npy beside them says how many bytes each token stands for, see
  `Tokens`.
  """
  path = files.from_config(config.path)
  folder = path if path.is_dir() else path.parent
  codec = Tokens(config.vocab_size, folder)
  return _from_path(config, codec, ".bin", ".npy")


@register("stdlib", reads_path=False)
def stdlib(config: ConfigDict) -> Stream:
  """The Python source of the interpreter's own standard library.

  It needs no download; versions of Python differ.
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
  """The first 100,000,000 bytes of an English Wikipedia dump, or a zip."""
  return _published(config, Text(), ENWIK8)


@register("text8")
def text8(config: ConfigDict) -> Stream:
  """The letters of enwik8, cleaned; or a zip."""
  return _published(config, Letters())


def _published(config, codec, md5=""):
  """The stream of a file of `SIZE` bytes, whose MD5 begins with `md5`."""

  def load():
    path = files.check_path(config.path)
    data = files.read(path)
    symbols = codec.decode(data, path)
    # Another file of that size would give bits that no paper can
    # be compared to.
    actual = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if len(data) != SIZE or not actual.startswith(md5):
      raise ValueError(
        f"{path} has {len(data):,} bytes with MD5 {actual}, but {config.name}"
        f" must have {SIZE:,}{md5 and f' with {md5}'}; for other text, set"
        " data.name to bytes"
      )

    # The split of Transformer-XL and others: the last 5 % are the test.
    parts = np.split(symbols, [SIZE * 18 // 20, SIZE * 19 // 20])
    return dict(zip(SPLITS, parts, strict=True))

  return _stream(config, codec, load)


def _from_path(config, codec, *suffixes):
  """The stream of the files in `data.path` that have one of the suffixes."""

  def load():
    path = files.check_path(config.path)
    # The same files may be those of two splits.
    read = functools.cache(functools.partial(_read, codec))
    groups = listed(path, *suffixes, by=config.splits)
    symbols = {split: read(paths) for split, paths in groups.items()}
    return divide(symbols, config.fractions)

  return _stream(config, codec, load)


def _stream(config, codec, load):
  """A stream of the files that `load` reads, when a split is first used."""
  return Stream(
    length=config.length,
    columns=config.columns,
    load=functools.cache(load),
    codec=codec,
  )


def _read(codec, paths):
  """The symbols of files, one after the other; what is mapped is not copied."""
  parts = []
  for path in paths:
    parts += codec.read(path)
  if not parts:
    return np.zeros(0, np.uint8)
  if len(parts) == 1:
    return parts[0]

  # Text was decompressed or decoded, and is in memory; tokens may exceed it.
  are_mapped = all(isinstance(part, np.memmap) for part in parts)
  dtypes = {part.dtype for part in parts}
  if are_mapped and len(dtypes) == 1:
    return Joined(parts)
  return np.concatenate(parts)


class Joined:
  """Mapped arrays of one dtype, one after the other, which are not copied.

  A slice is a slice of one of them, or joins several: `np.asarray` copies it.

  Args:
    parts: the arrays, each [n].
  """

  def __init__(self, parts: Sequence[np.ndarray]):
    self.parts = list(parts)
    # Where each part begins, and where the last one ends.
    self.starts = [0, *itertools.accumulate(map(len, parts))]

  def __len__(self) -> int:
    return self.starts[-1]

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    return np.concatenate(self.parts, dtype=dtype)

  def __getitem__(self, key: slice) -> Any:
    start, stop, _ = key.indices(len(self))
    if start >= stop:
      return self.parts[0][:0]

    # Of thousands of shards, a sequence touches one or two.
    first = bisect.bisect_right(self.starts, start) - 1
    end = bisect.bisect_left(self.starts, stop)
    slices = []
    for i in range(first, end):
      part = self.parts[i]
      offset = self.starts[i]
      # In all parts but the first, the slice begins at their beginning.
      begin = max(0, start - offset)
      slices.append(part[begin : stop - offset])
    return slices[0] if len(slices) == 1 else Joined(slices)
