"""Text with labels: files in folders that are named after their classes."""

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

  Each file is an example: its first `data.length` bytes. The splits are folders
  of classes too, or are cut out of each class.
  """
  length = config.length
  path = files.check_path(config.path)
  # A file may be named train.txt in a class: only folders tell splits.
  groups = listed(path, "", by_file=False, by=config.splits)
  depth = 0 if "" in groups else 1
  by_class = {k: _by_class(path, depth, x) for k, x in groups.items()}

  beside = {x for group in by_class.values() for x in group.pop("", ())}
  classes = _check_classes(path, by_class)
  warn_unread(path, beside, ", in no folder of a class")
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
      # Classes are divided one by one, so that all splits have
      # them in proportion.
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
  """{class: its files}; classes are folders, `depth` below the root."""
  groups: dict[str, list[pathlib.Path]] = {}
  for path in paths:
    folders = path.relative_to(root).parts[depth:-1]
    # Files beside the folders are kept under "", which is not a class.
    groups.setdefault(folders[0] if folders else "", []).append(path)
  return groups


def _check_classes(path, by_class):
  """The names of the classes; ValueError if those of splits differ."""
  classes, *different = {tuple(group) for group in by_class.values()}
  if len(classes) >= 2 and not different and "".join(classes).isprintable():
    return classes

  names = (f"{k} {', '.join(x) or 'none'}" for k, x in by_class.items())
  raise ValueError(
    f"{path} needs a folder for each of at least 2 classes, the same in all"
    f" splits, with names in UTF-8; it has {'; '.join(names).strip()}"
  )


def _shuffled(examples):
  """The examples in a fixed random order.

  Files are sorted by class, and validation during training may cover the first
  examples only.
  """
  order = np.random.RandomState(0).permutation(len(examples))
  return [examples[i] for i in order]
