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
  divide,
  in_folder,
  register,
  warn,
)

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
  return _from_path(config, codecs.Text(0 if config.documents else None))


@register("jsonl")
def jsonl(config: ConfigDict) -> Stream:
  """The bytes of a field of all records of JSON Lines files."""
  codec = codecs.Text(0 if config.documents else None)
  decode = functools.partial(codecs.decode_records, codec, config.field)
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
    if not (paths := in_folder(path, ".bin", ".npy")):
      raise FileNotFoundError(
        f"{path} has no train.bin or train.npy; set data.path to another folder"
        " or to a file"
      )
    return {split: codec.read(file) for split, file in paths.items()}

  return Stream(config.length, config.columns, load, codec)


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
  """A stream of the file at `data.path`, or of files below with a suffix."""

  def files():
    return files_lib.find(files_lib.check_path(config.path), *suffixes)

  return _from_files(config, codec, files, decode)


def _from_files(config, codec, files, decode=None):
  """A stream of the contents of files, split in proportion to the fractions."""
  decode = decode or codec.decode

  @functools.cache
  def load():
    parts = [decode(data, path) for path, data in files_lib.read_all(files())]
    count = sum(x[:8].tobytes().startswith(COMPRESSED) for x in parts)
    if count > len(parts) / 2:
      warn(
        f"{count:,} of {len(parts):,} files in {config.path} are compressed"
        " pictures or archives, whose bytes look random to any network; for"
        " pictures, set data.name to images"
      )
    # One file needs no copy.
    empty = np.zeros(0, np.uint8)
    data = parts[0] if len(parts) == 1 else np.concatenate([empty, *parts])
    return divide(data, config.fractions)

  return Stream(config.length, config.columns, load, codec)
