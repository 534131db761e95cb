"""Sources of streams of symbols: text, bases, sound."""

import functools
import pathlib
import sysconfig

import numpy as np

from sparse_transformer.data import array_records, codecs, files as files_lib
from sparse_transformer.data.sources import (
  SPLITS,
  ConfigDict,
  Stream,
  check_no_path,
  register,
)

# Characters of the splits, like the bytes of enwik8.
TEXT8 = 90_000_000, 5_000_000, 5_000_000


@register("bytes")
def any_bytes(config: ConfigDict) -> Stream:
  """The bytes of a file, or of all files in a folder."""
  return _from_path(config, codecs.Text(0 if config.documents else None))


@register("stdlib")
def stdlib(config: ConfigDict) -> Stream:
  """The Python source of the interpreter's own standard library."""
  # Excludes what differs between machines: installed packages, and the tests,
  # which some distributions omit.
  skipped = {"site-packages", "dist-packages", "__pycache__"}
  skipped |= {"test", "tests", "idle_test"}

  def files():
    check_no_path(config)
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    return [root / p for p in paths if skipped.isdisjoint(p.parts[:-1])]

  return _from_files(config, codecs.Text(), files)


@register("enwik8", builder="sparse_transformer.data.builders:Enwik8")
def enwik8(config: ConfigDict) -> Stream:
  """enwik8, from the file or its archive, or as our builder prepares it."""

  @functools.cache
  def load():
    from sparse_transformer.data.builders import Enwik8

    path = files_lib.from_config(config.path)
    if path.exists() and not path.is_dir():
      return Enwik8.splits(files_lib.read(path), path)
    folder = array_records.find(config, "enwik8")
    return {
      split: np.concatenate(list(array_records.read(folder, split, "bytes")))
      for split in SPLITS
    }

  return Stream(config.length, config.columns, load)


@register("text8")
def text8(config: ConfigDict) -> Stream:
  """text8, from the file or its archive."""
  codec = codecs.Letters()

  @functools.cache
  def load():
    path = _check_path(config)
    data = codec.decode(files_lib.read(path), path)
    if len(data) != sum(TEXT8):
      raise ValueError(
        f"{path} has {len(data):,} characters, but text8 has {sum(TEXT8):,};"
        " for other text, set data.name to bytes"
      )
    parts = np.split(data, np.cumsum(TEXT8)[:2])
    return dict(zip(SPLITS, parts, strict=True))

  return Stream(config.length, config.columns, load, codec)


@register("fasta")
def fasta(config: ConfigDict) -> Stream:
  """The bases of a FASTA file, or of all FASTA files in a folder."""
  separator = len(codecs.BASES) if config.documents else None
  return _from_path(config, codecs.Fasta(separator), ".fasta", ".fa", ".fna")


@register("audio")
def audio(config: ConfigDict) -> Stream:
  """The sound of a WAV file, or of all WAV files in a folder."""
  return _from_path(config, codecs.Audio(config.rate), ".wav")


def _from_path(config, codec, *suffixes):
  """A stream of the file at `data.path`, or of files below with a suffix."""

  def files():
    path = _check_path(config)
    if not path.is_dir():
      return [path]
    found = [
      file
      for file in files_lib.below(path)
      if not suffixes or {s.lower() for s in file.suffixes} & {*suffixes}
    ]
    if not found:
      ending = f" that ends in {', '.join(suffixes)}" if suffixes else ""
      raise FileNotFoundError(
        f"{path} has no file{ending}; set data.path to another file or folder"
      )
    return found

  return _from_files(config, codec, files)


def _check_path(config: ConfigDict) -> pathlib.Path:
  """The path in `data.path`; raises FileNotFoundError if it does not exist."""
  if not config.path:
    raise FileNotFoundError("data.path is not set: name a file or a folder")
  path = files_lib.from_config(config.path)
  if not path.exists():
    raise FileNotFoundError(
      f"no file or folder {path}; set data.path to one that exists"
    )
  return path


def _from_files(config, codec, files):
  """A stream of the contents of files, split in proportion to the fractions."""
  fractions = tuple(config.fractions)

  @functools.cache
  def load():
    parts = [
      codec.decode(data, path) for path, data in files_lib.read_all(files())
    ]
    # One file needs no copy.
    empty = np.zeros(0, np.uint8)
    data = parts[0] if len(parts) == 1 else np.concatenate([empty, *parts])
    ends = [round(len(data) * sum(fractions[:k])) for k in (1, 2)]
    splits = dict(zip(SPLITS, np.split(data, ends), strict=True))
    for split, part in splits.items():
      if not len(part):
        raise ValueError(
          f"{split} is empty: {len(data)} symbols in all, data.{fractions=};"
          " use more data or other fractions"
        )
    return splits

  return Stream(config.length, config.columns, load, codec)
