"""The JSON file of results, which is complete after every entry."""

import json
import pathlib
import re
from typing import Any

from sparse_transformer import atomic


class Results:
  """What the parts found on one device, in the file `path`.

  None names the file after the device, in `folder`. `content` is
  {"device": ..., "parts": {part: {"entries": {name: found}}}}.
  """

  def __init__(self, path: pathlib.Path | None, folder: pathlib.Path):
    self.path, self._folder = path, folder
    self.content: dict[str, Any] = {"device": {}, "parts": {}}
    (path.parent if path else folder).mkdir(parents=True, exist_ok=True)
    if path:
      self._open()

  def start(self, part: str, device: dict[str, Any], small: bool) -> None:
    """Replaces what an earlier run of a part found."""
    if self.path is None:
      name = f"accelerator-{slug(device['name'])}{'-small' * small}.json"
      self.path = self._folder / name
      self._open()
    self.content["device"] = device
    about = {key: device[key] for key in ("commit", "jax", "xla_flags")}
    self.content["parts"][part] = about | {"small": small, "entries": {}}
    self._write()

  def record(self, part: str, entry: str, found: dict[str, Any]) -> None:
    """Adds to what an entry found."""
    entries = self.content["parts"][part]["entries"]
    entries[entry] = entries.get(entry, {}) | found
    self._write()

  def _open(self) -> None:
    if self.path.exists():
      found = atomic.read_json(self.path)
      if not isinstance(found, dict) or not {"device", "parts"} <= set(found):
        raise ValueError(
          f"{self.path} holds something else; name another file with --out"
        )
      self.content = found
    self._write()  # fails now rather than after the first part

  def _write(self) -> None:
    atomic.write_text(self.path, json.dumps(self.content, indent=1) + "\n")


def slug(name: str) -> str:
  """A name in lowercase letters, digits and hyphens.

  >>> slug("NVIDIA H100 80GB HBM3")
  'nvidia-h100-80gb-hbm3'
  """
  return "-".join(re.findall("[a-z0-9]+", name.lower()))
