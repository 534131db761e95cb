"""Files of data, compressed or not.

Their contents may fill half of the memory: joining them takes the other half.
"""

import bz2
import contextlib
import errno
import gzip
import lzma
import os
import pathlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from sparse_transformer import atomic, machine

OPENERS: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
BLOCK = 2**24  # bytes read at once


class TooLarge(ValueError):
  """Data that do not fit into memory."""


@contextlib.contextmanager
def blame(what: pathlib.Path | str) -> Iterator[None]:
  """Raises any error of the block as a ValueError: `what` is damaged.

  Errors of the system pass, but EINVAL comes from a position in the file.
  """
  try:
    yield
  except Exception as error:
    of_system = getattr(error, "errno", None) not in (None, errno.EINVAL)
    if of_system or isinstance(error, MemoryError | TooLarge):
      raise
    raise damaged(what, error) from error


def damaged(what: pathlib.Path | str, error: Exception) -> ValueError:
  """The exception to raise from an `error` while reading a file or folder."""
  reason = " ".join(str(error).split())  # on one line
  return ValueError(
    f"{what} is damaged or truncated; delete it and get it again:"
    f" {reason or type(error).__name__}"
  )


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
      f"no file or folder {found}; set data.path to one that exists"
    )
  return found


def check_memory(path: pathlib.Path | str, number: int) -> None:
  """Raises `TooLarge` if the data up to this file take too many bytes."""
  if number > (room := machine.memory() // 2):
    raise TooLarge(
      f"the data up to {path} take at least {number:,} bytes, but half of this"
      f" machine's memory is {room:,}; use less data"
    )


def below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """All files below a folder, without following links to folders.

  Raises OSError if a folder cannot be read.
  """

  def fail(error: OSError) -> None:
    raise error

  for parent, _, names in os.walk(folder, onerror=fail):
    yield from (pathlib.Path(parent, name) for name in names)


def has_suffix(path: pathlib.Path, *suffixes: str) -> bool:
  """Whether a file ends in one of them, compressed or not; "" stands for any.

  >>> has_suffix(pathlib.Path("x.fa.gz"), ".fa")
  True
  >>> has_suffix(pathlib.Path("x.fa.fai"), ".fa")
  False
  """
  names = [suffix.lower() for suffix in path.suffixes]
  while names and names[-1] in (*OPENERS, ".zip"):
    names.pop()
  return "" in suffixes or bool(names) and names[-1] in suffixes


def find(path: pathlib.Path, *suffixes: str) -> list[pathlib.Path]:
  """The file, or all files below a folder that have a suffix, if any is given.

  Raises FileNotFoundError if a folder has none.
  """
  if not path.is_dir():
    return [path]
  suffixes = suffixes or ("",)
  found = [file for file in below(path) if has_suffix(file, *suffixes)]
  if not found:
    ending = "" if "" in suffixes else f" that ends in {', '.join(suffixes)}"
    raise FileNotFoundError(
      f"{path} has no file{ending}; set data.path to another file or folder"
    )
  return found


def map_array(path: pathlib.Path) -> np.ndarray:
  """Maps the array in a .npy file into memory; ValueError if it is damaged."""
  atomic.size(path)
  with blame(path):
    return np.asarray(np.lib.format.open_memmap(path, mode="r"))


def read(path: pathlib.Path) -> bytes:
  """Reads one file, see `read_all`."""
  ((_, data),) = read_all([path])
  return data


def read_all(
  paths: Iterable[pathlib.Path],
) -> Iterator[tuple[pathlib.Path, bytes]]:
  """Yields the path and the contents of files, in the order of their paths.

  Those that end in .gz, .bz2, .xz or .zip are decompressed. The files in a zip
  archive are joined in the order of their names.

  Raises:
    ValueError: a file is not regular or is damaged, or the files do not fit
      into memory.
  """
  paths, total = list(paths), 0
  for path in paths:  # before any is read
    total += atomic.size(path)
    check_memory(path, total)
  total = 0
  for path in sorted(paths):
    data = _read(path, total)
    total += len(data)
    yield path, data


def _read(path: pathlib.Path, before: int) -> bytes:
  """The contents of a file; `before` bytes are in memory already."""
  suffix = path.suffix.lower()
  with path.open("rb") as raw, blame(path):
    if suffix == ".zip":
      archive = zipfile.ZipFile(raw)
      members = sorted(archive.infolist(), key=lambda info: info.filename)
      check_memory(path, before + sum(info.file_size for info in members))
      return b"".join(map(archive.read, members))  # b"" for a folder
    if suffix not in OPENERS:
      return raw.read()
    blocks = []
    with OPENERS[suffix](raw) as file:
      while block := file.read(BLOCK):
        before += len(block)
        check_memory(path, before)
        blocks.append(block)
    return b"".join(blocks)


def crc32(*paths: pathlib.Path) -> int:
  """CRC-32 of the concatenated contents of files."""
  crc = 0
  for path in paths:
    with path.open("rb") as file:
      while block := file.read(BLOCK):
        crc = zlib.crc32(block, crc)
  return crc
