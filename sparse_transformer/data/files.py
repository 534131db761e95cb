"""Files of data: read, decompressed, checked."""

import bz2
import gzip
import lzma
import zipfile
import zlib

# What the decompressors of the standard library raise.
DAMAGE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
DAMAGE += (lzma.LZMAError,)


def damaged(path, error):
  """The error to raise where `path` turned out to be unreadable."""
  return ValueError(
    f"{path} is damaged or truncated, delete it and get it again:"
    f" {' '.join(str(error).split())}"
  )


def read(path):
  """The bytes of a file, decompressed according to its suffix."""
  suffix = path.suffix.lower()
  openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
  try:
    if suffix == ".zip":
      with zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
        return b"".join(map(archive.read, names))  # b"" for a folder
    with openers.get(suffix, open)(path, "rb") as file:
      return file.read()
  except FileNotFoundError:
    raise FileNotFoundError(
      f"no file or folder {path}: see data.path"
    ) from None
  except DAMAGE as error:
    if getattr(error, "errno", None):  # from the system, not the decompressor
      raise
    raise damaged(path, error) from error


def crc32(paths):
  """CRC-32 of the contents of some files, in their order."""
  crc = 0
  for path in paths:
    with path.open("rb") as file:
      while block := file.read(2**24):
        crc = zlib.crc32(block, crc)
  return f"{crc:08x}"
