"""Sources of images."""

import contextlib
import functools
import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sparse_transformer import atomic
from sparse_transformer.data import files, splits
from sparse_transformer.data.batches import Lazy
from sparse_transformer.data.sources import ConfigDict, Images, register

# Training images for validation, as in the released code of Jun et al. 2020.
IMAGENET64_HELD_OUT = 50_000
CHANNELS = {"L": 1, "RGB": 3}  # by the mode of a picture


@register("digits", reads_path=False)
def digits(config: ConfigDict) -> Images:
  """Gray 8x8 digits with 17 levels, bundled with scikit-learn."""

  @functools.cache
  def load():
    import sklearn.datasets

    images = sklearn.datasets.load_digits().images.astype(np.uint8)
    # NumPy guarantees the same numbers in all versions for RandomState, not for
    # Generator (NEP 19): a held-out image must stay held out.
    order = np.random.RandomState(0).permutation(len(images))
    parts = np.split(images[order], [-400, -200])
    return dict(zip(splits.SPLITS, parts, strict=True))

  return Images((8, 8, 1), 17, load)


@register("imagenet64")
def imagenet64(config: ConfigDict) -> Images:
  """ImageNet 64x64: train_64x64.npy and valid_64x64.npy in a folder.

  The published validation set is the test split.
  """
  folder = files.from_config(config.path)
  paths = [folder / f"{split}_64x64.npy" for split in ("train", "valid")]

  @functools.cache
  def load():
    files.check_path(config.path)
    train, test = map(_open_array, paths)
    train, validation = np.split(train, [-IMAGENET64_HELD_OUT])
    return dict(train=train, validation=validation, test=test)

  return Images((64, 64, 3), 256, load, lambda: paths)


@register("images")
def any_images(config: ConfigDict) -> Images:
  """PNG or JPEG files of one size in a folder, or the images of a .npy file."""
  path = files.check_path(config.path)
  names = (x.name for x in path.glob("*.npy"))
  if path.suffix == ".npy" or any(map(splits.FILE.fullmatch, names)):
    return _of_arrays(
      splits.listed(path, ".npy", by=config.splits), config.fractions
    )
  found = splits.listed(
    path, ".png", ".jpg", ".jpeg", by_file=False, by=config.splits
  )
  every = [*dict.fromkeys(itertools.chain(*found.values()))]
  shape = _geometry(first := every[0])
  parts = splits.divide(found, config.fractions, "images")

  @functools.cache
  def load():
    for file in every:
      size = _geometry(file)
      # Gray pictures may be among others.
      if size[:2] != shape[:2] or size[2] > shape[2]:
        raise ValueError(
          f"{file} has (rows, columns, channels) = {size}, but {first} has"
          f" {shape}; all images must have one size: convert or remove it"
        )

    def pixels(path):
      with _opened(path) as image:
        return np.asarray(image.convert("L" if shape[2] == 1 else "RGB"))

    make = lambda paths: Lazy(len(paths), lambda i: pixels(paths[i]))
    return {split: make(paths) for split, paths in parts.items()}

  return Images(shape, 256, load, lambda: every)


def _of_arrays(found, fractions):
  """The images of .npy files, whose splits are found by their names."""
  arrays = {x: _open_array(x) for x in itertools.chain(*found.values())}
  shape, *others = {x.shape[1:] for x in arrays.values()}
  if others:
    names = ", ".join(map(str, arrays))
    raise ValueError(f"{names} have images of different sizes; give them one")
  join = lambda x: np.concatenate(x) if len(x) > 1 else x[0]
  joined = {k: join([arrays[x] for x in paths]) for k, paths in found.items()}
  parts = splits.divide(joined, fractions, "images")
  return Images(shape, 256, lambda: parts, lambda: [*arrays])


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
  """A picture, turned as the camera that took it was held."""
  import PIL.Image
  import PIL.ImageOps

  atomic.size(path)
  with files.blame(path), PIL.Image.open(path) as image:
    is_photo = image.format in ("JPEG", "MPO")  # some phones write MPO
    yield PIL.ImageOps.exif_transpose(image) if is_photo else image


def _geometry(path: pathlib.Path) -> tuple[int, int, int]:
  """The shape of a picture, read from its header."""
  with _opened(path) as image:
    mode, (columns, rows) = image.mode, image.size
    # Pillow drops a transparent color, and the lower half of 16 bits.
    mode += "A" * ("transparency" in image.info)
    stored = [x[3] for x in getattr(image, "tile", ())]
    mode += ";16" * (mode == "RGB" and ";16" in str(stored))
  if mode not in CHANNELS:
    raise ValueError(
      f"{path} has the color mode {mode}; convert it to RGB or gray of 8 bits"
    )
  return rows, columns, CHANNELS[mode]


def _open_array(path: pathlib.Path) -> np.ndarray:
  """Maps a .npy file of images, uint8 [number, rows, columns, channels]."""
  array = files.map_array(path)
  side = math.isqrt(math.prod(array.shape[1:]) // 3)
  if side and array.shape[1:] == (3 * side**2,):  # flat and square
    array = array.reshape(-1, side, side, 3)
  shape: Any = array.shape if array.ndim == 4 else (*array.shape, 1)
  is_sound = len(shape) == 4 and shape[3] in (1, 3) and array.size
  if array.dtype != np.uint8 or not is_sound:
    raise ValueError(
      f"{path} holds {array.dtype} {array.shape}; images must be uint8 (number,"
      " rows, columns) or (number, rows, columns, 1 or 3 channels)"
    )
  return array.reshape(shape)
