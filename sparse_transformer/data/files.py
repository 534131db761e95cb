"""Reads and decompresses files, and checks them for damage."""

import bz2
import gzip
import lzma
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import Any

OPENERS: dict[str, Callable[..., Any]] = {
  ".gz": gzip.open,
  ".bz2": bz2.open,
  ".xz": lzma.open,
}
# What the decompressors of the standard library raise.
DAMAGE = (
  OSError,
  EOFError,
  RuntimeError,
  zipfile.BadZipFile,
  zlib.error,
  lzma.LZMAError,
)


def damaged(what: pathlib.Path | str, error: Exception) -> ValueError:
  """The exception to raise from an `error` while reading a file or folder."""
  reason = " ".join(str(error).split())  # on one line
  return ValueError(
    f"{what} is damaged or truncated; delete it and get it again: {reason}"
  )


def read(path: pathlib.Path) -> bytes:
  """Reads a file, and decompresses it if it ends in .gz, .bz2, .xz or .zip.

  The files in a zip archive are joined in the order of their names.

  Raises:
    ValueError: if the compressed file is damaged.
    OSError: if the file cannot be read.
  """
  suffix = path.suffix.lower()
  try:
    if suffix == ".zip":
      with zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
        return b"".join(map(archive.read, names))  # b"" for a folder
    with OPENERS.get(suffix, open)(path, "rb") as file:
      return file.read()
  except DAMAGE as error:
    if getattr(error, "errno", None):  # from the system, not the decompressor
      raise
    raise damaged(path, error) from error


def crc32(paths: Iterable[pathlib.Path]) -> str:
  """CRC-32 of the contents of all files in turn, as 8 hexadecimal digits."""
  crc = 0
  for path in paths:
    with path.open("rb") as file:
      while block := file.read(2**24):
        crc = zlib.crc32(block, crc)
  return f"{crc:08x}"
