"""Sources of images."""

import contextlib
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from sparse_transformer import atomic
from sparse_transformer.data import array_records, files as files_lib
from sparse_transformer.data.batches import Lazy
from sparse_transformer.data.registered import ConfigDict, register
from sparse_transformer.data.sources import Images
from sparse_transformer.data.splits import SPLITS, divide, named

# Training images held out for validation: as in Child et al. 2019, and in the
# code of Jun et al. 2020 (https://github.com/openai/distribution_augmentation).
CIFAR10_HELD_OUT = 2_000
IMAGENET64_HELD_OUT = 50_000
T = TypeVar("T")
CHANNELS = {"L": 1, "RGB": 3}  # by the mode of a picture


@register("digits", reads_path=False)
def digits(config: ConfigDict) -> Images:
  """Gray 8x8 digits with 17 levels, bundled with scikit-learn."""

  @functools.cache
  def load():
    import sklearn.datasets

    images = sklearn.datasets.load_digits().images.astype(np.uint8)
    parts = np.split(_permutation(len(images)), [-400, -200])
    return {k: images[part] for k, part in zip(SPLITS, parts, strict=True)}

  return Images((8, 8, 1), 17, load)


@register("cifar10", builder="sparse_transformer.data.builders:Cifar10Bytes")
def cifar10(config: ConfigDict) -> Images:
  """CIFAR-10, as the stock tensorflow-datasets builder or ours prepares it."""
  folder = lambda: cifar10_folder(config)
  read = lambda split: array_records.read(folder(), split, "image")
  load = functools.cache(lambda: cifar10_splits(read))
  return Images((32, 32, 3), 256, load, lambda: array_records.paths(folder()))


def cifar10_folder(config: ConfigDict) -> pathlib.Path:
  """The folder of CIFAR-10; FileNotFoundError if it is not prepared."""
  return array_records.find(config, "cifar10", "cifar10_bytes")


def cifar10_splits(
  read: Callable[[str], Sequence[T]],
) -> dict[str, Sequence[T]]:
  """The splits of CIFAR-10, from those that are published."""
  train, test = read("train"), read("test")
  order = _permutation(len(train))
  held_out, rest = np.split(order, [CIFAR10_HELD_OUT])
  parts = dict(train=rest, validation=held_out)
  return {k: _subset(train, np.sort(x)) for k, x in parts.items()} | dict(
    test=test
  )


@register("imagenet64")
def imagenet64(config: ConfigDict) -> Images:
  """ImageNet 64x64, from .npy files or as tensorflow-datasets prepares it.

  The published validation set is the test split.
  """
  path = files_lib.from_config(config.path)
  arrays = [path / f"{split}_64x64.npy" for split in ("train", "valid")]
  in_arrays = lambda: config.path and arrays[0].exists()
  folder = lambda: array_records.find(config, "downsampled_imagenet/64x64")
  read = lambda split: array_records.read(folder(), split, "image")

  @functools.cache
  def load():
    names = "train", "validation"
    train, test = map(_open_array, arrays) if in_arrays() else map(read, names)
    first = len(train) - IMAGENET64_HELD_OUT
    if first < 1:
      raise ValueError(
        f"{len(train)} training images must be more than the"
        f" {IMAGENET64_HELD_OUT:,} that are held out for validation"
      )
    parts = dict(train=range(first), validation=range(first, len(train)))
    return {k: _subset(train, x) for k, x in parts.items()} | dict(test=test)

  files = lambda: arrays if in_arrays() else array_records.paths(folder())
  return Images((64, 64, 3), 256, load, files)


@register("images")
def any_images(config: ConfigDict) -> Images:
  """PNG or JPEG files of one size in a folder, or the images of a .npy file.

  The first one, or the header of the array, determines the geometry.
  """
  path = files_lib.check_path(config.path)
  if path.suffix == ".npy":
    array = _open_array(path)
    parts = divide(array, config.fractions, "images")
    return Images(array.shape[1:], 256, lambda: parts, lambda: [path])

  find = lambda path: files_lib.find(path, ".png", ".jpg", ".jpeg")
  parts = {k: find(folder) for k, (folder,) in named(path).items()}
  parts = parts or divide(find(path), config.fractions, "images")
  every = [*dict.fromkeys(itertools.chain(*parts.values()))]
  shape = _geometry(first := parts["train"][0])

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
    read = functools.partial(_decode, channels=shape[2])
    make = lambda paths: Lazy(len(paths), lambda i: read(paths[i]))
    return {split: make(paths) for split, paths in parts.items()}

  return Images(shape, 256, load, lambda: every)


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
  """A picture, turned as the camera that took it was held."""
  import PIL.Image
  import PIL.ImageOps

  atomic.size(path)
  with files_lib.blame(path), PIL.Image.open(path) as image:
    is_photo = image.format == "JPEG"
    yield PIL.ImageOps.exif_transpose(image) if is_photo else image


def _geometry(path: pathlib.Path) -> tuple[int, int, int]:
  """The shape of a picture, of which only the header is read."""
  with _opened(path) as image:
    mode, (columns, rows) = image.mode, image.size
  if mode not in CHANNELS:
    raise ValueError(
      f"{path} has the color mode {mode}; convert it to RGB or to 8-bit gray"
    )
  return rows, columns, CHANNELS[mode]


def _decode(path: pathlib.Path, channels: int) -> np.ndarray:
  """The pixels of a picture, uint8."""
  with _opened(path) as image:
    return np.asarray(image.convert("L" if channels == 1 else "RGB"))


def _open_array(path: pathlib.Path) -> np.ndarray:
  """Maps a .npy file of images, uint8 [number, rows, columns, channels]."""
  array = files_lib.map_array(path)
  shape: Any = array.shape if array.ndim == 4 else (*array.shape, 1)
  is_sound = len(shape) == 4 and shape[3] in (1, 3) and array.size
  if array.dtype != np.uint8 or not is_sound:
    raise ValueError(
      f"{path} holds {array.dtype} {array.shape}; images must be uint8 (number,"
      " rows, columns) or (number, rows, columns, 1 or 3 channels)"
    )
  return array.reshape(shape)


def _subset(items: Any, indices: Sequence[int] | np.ndarray) -> Lazy:
  return Lazy(len(indices), lambda i: items[indices[i]])


def _permutation(n: int) -> np.ndarray:
  # NumPy guarantees the same numbers in all versions for RandomState, not for
  # Generator (NEP 19): a held-out image must stay held out.
  return np.random.RandomState(0).permutation(n)
