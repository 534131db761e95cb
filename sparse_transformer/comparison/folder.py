"""The folder of a comparison and its files."""

import json
import pathlib
from typing import Any

from sparse_transformer import atomic, config as config_lib

NAME = "comparison-of.json"  # records what is compared


def check(root: pathlib.Path, about: dict[str, Any]) -> None:
  """Checks that a folder can hold a comparison.

  Args:
    root: the folder, which need not exist.
    about: what is compared, see `Plan.about`.

  Raises:
    ValueError: the folder holds a run or another comparison.
    NotADirectoryError: it is a file.
  """
  if root.exists() and not root.is_dir():
    raise NotADirectoryError(f"--workdir={root} is a file; name a folder")
  if (root / "config.json").exists():
    raise ValueError(f"{root} holds a run of train.py; use another --workdir")
  path = root / NAME
  if not path.exists():
    return
  old = read_json(path, *about)
  differing = [name for name in about if not _equal(name, old, about)]
  if differing:
    raise ValueError(
      f"{root} holds another comparison: {', '.join(differing)} differ; use"
      " another --workdir"
    )


def _equal(name, old, new):
  if old[name] == new[name] or name != "config":
    return old[name] == new[name]
  try:  # it may be of a version with fewer fields
    return config_lib.with_defaults(old[name]) == config_lib.with_defaults(
      new[name]
    )
  except (TypeError, KeyError, AttributeError):
    return False


def create(root: pathlib.Path, about: dict[str, Any]) -> None:
  """Creates the folder of a comparison and records what it compares."""
  root.mkdir(parents=True, exist_ok=True)
  if not (root / NAME).exists():
    atomic.write_text(root / NAME, json.dumps(about) + "\n")


def read_json(path: pathlib.Path, *fields: str) -> Any:
  """Reads a JSON file; if fields are named, an object that has them.

  Raises:
    ValueError: it holds anything else.
  """
  try:
    content = json.loads(path.read_bytes())
    if fields and not (isinstance(content, dict) and {*fields} <= {*content}):
      raise ValueError(f"it has no {' or no '.join(fields)}")
  except (ValueError, IsADirectoryError, RecursionError) as error:
    raise ValueError(
      f"{path} cannot be read ({error}); delete it, or use another --workdir"
    ) from error
  return content
