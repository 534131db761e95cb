"""Sources of files: streams of symbols, and sequences with a label."""

import bisect
import functools
import hashlib
import itertools
import pathlib
import sysconfig
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sparse_transformer.data import codecs, files
from sparse_transformer.data.sources import (
  ConfigDict,
  Sequences,
  Stream,
  register,
)
from sparse_transformer.data.splits import (
  SPLITS,
  divide,
  listed,
  tell_unread,
)

# Of enwik8 and text8, whose bytes are 90 % train, 5 % validation, 5 % test.
SIZE = 100_000_000
ENWIK8 = "a1fa5ffddb56f4953e226637dabbb36a"  # its MD5


@register("bytes")
def any_bytes(config: ConfigDict) -> Stream:
  """The bytes of a file, or of all files in a folder."""
  return _from_path(config, codecs.Text(0 if config.documents else None), "")


@register("jsonl")
def jsonl(config: ConfigDict) -> Stream:
  """The bytes of the field `text` of all records of JSON Lines files."""
  codec = codecs.JsonLines(0 if config.documents else None)
  path, suffixes = files.from_config(config.path), [".jsonl", ".ndjson"]
  # Some shards end in .json, but so do files about data, which may be beside.
  here = files.below(path) if path.is_dir() else ()
  if not any(files.has_suffix(x, *suffixes) for x in here):
    suffixes.append(".json")
  return _from_path(config, codec, *suffixes)


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
  return _from_path(config, codec, ".bin", ".npy")


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
    return divide({"": _read(codec, kept)}, config.fractions)

  return Stream(config.length, config.columns, load, codec)


@register("enwik8")
def enwik8(config: ConfigDict) -> Stream:
  """The first 100,000,000 bytes of an English Wikipedia dump, or a zip."""
  return _published(config, codecs.Text(), ENWIK8)


@register("text8")
def text8(config: ConfigDict) -> Stream:
  """The letters of enwik8, cleaned; or a zip."""
  return _published(config, codecs.Letters())


def _published(config, codec, md5=""):
  """The stream of a file of `SIZE` bytes, whose MD5 begins with `md5`."""

  @functools.cache
  def load():
    path = files.check_path(config.path)
    data = files.read(path)
    symbols = codec.decode(data, path)
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if len(data) != SIZE or not found.startswith(md5):
      raise ValueError(
        f"{path} has {len(data):,} bytes with MD5 {found}, but {config.name}"
        f" must have {SIZE:,}{md5 and f' with {md5}'}; for other text, set"
        " data.name to bytes"
      )
    parts = np.split(symbols, [SIZE * 18 // 20, SIZE * 19 // 20])
    return dict(zip(SPLITS, parts, strict=True))

  return Stream(config.length, config.columns, load, codec)


def _from_path(config, codec, *suffixes):
  """The stream of the files in `data.path` that have one of the suffixes."""

  @functools.cache
  def load():
    path = files.check_path(config.path)
    read = functools.cache(functools.partial(_read, codec))
    rows = {
      k: read(x) for k, x in listed(path, *suffixes, by=config.splits).items()
    }
    return divide(rows, config.fractions)

  return Stream(config.length, config.columns, load, codec)


def _read(codec: codecs.Codec, paths: Iterable[pathlib.Path]) -> Any:
  """The symbols of files, one after the other; what is mapped is not copied."""
  parts = [x for p in paths for x in codec.read(p)] or [np.zeros(0, np.uint8)]
  if len(parts) == 1:
    return parts[0]
  are_mapped = all(isinstance(x, np.memmap) for x in parts)
  are_alike = len({x.dtype for x in parts}) == 1
  return Joined(parts) if are_mapped and are_alike else np.concatenate(parts)


class Joined:
  """Mapped arrays of one dtype, one after the other, which are not copied.

  A slice is a slice of one of them, or joins several: `np.asarray` copies it.
  """

  def __init__(self, parts: Sequence[np.ndarray]):
    self.parts = [*parts]
    self.starts = [0, *itertools.accumulate(map(len, parts))]

  def __len__(self) -> int:
    return self.starts[-1]

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    return np.concatenate(self.parts, dtype=dtype)

  def __getitem__(self, key: slice) -> Any:
    start, stop, _ = key.indices(len(self))
    if start >= stop:
      return self.parts[0][:0]
    first = bisect.bisect_right(self.starts, start) - 1
    last = bisect.bisect_left(self.starts, stop) - 1
    found = [
      self.parts[i][max(0, start - self.starts[i]) : stop - self.starts[i]]
      for i in range(first, last + 1)
    ]
    return Joined(found) if len(found) > 1 else found[0]


@register("labelled")
def labelled(config: ConfigDict) -> Sequences:
  """The bytes of files, each in a folder named after its class."""
  path = files.check_path(config.path)
  found = listed(path, "", by_file=False, by=config.splits)
  depth = 0 if "" in found else 1
  groups = {split: _by_class(path, depth, x) for split, x in found.items()}
  classes, *others = map(tuple, groups.values())
  is_clear = all(map(str.isprintable, classes))
  if len(classes) < 2 or {*others} - {classes} or not is_clear:
    there = (f"{k} {', '.join(x) or 'none'}" for k, x in groups.items())
    raise ValueError(
      f"{path} needs a folder for each of at least 2 classes, the same in all"
      f" splits, with names in UTF-8; it has {'; '.join(there).strip()}"
    )

  read = itertools.chain(*(group.values() for group in groups.values()))
  beside = {*itertools.chain(*found.values())}.difference(*read)
  tell_unread(path, beside, ", in no folder of a class")
  codec = codecs.Text()

  def first(path):
    if not (data := files.read(path)):
      raise ValueError(f"{path} is empty; remove it, or write text to it")
    return codec.decode(data, path)[: config.length]

  @functools.cache
  def load():
    parts: dict[str, list] = {split: [] for split in SPLITS}
    for label, name in enumerate(classes):
      of_class = {split: group[name] for split, group in groups.items()}
      noun = f"files in {path / name}"
      for split, paths in divide(of_class, config.fractions, noun).items():
        parts[split] += [(first(x), label) for x in paths]
    # Validation during training may cover the first examples only.
    order = lambda x: np.random.RandomState(0).permutation(len(x))
    return {k: [x[i] for i in order(x)] for k, x in parts.items()}

  shape = -(-config.length // config.columns), config.columns
  return Sequences(
    config.length, shape, 256, classes, load, None, "bytes", "bits/byte"
  )


def _by_class(root, depth, paths):
  """{class: its files}; classes are folders, `depth` below the root."""
  groups: dict[str, list[pathlib.Path]] = {}
  for path in paths:
    if folders := path.relative_to(root).parts[depth:-1]:
      groups.setdefault(folders[0], []).append(path)
  return groups
