"""The splits of data: found in a folder by their names, or cut by fractions."""

import functools
import itertools
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from sparse_transformer.data import files

SPLITS = ("train", "validation", "test")
# The names of folders that hold a split. A file has one before its suffixes,
# maybe after other words and before a number: wiki.train-00001-of-00004.txt
NAMES = {
  **dict(train="train", training="train"),
  **dict(val="validation", valid="validation", validation="validation"),
  **dict(test="test"),
}
NAME = f"(?i:({'|'.join(NAMES)}))"
FOLDER = re.compile(rf"{NAME}()")
FILE = re.compile(
  rf"(?:.*[._-])?{NAME}([._-]\d+(?:[._-](?i:of)[._-]\d+)?)?(?:\..*)?"
)
Paths = tuple[pathlib.Path, ...]


def named(folder: pathlib.Path, *suffixes: str) -> dict[str, Paths]:
  """The folders or files in a folder that are named after splits.

  A split is a folder, a file, or files with a number each. Without a test
  split, that of validation takes its place, with a warning.

  Args:
    folder: a folder; a file has no splits.
    suffixes: of files, see `files.has_suffix`; with none, only folders count.

  Returns:
    The path or paths of each split; {} if there are none.

  Raises:
    ValueError: there are several for a split.
    FileNotFoundError: the training or the validation split is missing.
  """
  found: dict[str, list[re.Match[str]]] = {}
  for path in sorted(folder.iterdir()) if folder.is_dir() else ():
    if files.is_hidden(path.name):
      continue
    is_data = path.is_dir() or files.has_suffix(path, *suffixes)
    match = (FOLDER if path.is_dir() else FILE).fullmatch(path.name)
    if is_data and match:
      found.setdefault(NAMES[match[1].lower()], []).append(match)
  for matches in found.values():
    if len(matches) > 1 and not all(match[2] for match in matches):
      first, second = (folder / match[0] for match in matches[:2])
      raise ValueError(
        f"{first} and {second} are both there; remove or rename one of them"
      )
  for split, name in dict(train="train", validation="val").items():
    if found and split not in found:
      (there, *_), *_ = found.values()
      raise FileNotFoundError(
        f"{folder} has {there[0]}, but no {_renamed(there, name)}; add it, or"
        " rename what is not a split"
      )
  if found and "test" not in found:
    found["test"] = found["validation"]
    there = found["test"][0]
    _warn(
      f"{folder} has no {_renamed(there, 'test')}: the test split is"
      f" {there[0]}, the same data as validation"
    )
  return {k: tuple(folder / x[0] for x in found[k]) for k in SPLITS if found}


def _renamed(match: re.Match[str], name: str) -> str:
  """A name in which that of a split is replaced."""
  return match[0][: match.start(1)] + name + match[0][match.end(1) :]


def divide(
  items: Any, fractions: Sequence[float], noun: str = "symbols"
) -> dict[str, Any]:
  """Cuts an array or a list into the splits, in proportion to fractions.

  Raises ValueError if a split is empty; the message calls items by the noun.
  """
  ends = [round(len(items) * sum(fractions[:k])) for k in (1, 2)]
  places = itertools.pairwise([0, *ends, len(items)])
  parts = {k: items[slice(*p)] for k, p in zip(SPLITS, places, strict=True)}
  for split, part in parts.items():
    if not len(part):
      raise ValueError(
        f"{split} is empty: {len(items)} {noun} in all, data.fractions="
        f"{tuple(fractions)}; use more data or other fractions"
      )
  return parts


@functools.cache
def _warn(line: str) -> None:
  """Prints a warning on standard error, once in a process."""
  print(f"warning: {line}", file=sys.stderr)
