"""Labelled text: files in folders that are named after classes."""

import functools
import pathlib

import numpy as np

from sparse_transformer.data import files
from sparse_transformer.data.sources import ConfigDict, Sequences, register
from sparse_transformer.data.splits import SPLITS, divide, listed, warn_unread
from sparse_transformer.data.text import Text


@register("labelled")
def labelled(config: ConfigDict) -> Sequences:
  """The bytes of files, each in a folder named after its class.

  Each file is an example. Only its first `data.length` bytes are used.
  Either each split is a folder that contains folders of classes, or the files
  of each class are divided into splits.
  """
  length = config.length
  path = files.check_path(config.path)
  # Only folders define splits, because a file of a class may be named
  # train.txt.
  groups = listed(path, "", by_file=False, by=config.splits)
  depth = 0 if "" in groups else 1
  by_class = {k: _by_class(path, depth, x) for k, x in groups.items()}

  beside = {x for group in by_class.values() for x in group.pop("", ())}
  classes = _check_classes(path, by_class)
  warn_unread(path, beside, ", because they are not in a folder of a class")
  codec = Text()

  def example(file, label):
    data = files.read(file)
    if not data:
      raise ValueError(f"{file} is empty; remove it, or write text to it")
    return codec.decode(data, file)[:length], label

  @functools.cache
  def load():
    examples: dict[str, list] = {split: [] for split in SPLITS}
    for label, name in enumerate(classes):
      noun = f"files in {path / name}"
      # Divide each class separately, so that classes have the same shares in
      # all splits.
      of_class = {split: group[name] for split, group in by_class.items()}
      parts = divide(of_class, config.fractions, noun)
      for split, paths in parts.items():
        for file in paths:
          examples[split].append(example(file, label))
    return {split: _shuffled(x) for split, x in examples.items()}

  return Sequences(
    length=length,
    shape=(-(-length // config.columns), config.columns),
    vocab_size=codec.vocab_size,
    classes=classes,
    load=load,
    symbols=codec.symbols,
  )


def _by_class(root, depth, paths):
  """Returns {class: its files}; classes are folders `depth` below the root."""
  groups: dict[str, list[pathlib.Path]] = {}
  for path in paths:
    folders = path.relative_to(root).parts[depth:-1]
    # Files beside the folders are listed under "", which is not a class.
    groups.setdefault(folders[0] if folders else "", []).append(path)
  return groups


def _check_classes(path, by_class):
  """Returns the names of classes; raises ValueError if they differ by split."""
  classes, *different = {tuple(group) for group in by_class.values()}
  if len(classes) >= 2 and not different and "".join(classes).isprintable():
    return classes

  names = (f"{k} {', '.join(x) or 'none'}" for k, x in by_class.items())
  raise ValueError(
    f"{path} must contain a folder for each of at least 2 classes, the same"
    f" classes in all splits, with names in UTF-8; it contains"
    f" {'; '.join(names).strip()}"
  )


def _shuffled(examples):
  """Returns the examples in a fixed random order.

  This is necessary because files are sorted by class, and validation during
  training may use only the first examples.
  """
  order = np.random.RandomState(0).permutation(len(examples))
  return [examples[i] for i in order]
