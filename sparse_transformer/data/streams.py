"""Sources of streams of symbols: text, bases, sound."""

import functools
import pathlib
import sysconfig

import numpy as np

from sparse_transformer.data import array_records, codecs, files as files_lib
from sparse_transformer.data.sources import (
  ConfigDict,
  Stream,
  check_no_path,
  register,
)
from sparse_transformer.data.splits import SPLITS, divide, named, warn

# Characters of the splits, like the bytes of enwik8.
TEXT8 = 90_000_000, 5_000_000, 5_000_000
# How files begin: PNG, JPEG, GIF; zip, gzip, bzip2, xz, Zstandard, 7z.
COMPRESSED = (
  *(b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"PK\3\4", b"\x1f\x8b", b"BZh"),
  *(b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf"),
)


@register("bytes")
def any_bytes(config: ConfigDict) -> Stream:
  """The bytes of a file, or of all files in a folder."""
  return _from_path(config, codecs.Text(0 if config.documents else None), "")


@register("jsonl")
def jsonl(config: ConfigDict) -> Stream:
  """The bytes of the field `text` of all records of JSON Lines files."""
  codec = codecs.Text(0 if config.documents else None)
  decode = functools.partial(codecs.decode_records, codec)
  return _from_path(config, codec, ".jsonl", decode=decode)


@register("tokens")
def tokens(config: ConfigDict) -> Stream:
  """Integers of a tokenizer: a .npy or .bin file, or a folder of splits."""
  path = files_lib.from_config(config.path)
  folder = path if path.is_dir() else path.parent
  codec = codecs.Tokens(config.vocab_size, folder)

  @functools.cache
  def load():
    codec.num_bytes(np.zeros(0, np.uint8))  # a wrong table is found now
    if not files_lib.check_path(config.path).is_dir():
      return divide(codec.read(path), config.fractions)
    if not (paths := named(path, ".bin", ".npy")):
      raise FileNotFoundError(
        f"{path} has no train.bin or train.npy; set data.path to another folder"
        " or to a file"
      )
    find = lambda found: sorted(_find(found, ".bin", ".npy"))
    return _read_each(paths, lambda found: _join(map(codec.read, find(found))))

  return Stream(config.length, config.columns, load, codec)


@register("stdlib")
def stdlib(config: ConfigDict) -> Stream:
  """The Python source of the interpreter's own standard library."""
  # Excludes what differs between machines: installed packages, and the tests,
  # which some distributions omit.
  skipped = {"site-packages", "dist-packages", "__pycache__"}
  skipped |= {"test", "tests", "idle_test"}

  codec = codecs.Text()

  @functools.cache
  def load():
    check_no_path(config)
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    files = [root / p for p in paths if skipped.isdisjoint(p.parts[:-1])]
    return divide(_read(files, codec.decode), config.fractions)

  return Stream(config.length, config.columns, load, codec)


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
    path = files_lib.check_path(config.path)
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


def _from_path(config, codec, *suffixes, decode=None):
  """A stream of the file at `data.path`, or of files below with a suffix.

  Its splits are those that the names of files or folders tell, or else by the
  fractions.
  """
  decode = decode or codec.decode

  def read(paths):
    return _read(_find(paths, *suffixes), decode)

  @functools.cache
  def load():
    path = files_lib.check_path(config.path)
    if paths := named(path, *suffixes):
      return _read_each(paths, read)
    return divide(read([path]), config.fractions)

  return Stream(config.length, config.columns, load, codec)


def _find(paths, *suffixes):
  return [file for path in paths for file in files_lib.find(path, *suffixes)]


def _read_each(paths, read):
  """Reads the symbols of each split, once where two have the same paths."""
  symbols = {found: read(found) for found in dict.fromkeys(paths.values())}
  for found, row in symbols.items():
    if not len(row):
      raise ValueError(f"{found[0]} is empty; put data there, or remove it")
  return {split: symbols[found] for split, found in paths.items()}


def _read(files, decode):
  """The symbols of files in the order of their paths."""
  parts = [decode(data, path) for path, data in files_lib.read_all(files)]
  count = sum(x[:8].tobytes().startswith(COMPRESSED) for x in parts)
  if count > len(parts) / 2:
    warn(
      f"{count:,} of {len(parts):,} files, such as {min(files)}, are compressed"
      " pictures or archives, whose bytes look random to any network; for"
      " pictures, set data.name to images"
    )
  return _join(parts)


def _join(parts):
  parts = [*parts]  # one needs no copy
  return (
    parts[0]
    if len(parts) == 1
    else np.concatenate(parts or [np.zeros(0, np.uint8)])
  )
