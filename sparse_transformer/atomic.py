"""Files that are written completely or not at all."""

import pathlib


def write_text(path: pathlib.Path, text: str) -> None:
  """Replaces a file atomically: if killed, leaves the old text or the new."""
  new = path.with_name(f"{path.name}.new")
  new.write_text(text)
  new.replace(path)
