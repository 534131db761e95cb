"""The splits of data: told by names in a folder, or cut by fractions."""

import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparse_transformer.data import files

SPLITS = ("train", "validation", "test")
# A folder that holds a split is named so. A file has the name before its
# suffixes, maybe after other words and before a number: wiki.train-1-of-4.txt
FOLDER = re.compile(rf"{files.NAME}()")
FILE = re.compile(
  rf"(?:.*[._-])?{files.NAME}([._-]\d+(?:[._-](?i:of)[._-]\d+)?)?(?:\..*)?"
)
Paths = tuple[pathlib.Path, ...]


def listed(
  path: pathlib.Path, *suffixes: str, by_file: bool = True
) -> dict[str, Paths]:
  """{split: its files} by the names in a folder; {"": all} without such names.

  A split is a folder or, with `by_file`, a file, or files with a number each.
  Without a test split, the validation split takes its place. A line tells this,
  and how many files are not read. Raises ValueError if two names stand for a
  split, FileNotFoundError if training or validation has no files.
  """
  if not path.is_dir():
    return {"": (path,)}
  places = _named(path, suffixes if by_file else ()) or {"": [path]}
  find = lambda place: files.find(place, *suffixes)
  found = {k: tuple(itertools.chain(*map(find, x))) for k, x in places.items()}
  others = {*files.below(path)} - {*itertools.chain(*found.values())}
  if others:
    number, first = len(others), min(others).name
    files.tell(f"{path}: files that are not read: {number:,}, such as {first}")
  files.check_names(path, (str(x.relative_to(path)) for x in found.get("", ())))
  return found


def _named(folder, suffixes):
  """{split: its folder or files}, in the order of `SPLITS`; {} without them."""
  found: dict[str, dict[pathlib.Path, str]] = {}
  for path in sorted(folder.iterdir()):
    is_data = path.is_dir() or files.has_suffix(path, *suffixes)
    match = (FOLDER if path.is_dir() else FILE).fullmatch(path.name)
    if is_data and match and not files.is_hidden(path.name):
      found.setdefault(files.SPLIT_OF[match[1].lower()], {})[path] = match[2]
  for numbers in found.values():
    if len(numbers) > 1 and not all(numbers.values()):
      first, second, *_ = numbers
      raise ValueError(
        f"{first} and {second} are both there; rename or move one of them"
      )
  for split, name in dict(train="train", validation="val").items():
    if found and split not in found:
      first = next(iter(next(iter(found.values()))))
      raise FileNotFoundError(
        f"{folder} has {first.name}, but no {name}; add it, or rename what is"
        " not a split"
      )
  if found and "test" not in found:
    found["test"] = found["validation"]
    names = ", ".join(path.name for path in found["test"])
    files.tell(
      f"warning: {folder} has no test: {names} is used, as for validation"
    )
  return {split: [*found[split]] for split in SPLITS if found}


def divide(
  found: Mapping[str, Any], fractions: Sequence[float], noun: str = "symbols"
) -> dict[str, Any]:
  """The splits that were found, or parts of "" in proportion to fractions.

  Raises ValueError if a part is empty; the message calls items by the noun.
  """
  if "" not in found:
    return {**found}
  items = found[""]
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
