"""Files that are read and written completely or not at all."""

import json
import pathlib
import stat
from typing import Any

KINDS = {
  stat.S_IFIFO: "pipe",
  stat.S_IFSOCK: "socket",
  stat.S_IFCHR: "device",
  stat.S_IFBLK: "device",
}


def size(path: pathlib.Path) -> int:
  """Bytes of a regular file; a pipe or a device may never end.

  Raises:
    ValueError: if it is a pipe, socket or device.
    OSError: if it is a folder or does not exist.
  """
  info = path.stat()
  if stat.S_ISDIR(info.st_mode):
    raise IsADirectoryError(f"{path} is a folder; a file is needed here")
  if not stat.S_ISREG(info.st_mode):
    kind = KINDS.get(stat.S_IFMT(info.st_mode), "special file")
    raise ValueError(
      f"{path} is a {kind}; only regular files are read: write its contents to"
      " one"
    )
  return info.st_size


def read(path: pathlib.Path) -> bytes:
  """Reads a regular file, see `size`."""
  # No more than its size: a file of the kernel, of 0 bytes, may never end.
  number = size(path)
  with path.open("rb") as file:
    return file.read(number)


def read_json(path: pathlib.Path) -> Any:
  """Reads a regular file of JSON.

  Raises:
    ValueError: it is not regular, or not JSON.
    OSError: it cannot be read.
  """
  content = read(path)
  try:
    return json.loads(content)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} cannot be read: {error}") from error


def write_text(path: pathlib.Path, text: str) -> None:
  """Replaces a file atomically: if killed, leaves the old text or the new."""
  new = path.with_name(f"{path.name}.new")
  try:
    new.write_text(text)
  except OSError as error:  # of a full disk, it does not name the file
    error.filename = str(new)
    raise
  new.replace(path)
