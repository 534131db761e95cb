"""Files that are written completely or not at all."""

import json
import pathlib
from typing import Any


def read_json(path: pathlib.Path, *fields: str) -> Any:
  """Reads a JSON file; if fields are named, an object that has them.

  Raises:
    ValueError: it is not JSON, or not such an object.
    OSError: it cannot be read.
  """
  text = path.read_bytes()
  try:
    content = json.loads(text)
    if fields and not (isinstance(content, dict) and {*fields} <= {*content}):
      raise ValueError(f"it is no object with {', '.join(fields)}")
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} cannot be read: {error}") from error
  return content


def write_text(path: pathlib.Path, text: str) -> None:
  """Replaces a file atomically: if killed, leaves the old text or the new."""
  new = path.with_name(f"{path.name}.new")
  try:
    new.write_text(text)
  except OSError as error:  # of a full disk, it does not name the file
    error.filename = str(new)
    raise
  new.replace(path)
