"""The splits of data: told by names in a folder, or cut by fractions."""

import itertools
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sparse_transformer.data import files

SPLITS = ("train", "validation", "test")
# A folder that holds a split is named so. A file has the name before its
# suffixes, maybe after other words and before a number: wiki.train-1-of-4.txt
FOLDER = re.compile(files.NAME)
FILE = re.compile(
  rf"(?:.*[._-])?{files.NAME}(?:[._-]\d+(?:[._-](?i:of)[._-]\d+)?)?"
  r"(?P<suffix>\.[^.]*)?(?:\..*)?"
)
Paths = tuple[pathlib.Path, ...]


def listed(
  path: pathlib.Path, *suffixes: str, by_file: bool = True, by: str = "auto"
) -> dict[str, Paths]:
  """{split: its files} by the names in a folder; {"": all} if they tell none.

  A split is the folders or, with `by_file`, the files that have its name. `by`
  is `data.splits`. With "auto", names tell splits only if training stands
  beside validation or test, both folders or both files of one suffix, and these
  have at least half of the bytes: data are large, and what happens to be named
  so, such as a program train.py or a list, is small. Lines tell what is not
  clear, and how many files are not read.

  Raises ValueError if `by` is "names", but they tell no splits.
  """
  if not path.is_dir():
    if by == "names":
      raise ValueError(
        f"data.splits=names needs a folder, but {path} is a file"
      )
    return {"": (path,)}
  every = files.find(path, *suffixes)
  named = _named(path, every, by_file, by)
  kinds = lambda *of: {kind for split, kind in named.values() if split in of}
  sure = kinds("train") & kinds("validation", "test")
  taken = [x for x in named if named[x][1] in sure]
  if by == "auto" and taken and 2 * _size(taken) < _size(every):
    taken = []
  found = {
    split: tuple(x for x in taken if named[x][0] == split) for split in SPLITS
  }
  if taken:
    _tell_splits(path, found)
  elif by == "names":
    raise ValueError(
      f"data.splits=names needs files or folders in {path} that are named train"
      " and val or test; name them so, or set it to auto"
    )
  elif named:
    files.tell(
      f"warning: {path} is split by data.fractions, not by the names"
      f" {_names(path, named)}; if they are splits, set data.splits to names"
    )
  elif by == "auto":
    files.check_names(path, (str(x.relative_to(path)) for x in every))
  others = {*files.below(path)} - {*(taken or every)}
  are_data = not others.isdisjoint(every)
  tell_unread(path, others, "; data.splits=fractions reads all" * are_data)
  if not taken:
    return {"": tuple(every)}
  found["test"] = found["test"] or found["validation"]
  return {split: x for split, x in found.items() if x}


def _named(folder, every, by_file, by):
  """{file: (the split that it is named after, by which kind of name)}."""
  found: dict[pathlib.Path, tuple[str, str]] = {}
  for file in every if by != "fractions" else ():
    name, *below = file.relative_to(folder).parts
    if below:
      match, kind = FOLDER.fullmatch(name), "folder"
    elif match := by_file and FILE.fullmatch(name):
      kind = str(match["suffix"]).lower()
    if match:
      split = files.SPLIT_OF[match[1].lower()]
      found[file] = split, kind if by == "auto" else ""
  return found


def tell_unread(
  folder: pathlib.Path, paths: Collection[pathlib.Path], why: str = ""
) -> None:
  """Warns that files in a folder are not read, if there are any."""
  if paths:
    files.tell(
      f"warning: {folder}: files that are not read: {len(paths):,}, such as"
      f" {min(paths).relative_to(folder)}{why}"
    )


def _size(paths):
  return sum(x.stat().st_size for x in paths)


def _names(folder, paths):
  """The names in a folder that paths begin with; of many, the first three."""
  names = dict.fromkeys(x.relative_to(folder).parts[0] for x in paths)
  return ", ".join([*names][:3]) + ", ..." * (len(names) > 3)


def _tell_splits(folder, found):
  """Tells which files stand for a split that has none, or several names."""
  for split, paths in found.items():
    names = {re.sub(r"\d+", "", x.relative_to(folder).parts[0]) for x in paths}
    if len(names) > 1:
      files.tell(f"{folder}: {split} is {_names(folder, paths)}, joined")
  train, validation, test = (_names(folder, x) for x in found.values())
  if not validation:
    files.tell(
      f"warning: {folder} has no validation: the end of {train} is used, by"
      " data.fractions"
    )
  if not test:
    files.tell(
      f"warning: {folder} has no test: {validation} is used, as for validation"
    )


def divide(
  found: Mapping[str, Any], fractions: Sequence[float], noun: str = "symbols"
) -> dict[str, Any]:
  """The splits that were found; others are cut in proportion to fractions.

  All are cut from "", or validation from the end of "train". Raises ValueError
  if a part is empty; the message calls items by the noun.
  """
  if "validation" in found:
    return {**found}
  whole, *rest = found
  items, cut = found[whole], [x for x in SPLITS if x not in rest]
  ends = [round(len(items) * sum(fractions[:k])) for k in range(1, len(cut))]
  places = itertools.pairwise([0, *ends, len(items)])
  parts = {k: items[slice(*p)] for k, p in zip(cut, places, strict=True)}
  for split, part in parts.items():
    if not len(part):
      raise ValueError(
        f"{split} is empty: {len(items)} {noun} in all, data.fractions="
        f"{tuple(fractions)}; use more data or other fractions"
      )
  return parts | {split: found[split] for split in rest}
