"""Files that are written completely or not at all."""

import json
import pathlib
from typing import Any


def read_json(path: pathlib.Path) -> Any:
  """Reads a JSON file.

  Raises:
    ValueError: it is not JSON.
    OSError: it cannot be read.
  """
  try:
    return json.loads(path.read_bytes())
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
