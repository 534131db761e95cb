"""Files: written completely or not at all, and read only if they end."""

import contextlib
import difflib
import errno
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator
from typing import Any, TextIO

# The largest file of JSON that is read, in bytes.
MAX_JSON = 2**28


def size(path: pathlib.Path) -> int:
  """The size of a file; ValueError for what may never end, such as a pipe."""
  # Reading a pipe or a device may wait forever, or never end.
  info = path.stat()
  if not stat.S_ISREG(info.st_mode):
    raise ValueError(f"{path} is not a regular file; replace it with one")
  return info.st_size


def nearest(path: pathlib.Path) -> str:
  """A hint for a path that is not there: "; did you mean PATH?".

  It is "" if the path exists, or if no name in its folder is close.

  >>> nearest(pathlib.Path("configs/digit.py"))
  '; did you mean configs/digits.py?'
  """
  if path.exists() or not path.parent.is_dir():
    return ""
  # Stems, so that "digits" or "digits.yaml" is near "digits.py".
  beside = {x.stem: x for x in path.parent.iterdir()}
  close = difflib.get_close_matches(path.stem, beside, n=1)
  return f"; did you mean {beside[close[0]]}?" if close else ""


def read_json(
  path: pathlib.Path, kind: type = object, lines: bool = False
) -> Any:
  """Reads a JSON value.

  Args:
    path: the file.
    kind: the class that the value must have, such as dict.
    lines: whether each line is a value; they are returned as a list.

  Raises:
    ValueError: the file is not regular or too large, or not JSON of this kind.
  """
  num_bytes = size(path)
  if num_bytes > MAX_JSON:
    raise ValueError(f"{path} cannot be read: it has {num_bytes:,} bytes")
  try:
    # As bytes: json finds out the encoding, and raises ValueError for others.
    text = path.read_bytes()
    if lines:
      return [json.loads(line) for line in text.splitlines()]
    value = json.loads(text)
    if not isinstance(value, kind):
      raise ValueError(f"it is no {kind.__name__}")
    return value
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} cannot be read: {error}") from error


def write_json(path: pathlib.Path, value: Any, **style: Any) -> None:
  """Writes a JSON value, see `write_bytes`.

  Args:
    path: the file.
    value: what `json.dumps` accepts.
    **style: keyword arguments of `json.dumps`, such as `indent`.
  """
  write_text(path, json.dumps(value, **style) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a text in UTF-8, see `write_bytes`."""
  write_bytes(path, text.encode())


def write_bytes(path: pathlib.Path, content: bytes) -> None:
  """Replaces a file atomically: if killed, leaves the old one or the new.

  Raises OSError, which names the file, if the disk is full for example.
  """
  with writing(path) as new, new.open("wb") as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())  # before the file gets its name


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a new file to write, which then replaces `path`.

  If writing fails, the new file is deleted, and `path` stays as it was. A link
  or a pipe at `path` is replaced, not followed or waited for.

  Args:
    path: the file to replace; its folder must exist.

  Raises:
    OSError: of writing; it names `path`.
  """
  new = path.with_name(f".{secrets.token_hex(8)}.new")  # nobody else's
  try:
    new.touch(exist_ok=False)
    yield new
    # A rename within a folder is atomic on POSIX systems.
    new.replace(path)
  except BaseException as error:
    with contextlib.suppress(OSError):
      new.unlink()
    # The error of a full disk names no file, and others name the new one.
    if isinstance(error, OSError) and error.filename in (None, str(new), new):
      reason = error.errno or errno.EIO, error.strerror or str(error)
      raise OSError(*reason, str(path)) from error
    raise


def appending(path: pathlib.Path) -> TextIO:
  """A file to append to; ValueError if it is a link or no regular file."""
  if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
    raise ValueError(f"{path} is not a regular file; move it away")
  # Readable too, so that a caller can look at what is there.
  return path.open("a+")
