"""Atomic writes of files, and reads that accept only regular files."""

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

# Size in bytes of the largest JSON file that is read.
MAX_JSON = 2**28


def size(path: pathlib.Path) -> int:
  """Returns the size of a file in bytes.

  Raises ValueError if the path is not a regular file, because reading a pipe or
  a device might never end.
  """
  info = path.stat()
  if not stat.S_ISREG(info.st_mode):
    raise ValueError(f"{path} is not a regular file; replace it with one")
  return info.st_size


def nearest(path: pathlib.Path) -> str:
  """Returns the hint "; did you mean PATH?" for a path that does not exist.

  Returns "" if the path exists, or if no name in its folder is similar.

  >>> nearest(pathlib.Path("configs/digit.py"))
  '; did you mean configs/digits.py?'
  """
  if path.exists() or not path.parent.is_dir():
    return ""
  # Compare stems, so that "digits" and "digits.yaml" match "digits.py".
  beside = {x.stem: x for x in path.parent.iterdir()}
  close = difflib.get_close_matches(path.stem, beside, n=1)
  return f"; did you mean {beside[close[0]]}?" if close else ""


def read_json(
  path: pathlib.Path, kind: type = object, lines: bool = False
) -> Any:
  """Reads a JSON value.

  Args:
    path: the file.
    kind: the class that the value must be an instance of, such as dict.
    lines: whether each line is a separate JSON value. If True, the list of
      these values is returned, and `kind` is not checked.

  Raises:
    ValueError: the file is not a regular file, is too large, is not valid
      JSON, or its value is not an instance of `kind`.
  """
  num_bytes = size(path)
  if num_bytes > MAX_JSON:
    raise ValueError(
      f"{path} cannot be read: it has {num_bytes:,} bytes, more than the limit"
      f" of {MAX_JSON:,}"
    )
  try:
    # Read bytes, because json then detects the encoding, and raises ValueError
    # if it cannot decode them.
    text = path.read_bytes()
    if lines:
      return [json.loads(line) for line in text.splitlines()]
    value = json.loads(text)
    if not isinstance(value, kind):
      raise ValueError(f"it is not a JSON {kind.__name__}")
    return value
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} cannot be read: {error}") from error


def write_json(path: pathlib.Path, value: Any, **style: Any) -> None:
  """Writes a JSON value atomically, see `write_bytes`.

  Args:
    path: the file.
    value: any value that `json.dumps` accepts.
    **style: keyword arguments of `json.dumps`, such as `indent`.
  """
  write_text(path, json.dumps(value, **style) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes text in UTF-8 atomically, see `write_bytes`."""
  write_bytes(path, text.encode())


def write_bytes(path: pathlib.Path, content: bytes) -> None:
  """Replaces the contents of a file atomically.

  If the process is killed, the file has either its old or its new contents.
  Raises OSError, which names the file, if writing fails, for example because
  the disk is full.
  """
  with writing(path) as new, new.open("wb") as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())  # must precede the rename


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the path of a temporary file, which replaces `path` on exit.

  If writing fails, the new file is deleted and `path` stays unchanged. A link
  or a pipe at `path` is itself replaced: the link is not followed, and nothing
  waits for a reader of the pipe.

  Args:
    path: the file to replace; its folder must exist.

  Raises:
    OSError: writing failed; the error names `path`.
  """
  # A random name, so that no other process writes the same file.
  new = path.with_name(f".{secrets.token_hex(8)}.new")
  try:
    new.touch(exist_ok=False)
    yield new
    # A rename within a folder is atomic on POSIX systems.
    new.replace(path)
  except BaseException as error:
    with contextlib.suppress(OSError):
      new.unlink()
    # If the disk is full, the error names no file; other errors name the new
    # file, which the user does not know.
    if isinstance(error, OSError) and error.filename in (None, str(new), new):
      reason = error.errno or errno.EIO, error.strerror or str(error)
      raise OSError(*reason, str(path)) from error
    raise


def appending(path: pathlib.Path) -> TextIO:
  """Opens a text file for appending and reading.

  Raises ValueError if the path is a link or is not a regular file.
  """
  if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
    raise ValueError(f"{path} is not a regular file; move or rename it")
  # "a+" also allows reading, so that a caller can check the existing contents.
  return path.open("a+")
