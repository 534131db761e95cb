"""Files of data: which there are, and their contents, compressed or not."""

import bz2
import contextlib
import errno
import functools
import gzip
import itertools
import lzma
import os
import pathlib
import re
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from sparse_transformer import atomic

# Decompress all members of a file. Python's own functions for bz2 and xz
# silently drop data after a member that do not begin another one.
DECOMPRESS: Any = {
  ".gz": gzip.decompress,
  ".bz2": lambda data: _members(bz2.BZ2Decompressor, data),
  ".xz": lambda data: _members(lzma.LZMADecompressor, data),
}
BLOCK = 2**24  # bytes read at once
LARGEST = 2**36  # bytes of a file that is read as a whole, not mapped
# What other kinds of files begin with.
KINDS = re.compile(
  rb"(?s)(?P<Zstandard>\x28\xb5\x2f\xfd)|(?P<tar>.{257}ustar)|(?P<Parquet>PAR1)"
  rb"|(?P<gzip>\x1f\x8b)|(?P<zip>PK\x03\x04)|(?P<UTF16>\xff\xfe|\xfe\xff)"
)
NO_DATA = ("~", ".bak", ".part", "__MACOSX", "Thumbs.db", "token_bytes.npy")
SPLIT_OF = dict(train="train", training="train", test="test")  # by its names
SPLIT_OF |= dict.fromkeys(("val", "valid", "validation", "dev"), "validation")
NAME = f"(?i:({'|'.join(SPLIT_OF)}))"
WORD = re.compile(rf"(?<![a-zA-Z0-9]){NAME}(?![a-zA-Z])")


@contextlib.contextmanager
def blame(what: pathlib.Path | str) -> Iterator[None]:
  """Raises an error of a library as a ValueError that begins with `what`.

  Errors of the system pass, but EINVAL comes from a position in the file.
  """
  try:
    yield
  except Exception as error:
    of_system = getattr(error, "errno", None) not in (None, errno.EINVAL)
    if of_system or isinstance(error, MemoryError):
      raise
    reason = " ".join(str(error).split())  # on one line
    call = "its header has a call, such as np.int64(9): write a plain number"
    reason = re.sub("malformed node or string.*", call, reason)  # of a .npy
    # What a library did not foresee says nothing of the file.
    if isinstance(error, NameError | ArithmeticError):
      reason = "its header makes no sense"
    raise ValueError(
      f"{what} is damaged or truncated, or of a kind that is not read; get it"
      f" again, or convert it: {reason or type(error).__name__}"
    ) from error


@functools.cache
def tell(line: str) -> None:
  """Prints a line on standard error, once in a process."""
  print(line, file=sys.stderr)


def from_config(path: str) -> pathlib.Path:
  """The path in a field of a config, where ~ is the home folder."""
  return pathlib.Path(os.path.expanduser(path))


def check_path(path: str) -> pathlib.Path:
  """The path in `data.path`; raises FileNotFoundError if it does not exist."""
  if not path:
    raise FileNotFoundError("data.path is not set: name a file or a folder")
  found = from_config(path)
  if not found.exists():
    raise FileNotFoundError(
      f"no file or folder {found}; set data.path to one that"
      f" exists{atomic.nearest(found)}"
    )
  return found


def check_names(place: pathlib.Path, names: Iterable[str]) -> None:
  """Warns if the files that a place joins have names of several splits."""
  words = {SPLIT_OF[x.lower()]: y for y in names for x in WORD.findall(y)}
  if len(words) > 1:
    tell(
      f"warning: {place} has {', '.join(words.values())}, but is split by"
      " data.fractions; in a folder, give them the names train, val and test"
    )


def is_hidden(name: str) -> bool:
  """Whether the name of a file or folder is not of data: .git, ._a.txt."""
  return name.startswith(".") or name.endswith(NO_DATA)


def has_suffix(path: pathlib.Path, *suffixes: str) -> bool:
  """Whether a file has one of these suffixes; "" is any.

  So has a compressed file, but not one that is there unpacked.
  """
  if path.suffix.lower() in (*DECOMPRESS, ".zip"):
    inner = path.with_suffix("")
    return not inner.exists() and has_suffix(inner, *suffixes)
  return "" in suffixes or path.suffix.lower() in suffixes


def find(path: pathlib.Path, *suffixes: str) -> list[pathlib.Path]:
  """The file, or all files below a folder that have a suffix, in order.

  FileNotFoundError if there are none.
  """
  if not path.is_dir():
    return [path]
  found = sorted(x for x in below(path) if has_suffix(x, *suffixes))
  if not found:
    ending = "" if "" in suffixes else f" that ends in {', '.join(suffixes)}"
    raise FileNotFoundError(
      f"{path} has no file{ending}; set data.path to another file or folder"
    )
  return found


def below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """The files below a folder; links are followed, to each folder once."""

  def fail(error: OSError) -> None:
    raise error

  seen = set()
  for parent, folders, names in os.walk(folder, True, fail, followlinks=True):
    is_new = (place := os.path.realpath(parent)) not in seen
    seen.add(place)
    folders[:] = sorted(x for x in folders if is_new and not is_hidden(x))
    shown = (x for x in names if is_new and not is_hidden(x))
    yield from (pathlib.Path(parent, x) for x in shown)


class Mapped(np.memmap):
  """The array of a file, which must not become shorter than it was."""

  def __getitem__(self, key: Any) -> Any:
    file: Any = self._mmap  # type: ignore[attr-defined]
    if file and file.size() < len(file):  # reading on would end the process
      raise OSError(f"{self.filename} has become shorter since it was opened")
    return super().__getitem__(key)


def map_array(path: pathlib.Path) -> np.ndarray:
  """Maps the array in a .npy file, or the uint16 in any other, into memory."""
  size = atomic.size(path)
  with blame(path):
    if path.suffix.lower() != ".npy":
      return np.memmap(path, "<u2", mode="r").view(Mapped)
    array = np.lib.format.open_memmap(path, mode="r")
    if rest := size - array.offset - array.nbytes:
      raise ValueError(
        f"{rest:,} bytes follow its array; save one array in a file"
      )
    return array.view(Mapped)


def read(path: pathlib.Path) -> bytes:
  """The `parts` of a file, joined."""
  return b"".join(parts(path))


def parts(path: pathlib.Path) -> list[bytes]:
  """The contents of a file, decompressed; of the files in a .zip, by name.

  Raises ValueError if the file is not regular, is damaged or is too large.
  """
  if (size := atomic.size(path)) > LARGEST:
    raise ValueError(
      f"{path} has {size:,} bytes, more than {LARGEST:,}; set data.name to"
      " tokens, which maps a .npy file of uint8 into memory"
    )
  suffix = path.suffix.lower()
  with path.open("rb") as raw, blame(path):
    if suffix == ".zip":
      archive = zipfile.ZipFile(raw)
      is_shown = lambda name: not any(map(is_hidden, name.split("/")))
      names = sorted(filter(is_shown, archive.namelist()))
      check_names(path, names)
      for name, following in itertools.pairwise(names):
        if name == following:  # a copy, or a later version
          raise ValueError(f"two of its members are named {name}")
      return [archive.read(x) for x in names if not x.endswith("/")]
    if suffix not in DECOMPRESS:
      return [raw.read()]
    if not size:
      raise ValueError("it is empty")  # libraries differ in this
    return [DECOMPRESS[suffix](raw.read())]


def _members(decompressor, data):
  """The contents of all members of a bz2 or xz file, joined."""
  parts = []
  while data:
    member = decompressor()
    parts.append(member.decompress(data))
    if not member.eof:
      raise EOFError("its last member is cut off")
    data = member.unused_data
    if not data.strip(b"\0"):  # padding of .xz
      break
  return b"".join(parts)


def kind(data: bytes) -> str:
  """What the contents of a file have that text does not have, or ""."""
  found = KINDS.match(data)
  return f"{found.lastgroup} data" if found else "zero bytes" * (b"\0" in data)


def crc32(*paths: pathlib.Path) -> int:
  """CRC-32 of the concatenated contents of files."""
  crc = 0
  for path in paths:
    with path.open("rb") as file:
      while block := file.read(BLOCK):
        crc = zlib.crc32(block, crc)
  return crc
