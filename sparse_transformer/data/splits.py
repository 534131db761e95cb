"""The splits of data: told by names in a folder, or cut by fractions."""

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
  """Lists the files of each split, by the names in a folder.

  With "auto", names tell splits only if training stands beside validation or
  test, both folders or both files of one suffix, and these have at least half
  of the bytes: data are large, and what happens to be named so, such as a
  program train.py or a list, is small. Warnings tell what is not clear, and how
  many files are not read.

  Args:
    path: a folder; or a file, which is all there is.
    *suffixes: those of the files to read, see `files.has_suffix`.
    by_file: whether names of files tell splits, not only those of folders.
    by: `data.splits`: "auto", "names" or "fractions".

  Returns:
    {split: its files}; {"": all files} if names tell no splits.

  Raises:
    ValueError: `by` is "names", but they tell no splits.
  """
  if not path.is_dir():
    if by == "names":
      raise ValueError(
        f"data.splits=names needs a folder, but {path} is a file"
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
      f"data.splits=names needs files or folders in {path} that are named train"
      " and val or test; name them so, or set it to auto"
    )
  elif named:
    files.warn(
      f"{path} is split by data.fractions, not by the names"
      f" {_names(path, named)}; if they are splits, set data.splits to names"
    )
  elif by == "auto":
    files.check_names(path, (str(x.relative_to(path)) for x in every))

  unread = set(files.below(path)).difference(chosen or every)
  # A file with the right suffix, which only its name excludes.
  are_data = not unread.isdisjoint(every)
  hint = "; data.splits=fractions reads all" if are_data else ""
  warn_unread(path, unread, hint)
  if not chosen:
    return {"": tuple(every)}

  # A run would otherwise train to its end, and have nothing to be tested on.
  groups["test"] = groups["test"] or groups["validation"]
  return {split: paths for split, paths in groups.items() if paths}


def _named(folder, every, by_file, by):
  """Finds the split that each file in a folder is named after.

  Args:
    folder: the data.
    every: its files.
    by_file: whether names of files count, besides those of folders.
    by: "auto" keeps the kinds of names apart; with anything else, all are of
      the kind "".

  Returns:
    {file: (split, kind)}; the kind is "folder", or a suffix in lowercase.
  """
  named: dict[pathlib.Path, tuple[str, str]] = {}
  for file in every:
    # The outermost folder counts: train/books/val.txt is for training.
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
  """{file: its split} of the kinds that training shares with another split."""
  kinds: dict[str, set[str]] = {split: set() for split in SPLITS}
  for split, kind in named.values():
    kinds[split].add(kind)
  # A lone train.py among texts is a program; train.txt beside val.txt is data.
  sure = kinds["train"] & (kinds["validation"] | kinds["test"])
  return {file: split for file, (split, kind) in named.items() if kind in sure}


def warn_unread(
  folder: pathlib.Path, paths: Collection[pathlib.Path], why: str = ""
) -> None:
  """Warns that files in a folder are not read, if there are any."""
  if paths:
    files.warn(
      f"{folder}: files that are not read: {len(paths):,}, such as"
      f" {min(paths).relative_to(folder)}{why}"
    )


def _size(paths):
  """The bytes of some files in all."""
  return sum(x.stat().st_size for x in paths)


def _names(folder, paths):
  """The names in a folder that paths begin with; of many, the first three."""
  names = list(dict.fromkeys(x.relative_to(folder).parts[0] for x in paths))
  more = ", ..." if len(names) > 3 else ""
  return ", ".join(names[:3]) + more


def _warn_of_splits(folder, groups):
  """Tells which files stand for a missing split, or for one of many names."""
  for split, paths in groups.items():
    # Shards differ in their numbers only, and need no warning.
    names = {re.sub(r"\d+", "", x.relative_to(folder).parts[0]) for x in paths}
    if len(names) > 1:
      files.warn(f"{folder}: {split} is {_names(folder, paths)}, joined")

  if not groups["validation"]:
    files.warn(
      f"{folder} has no validation: the end of"
      f" {_names(folder, groups['train'])} is used, by data.fractions"
    )
  if not groups["test"]:
    files.warn(
      f"{folder} has no test: {_names(folder, groups['validation'])} is used,"
      " as for validation"
    )


def divide(
  groups: Mapping[str, Any], fractions: Sequence[float], noun: str = "symbols"
) -> dict[str, Any]:
  """Cuts the splits that names do not tell, in proportion to fractions.

  Args:
    groups: the items of "", all of which are cut; or of the splits that names
      tell, where a missing validation split is cut from the end of "train".
    fractions: those of the three splits.
    noun: what the message of an error calls items.

  Returns:
    The items of each of `SPLITS`.

  Raises:
    ValueError: a part is empty.
  """
  if "validation" in groups:
    return dict(groups)

  # Either "", and no others; or "train", and maybe "test".
  whole, *rest = groups
  items = groups[whole]
  parts = {split: groups[split] for split in rest}
  to_cut = [split for split in SPLITS if split not in rest]
  start = 0
  for number, split in enumerate(to_cut, start=1):
    # Sums of fractions, so that rounding errors do not add up.
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
