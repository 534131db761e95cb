"""The splits of data, defined by names in a folder or by fractions."""

import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sparse_transformer.data import files

SPLITS = ("train", "validation", "test")
# A folder is named exactly after its split. In the name of a file, other words
# may precede the split, and a number may follow it, as in
# wiki.train-1-of-4.txt.
FOLDER = re.compile(files.NAME)
FILE = re.compile(
  rf"(?:.*[._-])?{files.NAME}(?:[._-]\d+(?:[._-](?i:of)[._-]\d+)?)?"
  r"(?P<suffix>\.[^.]*)?(?:\..*)?"
)
Paths = tuple[pathlib.Path, ...]


def listed(
  path: pathlib.Path, *suffixes: str, by_file: bool = True, by: str = "auto"
) -> dict[str, Paths]:
  """Lists the files of each split, by the names in a folder.

  With "auto", names define splits under two conditions. First, there must be a
  training split and a validation or test split, which are either both folders
  or both files with the same suffix. Second, the files of these splits must
  contain at least half of all bytes. This excludes other files that happen to
  have such names, such as a program train.py, because they are small. Warnings
  report ambiguous names and the number of files that are not read.

  Args:
    path: a folder, or a single file.
    *suffixes: the suffixes of the files to read, see `files.has_suffix`.
    by_file: whether names of files can define splits, in addition to names of
      folders.
    by: the value of `data.splits`: "auto", "names" or "fractions".

  Returns:
    {split: its files}, or {"": all files} if names do not define splits.

  Raises:
    ValueError: `by` is "names", but names do not define splits.
  """
  if not path.is_dir():
    if by == "names":
      raise ValueError(
        f"data.splits=names requires a folder, but data.path={path} is a file"
      )
    return {"": (path,)}

  every = files.find(path, *suffixes)
  named = {} if by == "fractions" else _named(path, every, by_file, by)

  chosen = _chosen(named)
  if chosen and by == "auto" and 2 * _size(chosen) < _size(every):
    chosen = {}

  groups = {}
  for split in SPLITS:
    groups[split] = tuple(x for x in chosen if chosen[x] == split)
  if chosen:
    _warn_of_splits(path, groups)
  elif by == "names":
    raise ValueError(
      f"data.splits=names requires files or folders in {path} that are named"
      " train and val or test; rename them, or set data.splits=auto"
    )
  elif named:
    files.warn(
      f"{path} is split by data.fractions, not by the names"
      f" {_names(path, named)}; if these are splits, set data.splits=names"
    )
  elif by == "auto":
    files.check_names(path, (str(x.relative_to(path)) for x in every))

  unread = set(files.below(path)).difference(chosen or every)
  # Whether some unread file has the right suffix, so that only its name
  # excludes it.
  are_data = not unread.isdisjoint(every)
  hint = "; to read all, set data.splits=fractions" if are_data else ""
  warn_unread(path, unread, hint)
  if not chosen:
    return {"": tuple(every)}

  # If there is no test split, use validation. Otherwise, a run would find out
  # only after training that it has no test data.
  groups["test"] = groups["test"] or groups["validation"]
  return {split: paths for split, paths in groups.items() if paths}


def _named(folder, every, by_file, by):
  """Finds the split that the name of each file in a folder refers to.

  Args:
    folder: the folder of the data.
    every: its files.
    by_file: whether names of files count, in addition to names of folders.
    by: the value of `data.splits`. Unless it is "auto", kinds of names are not
      distinguished, and the kind is "".

  Returns:
    {file: (split, kind)}, where the kind is "folder" or a suffix in lowercase.
  """
  named: dict[pathlib.Path, tuple[str, str]] = {}
  for file in every:
    # Only the outermost folder counts, so train/books/val.txt is for training.
    name, *below = file.relative_to(folder).parts
    if not below and not by_file:
      continue
    match = (FOLDER if below else FILE).fullmatch(name)
    if match:
      split = files.SPLIT_OF[match[1].lower()]
      kind = "folder" if below else str(match["suffix"]).lower()
      named[file] = split, kind if by == "auto" else ""
  return named


def _chosen(named):
  """Returns {file: its split} for kinds of names that define several splits.

  These are the kinds of names with both a training split and a validation or
  test split.
  """
  kinds: dict[str, set[str]] = {split: set() for split in SPLITS}
  for split, kind in named.values():
    kinds[split].add(kind)
  # For example, train.txt and val.txt are data, but train.py among text files
  # is a program.
  sure = kinds["train"] & (kinds["validation"] | kinds["test"])
  return {file: split for file, (split, kind) in named.items() if kind in sure}


def warn_unread(
  folder: pathlib.Path, paths: Collection[pathlib.Path], why: str = ""
) -> None:
  """Warns about files in a folder that are not read, if there are any.

  Args:
    folder: the folder of the data.
    paths: the files that are not read.
    why: the end of the warning, such as a reason or a remedy.
  """
  if paths:
    files.warn(
      f"{folder}: files that are not read: {len(paths):,}, such as"
      f" {min(paths).relative_to(folder)}{why}"
    )


def _size(paths):
  """Returns the total size of files in bytes."""
  return sum(x.stat().st_size for x in paths)


def _names(folder, paths):
  """Returns the first components of paths in a folder, at most three."""
  names = list(dict.fromkeys(x.relative_to(folder).parts[0] for x in paths))
  more = ", ..." if len(names) > 3 else ""
  return ", ".join(names[:3]) + more


def _warn_of_splits(folder, groups):
  """Warns if a split joins files of different names, or if it is missing."""
  for split, paths in groups.items():
    # Shards, whose names differ only in numbers, need no warning.
    names = {re.sub(r"\d+", "", x.relative_to(folder).parts[0]) for x in paths}
    if len(names) > 1:
      files.warn(f"{folder}: the {split} split joins {_names(folder, paths)}")

  if not groups["validation"]:
    files.warn(
      f"{folder} has no validation split; the end of"
      f" {_names(folder, groups['train'])} is used, by data.fractions"
    )
  if not groups["test"]:
    files.warn(
      f"{folder} has no test split; {_names(folder, groups['validation'])} is"
      " used, as for validation"
    )


def divide(
  groups: Mapping[str, Any], fractions: Sequence[float], noun: str = "symbols"
) -> dict[str, Any]:
  """Creates the splits that names do not define, in proportion to fractions.

  Args:
    groups: {"": all items}, which are divided into the three splits; or
      {split: items}, where a missing validation split is cut from the end of
      "train".
    fractions: the fractions of the three splits.
    noun: how error messages refer to items.

  Returns:
    {split: items} for each of `SPLITS`.

  Raises:
    ValueError: a split is empty.
  """
  if "validation" in groups:
    return dict(groups)

  # The keys are either "" alone, or "train" and possibly "test".
  whole, *rest = groups
  items = groups[whole]
  parts = {split: groups[split] for split in rest}
  to_cut = [split for split in SPLITS if split not in rest]
  start = 0
  for number, split in enumerate(to_cut, start=1):
    # Round the sum of fractions, so that rounding errors do not add up.
    end = round(len(items) * sum(fractions[:number]))
    if split == to_cut[-1]:
      end = len(items)
    parts[split] = items[start:end]

    if end <= start:
      raise ValueError(
        f"{split} is empty: {len(items)} {noun} in all, data.fractions="
        f"{tuple(fractions)}; use more data or other fractions"
      )
    start = end

  return {split: parts[split] for split in SPLITS}
