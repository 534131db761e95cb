"""Sources of labelled sequences, for networks that classify."""

import functools
import pathlib

import numpy as np

from sparse_transformer.data import array_records, files as files_lib
from sparse_transformer.data.batches import Lazy
from sparse_transformer.data.images import cifar10_folder, cifar10_splits
from sparse_transformer.data.registered import ConfigDict, register
from sparse_transformer.data.sources import Sequences
from sparse_transformer.data.splits import SPLITS, divide, named

CIFAR10 = (
  *("airplane", "automobile", "bird", "cat", "deer"),
  *("dog", "frog", "horse", "ship", "truck"),
)
LUMA = 0.2989, 0.5870, 0.1140  # ITU-R 601, of red, green and blue


@register("cifar10_gray", "sparse_transformer.data.builders:Cifar10Bytes")
def cifar10_gray(config: ConfigDict) -> Sequences:
  """CIFAR-10 in gray, by rows, with its labels: Image of Long Range Arena."""

  folder = lambda: cifar10_folder(config)

  def read(split: str) -> Lazy[tuple[np.ndarray, int]]:
    images, labels = (
      array_records.read(folder(), split, x) for x in ("image", "label")
    )
    return Lazy(len(images), lambda i: (gray(images[i]), int(labels[i])))

  load = functools.cache(lambda: cifar10_splits(read))
  files = lambda: array_records.paths(folder())
  return Sequences(
    1024, (32, 32, 1), 256, CIFAR10, load, files, "levels", "bits/dim"
  )


def gray(image: np.ndarray) -> np.ndarray:
  """The luma of the pixels of an RGB image, uint8 [pixels]."""
  return np.rint(image.reshape(-1, 3) @ np.array(LUMA)).astype(np.uint8)


@register("labelled")
def labelled(config: ConfigDict) -> Sequences:
  """The bytes of files, each in a folder named after its class."""
  path = files_lib.check_path(config.path)
  folders = {split: folder for split, (folder,) in named(path).items()}
  classes, *others = map(_classes, folders.values() if folders else [path])
  for folder, found in zip([*folders.values()][1:], others, strict=True):
    if found != classes:
      raise ValueError(
        f"{folder} has the classes {', '.join(found)}, but"
        f" {folders['train']} has {', '.join(classes)}; all must have the same"
      )

  @functools.cache
  def load():
    splits: dict[str, list] = {split: [] for split in SPLITS}
    for label, name in enumerate(classes):
      find = lambda folder, name=name: files_lib.find(folder / name, "")
      if folders:
        parts = {split: find(folder) for split, folder in folders.items()}
      else:
        noun = f"files in {path / name}"
        parts = divide(find(path), config.fractions, noun)
      for split, files in parts.items():
        splits[split] += [(_read(file, config.length), label) for file in files]
    # Validation during training may cover the first examples only.
    order = lambda x: np.random.RandomState(0).permutation(len(x))
    return {k: [x[i] for i in order(x)] for k, x in splits.items()}

  shape = -(-config.length // config.columns), config.columns
  return Sequences(
    config.length, shape, 256, classes, load, None, "bytes", "bits/byte"
  )


def _read(file: pathlib.Path, length: int) -> np.ndarray:
  """The first bytes of a file, uint8; ValueError if there are none."""
  if not (data := files_lib.read(file)[:length]):
    raise ValueError(f"{file} is empty; remove it, or write text to it")
  return np.frombuffer(data, np.uint8)


def _classes(folder: pathlib.Path) -> tuple[str, ...]:
  """The names of the folders in a folder."""
  found = sorted(x.name for x in folder.glob("[!.]*") if x.is_dir())
  if len(found) < 2:
    raise ValueError(
      f"{folder} has {len(found)} folders ({', '.join(found) or 'none'}); it"
      " needs one for each of at least 2 classes"
    )
  return tuple(found)
