"""Sources of images."""

import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from sparse_transformer import atomic
from sparse_transformer.data import array_records, files as files_lib
from sparse_transformer.data.sources import (
  ConfigDict,
  Images,
  Items,
  Lazy,
  check_no_path,
  register,
)
from sparse_transformer.data.splits import SPLITS, divide, named

# Training images held out for validation: as in Child et al. 2019, and in the
# code of Jun et al. 2020 (https://github.com/openai/distribution_augmentation).
CIFAR10_HELD_OUT = 2_000
IMAGENET64_HELD_OUT = 50_000
T = TypeVar("T")
CHANNELS = {"L": 1, "RGB": 3}  # by the mode of a picture


@register("digits")
def digits(config: ConfigDict) -> Images:
  """Gray 8x8 digits with 17 levels, bundled with scikit-learn."""

  @functools.cache
  def load():
    check_no_path(config)
    import sklearn.datasets

    images = sklearn.datasets.load_digits().images.astype(np.uint8)
    parts = np.split(_permutation(len(images)), [-400, -200])
    return {k: images[part] for k, part in zip(SPLITS, parts, strict=True)}

  return Images((8, 8, 1), 17, load)


@register("cifar10", builder="sparse_transformer.data.builders:Cifar10Bytes")
def cifar10(config: ConfigDict) -> Images:
  """CIFAR-10, as the stock tensorflow-datasets builder or ours prepares it."""

  def folder():
    return array_records.find(config, "cifar10", "cifar10_bytes")

  @functools.cache
  def load():
    return cifar10_splits(lambda x: array_records.read(folder(), x, "image"))

  files = lambda: array_records.verified_files(folder())
  return Images((32, 32, 3), 256, load, files)


def cifar10_splits(read: Callable[[str], Sequence[T]]) -> dict[str, Lazy[T]]:
  """The splits of CIFAR-10, from those that are published."""
  train, test = read("train"), read("test")
  order = _permutation(len(train))
  return {
    "train": _subset(train, np.sort(order[CIFAR10_HELD_OUT:])),
    "validation": _subset(train, np.sort(order[:CIFAR10_HELD_OUT])),
    "test": _subset(test, range(len(test))),
  }


@register("imagenet64")
def imagenet64(config: ConfigDict) -> Images:
  """ImageNet 64x64, from .npy files or as tensorflow-datasets prepares it.

  The published validation set is the test split.
  """
  shape = (64, 64, 3)
  path = files_lib.from_config(config.path)
  arrays = [path / f"{split}_64x64.npy" for split in ("train", "valid")]

  def in_arrays():
    return config.path and arrays[0].exists()

  def folder():
    return array_records.find(config, "downsampled_imagenet/64x64")

  def read(split: str) -> Items:
    return array_records.read(folder(), split, "image")

  @functools.cache
  def load():
    if in_arrays():
      train, test = (_open_array(path, shape) for path in arrays)
    else:
      train, test = read("train"), read("validation")
    first = len(train) - IMAGENET64_HELD_OUT
    if first < 1:
      raise ValueError(
        f"{len(train)} training images must be more than the"
        f" {IMAGENET64_HELD_OUT:,} that are held out for validation"
      )
    return {
      "train": _subset(train, range(first)),
      "validation": _subset(train, range(first, len(train))),
      "test": test,
    }

  def files():
    return arrays if in_arrays() else array_records.verified_files(folder())

  return Images(shape, 256, load, files)


@register("images")
def any_images(config: ConfigDict) -> Images:
  """PNG or JPEG files of one size in a folder, or the images of a .npy file.

  The first one, or the header of the array, determines the geometry.
  """
  path = files_lib.check_path(config.path)
  if path.suffix == ".npy":
    array = files_lib.map_array(path)
    shape: Any = array.shape if array.ndim == 4 else (*array.shape, 1)
    is_sound = len(shape) == 4 and shape[3] in (1, 3) and array.size
    if array.dtype != np.uint8 or not is_sound:
      raise ValueError(
        f"{path} holds {array.dtype} {array.shape}; images must be uint8"
        " (number, rows, columns) or (number, rows, columns, 1 or 3 channels)"
      )
    parts = divide(array.reshape(shape), config.fractions, "images")
    return Images(shape[1:], 256, lambda: parts, lambda: [path])

  find = lambda path: sorted(files_lib.find(path, ".png", ".jpg", ".jpeg"))
  parts = {k: find(folder) for k, (folder,) in named(path).items()}
  parts = parts or divide(find(path), config.fractions, "images")
  every = [*dict.fromkeys(itertools.chain(*parts.values()))]
  shape = _geometry(first := parts["train"][0])
  read = functools.partial(_decode, channels=shape[2])

  @functools.cache
  def load():
    for file in every:
      found = _geometry(file)
      # Gray pictures may be among others.
      if found[:2] != shape[:2] or found[2] > shape[2]:
        raise ValueError(
          f"{file} has (rows, columns, channels) = {found}, but {first} has"
          f" {shape}; all images must have one size: convert or remove it"
        )
    make = lambda paths: Lazy(len(paths), lambda i: read(paths[i]))
    return {split: make(paths) for split, paths in parts.items()}

  def files():
    for file in every:
      read(file)  # raises if it is damaged
    return every

  return Images(shape, 256, load, files)


def _geometry(path: pathlib.Path) -> tuple[int, int, int]:
  """The shape of a picture, of which only the header is read."""
  import PIL.Image

  atomic.size(path)
  with files_lib.blame(path), PIL.Image.open(path) as image:
    mode, (columns, rows) = image.mode, image.size
  if mode not in CHANNELS:
    raise ValueError(
      f"{path} has the color mode {mode}; convert it to RGB or to 8-bit gray"
    )
  return rows, columns, CHANNELS[mode]


def _decode(path: pathlib.Path, channels: int) -> np.ndarray:
  """The pixels of a picture, uint8."""
  import PIL.Image

  with files_lib.blame(path), PIL.Image.open(path) as image:
    return np.asarray(image.convert("L" if channels == 1 else "RGB"))


def _open_array(path: pathlib.Path, shape: tuple[int, int, int]) -> Items:
  """Maps the images in a .npy file, uint8 [number, *shape], into memory."""
  if not path.exists():
    raise FileNotFoundError(
      f"no file {path}; set data.path to the folder that contains it"
    )
  images = files_lib.map_array(path)
  if images.shape[1:] != shape or images.dtype != np.uint8:
    raise ValueError(
      f"{path} holds {images.dtype} {images.shape}; images must be uint8"
      f" (number, {', '.join(map(str, shape))})"
    )
  return images


def _subset(items: Any, indices: Sequence[int] | np.ndarray) -> Lazy:
  return Lazy(len(indices), lambda i: items[indices[i]])


def _permutation(n: int) -> np.ndarray:
  # NumPy guarantees the same numbers in all versions for RandomState, not for
  # Generator (NEP 19): a held-out image must stay held out.
  return np.random.RandomState(0).permutation(n)
