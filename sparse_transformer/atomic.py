"""Files that are written whole or not at all."""

import pathlib


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a file in one go: a process that is killed leaves old or new."""
  new = path.with_name(f"{path.name}.new")
  new.write_text(text)
  new.replace(path)
