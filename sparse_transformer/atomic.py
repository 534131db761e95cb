"""Files that are written completely or not at all."""

import pathlib


def write_text(path: pathlib.Path, text: str) -> None:
  """Replaces a file atomically: if killed, leaves the old text or the new."""
  new = path.with_name(f"{path.name}.new")
  try:
    new.write_text(text)
  except OSError as error:  # of a full disk, it does not name the file
    error.filename = str(new)
    raise
  new.replace(path)
