"""Sources of streams of symbols: text, bases, sound."""

import dataclasses
import functools
import itertools
import pathlib
import sysconfig
from collections.abc import Iterable

import numpy as np

from sparse_transformer.data import array_records, codecs, files
from sparse_transformer.data.registered import ConfigDict, register
from sparse_transformer.data.sources import Stream
from sparse_transformer.data.splits import SPLITS, divide, named

# Characters of the splits, like the bytes of enwik8.
TEXT8 = 90_000_000, 5_000_000, 5_000_000


@register("bytes")
def any_bytes(config: ConfigDict) -> Stream:
  """The bytes of a file, or of all files in a folder."""
  return _from_path(config, codecs.Text(0 if config.documents else None), "")


@register("jsonl")
def jsonl(config: ConfigDict) -> Stream:
  """The bytes of the field `text` of all records of JSON Lines files."""
  codec = codecs.JsonLines(0 if config.documents else None)
  return _from_path(config, codec, ".jsonl")


@register("fasta")
def fasta(config: ConfigDict) -> Stream:
  """The bases of a FASTA file, or of all FASTA files in a folder."""
  separator = len(codecs.BASES) if config.documents else None
  return _from_path(config, codecs.Fasta(separator), ".fasta", ".fa", ".fna")


@register("audio")
def audio(config: ConfigDict) -> Stream:
  """The sound of a WAV file, or of all WAV files in a folder."""
  return _from_path(config, codecs.Audio(config.rate), ".wav")


@register("tokens")
def tokens(config: ConfigDict) -> Stream:
  """Integers of a tokenizer: a .npy or .bin file, or a folder of splits."""
  path = files.from_config(config.path)
  folder = path if path.is_dir() else path.parent
  codec = codecs.Tokens(config.vocab_size, folder)
  stream = _from_path(config, codec, ".bin", ".npy")

  def load():
    codec.num_bytes(np.zeros(0, np.uint8))  # a wrong table is found now
    if path.is_dir() and not named(path, ".bin", ".npy"):
      raise FileNotFoundError(
        f"{path} has no train.bin or train.npy; set data.path to another folder"
        " or to a file"
      )
    return stream.load()

  return dataclasses.replace(stream, load=load)


@register("stdlib", reads_path=False)
def stdlib(config: ConfigDict) -> Stream:
  """The Python source of the interpreter's own standard library."""
  # Excludes what differs between machines: installed packages, and the tests,
  # which some distributions omit.
  skipped = {"site-packages", "dist-packages", "__pycache__"}
  skipped |= {"test", "tests", "idle_test"}
  codec = codecs.Text()

  @functools.cache
  def load():
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [root / p for p in paths if skipped.isdisjoint(p.parts[:-1])]
    return divide(_read(codec, kept), config.fractions)

  return Stream(config.length, config.columns, load, codec)


@register("enwik8", builder="sparse_transformer.data.builders:Enwik8")
def enwik8(config: ConfigDict) -> Stream:
  """enwik8, from the file or its archive, or as our builder prepares it."""

  @functools.cache
  def load():
    from sparse_transformer.data.builders import Enwik8

    path = files.from_config(config.path)
    if path.exists() and not path.is_dir():
      return Enwik8.splits(files.read(path), path)
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
    path = files.check_path(config.path)
    data = codec.decode(files.read(path), path)
    if len(data) != sum(TEXT8):
      raise ValueError(
        f"{path} has {len(data):,} characters, but text8 has {sum(TEXT8):,};"
        " for other text, set data.name to bytes"
      )
    parts = np.split(data, np.cumsum(TEXT8)[:2])
    return dict(zip(SPLITS, parts, strict=True))

  return Stream(config.length, config.columns, load, codec)


def _from_path(
  config: ConfigDict, codec: codecs.Codec, *suffixes: str
) -> Stream:
  """A stream of the file in `data.path`, or of those below that have a suffix.

  Its splits are those that names in the folder tell, or else by the fractions.
  """
  find = lambda path: files.find(path, *suffixes)

  @functools.cache
  def load():
    path = files.check_path(config.path)
    splits = named(path, *suffixes)
    if not splits:
      return divide(_read(codec, find(path)), config.fractions)
    rows = {}  # two splits may have the same paths
    for paths in dict.fromkeys(splits.values()):
      rows[paths] = _read(codec, itertools.chain(*map(find, paths)))
      if not len(rows[paths]):
        raise ValueError(f"{paths[0]} is empty; add data to it, or remove it")
    return {split: rows[paths] for split, paths in splits.items()}

  return Stream(config.length, config.columns, load, codec)


def _read(codec: codecs.Codec, paths: Iterable[pathlib.Path]) -> np.ndarray:
  """The symbols of files, one after the other; those of one are not copied."""
  parts = [codec.read(path) for path in paths] or [np.zeros(0, np.uint8)]
  return parts[0] if len(parts) == 1 else np.concatenate(parts)
