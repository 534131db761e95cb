"""Sources of images."""

import contextlib
import functools
import itertools
import pathlib
import warnings
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
PICTURES = ".png", ".jpg", ".jpeg"


@register("digits", reads_path=False)
def digits(config: ConfigDict) -> Images:
  """Gray 8x8 digits with 17 levels, bundled with scikit-learn."""

  @functools.cache
  def load():
    import sklearn.datasets

    images = sklearn.datasets.load_digits().images.astype(np.uint8)
    parts = np.split(images[_order(len(images))], [-400, -200])
    return dict(zip(splits.SPLITS, parts, strict=True))

  return Images((8, 8, 1), 17, load)


def _order(number: int) -> np.ndarray:
  """A fixed order of images, for those whose own order means nothing.

  NumPy guarantees the same one in all versions for RandomState, not for
  Generator (NEP 19): a held-out image must stay held out.
  """
  return np.random.RandomState(0).permutation(number)


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
    if {train.shape[1:], test.shape[1:]} != {(64, 64, 3)}:
      raise ValueError(
        f"{paths[0]} and {paths[1]} hold {train.shape} and {test.shape}, not"
        " images of 64 x 64 x 3; for others, set data.name to images"
      )
    train, validation = np.split(train, [-IMAGENET64_HELD_OUT])
    return dict(train=train, validation=validation, test=test)

  return Images((64, 64, 3), 256, load, lambda: paths)


@register("images")
def any_images(config: ConfigDict) -> Images:
  """PNG or JPEG files of one size in a folder, or the images of .npy files.

  Unless names tell the splits, images are shuffled before they are cut: the
  classes may be in turn. Clips are not, whose order is that of time.
  """
  path = files.check_path(config.path)
  if path.is_file() and path.suffix.lower() != ".npy":
    raise ValueError(
      f"{path} must be a folder of PNG or JPEG files, or a .npy file, to which"
      " np.save writes an array of another kind of file"
    )
  if path.is_file() or _has_arrays(path):
    found = splits.listed(path, ".npy", by=config.splits)
    return _of_arrays(found, config.fractions)
  found = splits.listed(path, *PICTURES, by_file=False, by=config.splits)
  every = [*dict.fromkeys(itertools.chain(*found.values()))]
  shape = _geometry(first := every[0])
  parts = _divide(found, config.fractions)

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

    # Here, each picture has been opened once, and Pillow's doubts told.
    warnings.filterwarnings("ignore", module="PIL")

    def pixels(path):
      import PIL.ImageOps

      with _opened(path) as (image, orientation):
        if orientation != 1:
          image = PIL.ImageOps.exif_transpose(image)
        return np.asarray(image.convert("L" if shape[2] == 1 else "RGB"))

    make = lambda paths: Lazy(len(paths), lambda i: pixels(paths[i]))
    return {split: make(paths) for split, paths in parts.items()}

  return Images(shape, 256, load, lambda: every)


def _has_arrays(folder):
  """Whether the images of a folder are in .npy files."""
  if any(splits.FILE.fullmatch(x.name) for x in folder.glob("*.npy")):
    return True
  has = lambda *x: any(files.has_suffix(y, *x) for y in files.below(folder))
  return has(".npy") and not has(*PICTURES)


def _of_arrays(found, fractions):
  """The images of .npy files, whose splits are found by their names."""
  arrays = {x: _open_array(x) for x in itertools.chain(*found.values())}
  shape, *others = {x.shape[1:] for x in arrays.values()}
  if others:
    names = ", ".join(map(str, arrays))
    raise ValueError(f"{names} have images of different sizes; give them one")
  join = lambda x: np.concatenate(x) if len(x) > 1 else x[0]
  joined = {k: join([arrays[x] for x in paths]) for k, paths in found.items()}
  source = Images(shape, 256, lambda: parts, lambda: [*arrays])
  parts = _divide(joined, fractions, source.frames)
  return source


def _divide(found, fractions, frames=1):
  """Cuts the splits that names do not tell out of images in a fixed order.

  Their own may be that of classes. Clips stay in theirs, which is of time.
  """
  if "validation" in found:
    return found
  whole = next(iter(found))
  images = found[whole]
  order = _order(len(images))
  if frames > 1:
    order.sort()
    files.tell(
      f"clips of {frames} frames are split in their order, as of time; for"
      " other splits, name files train.npy, val.npy and test.npy"
    )
  cut = splits.divide({**found, whole: order}, fractions, "images")
  make = lambda x: Lazy(len(x), lambda i: images[x[i]])
  return {k: found[k] if x is found.get(k) else make(x) for k, x in cut.items()}


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[tuple[Any, int]]:
  """A picture as stored, and the EXIF orientation that its header tells."""
  import PIL.ExifTags
  import PIL.Image

  atomic.size(path)
  with files.blame(path), PIL.Image.open(path) as image:
    # In other files, the tag may be behind the pixels, which would be decoded.
    is_photo = image.format in ("JPEG", "MPO") or "exif" in image.info
    tags = image.getexif() if is_photo else {}
    yield image, tags.get(PIL.ExifTags.Base.Orientation, 1)


def _geometry(path: pathlib.Path) -> tuple[int, int, int]:
  """The shape of a picture, turned as its camera was held, by its header."""
  with warnings.catch_warnings(record=True) as doubts:
    warnings.simplefilter("always")
    with _opened(path) as (image, orientation):
      mode, (columns, rows) = image.mode, image.size
      # Pillow drops a transparent color, the lower half of 16 bits, and frames.
      mode += "A" * ("transparency" in image.info)
      stored = [x[3] for x in getattr(image, "tile", ())]
      mode += ";16" * (mode == "RGB" and ";16" in str(stored))
      number = getattr(image, "n_frames", 1)  # a phone's MPO has a small copy
      mode += f", {number} times" * (number > 1 and image.format != "MPO")
  for doubt in doubts:
    files.tell(f"{path}: {doubt.message}")
  if mode not in CHANNELS:
    raise ValueError(
      f"{path} has the color mode {mode}; convert it to RGB or gray of 8 bits"
    )
  if orientation in (5, 6, 7, 8):  # on its side
    rows, columns = columns, rows
  return rows, columns, CHANNELS[mode]


def _open_array(path: pathlib.Path) -> np.ndarray:
  """Maps a .npy file of images, uint8 [number, rows, columns, channels]."""
  array = files.map_array(path)
  shape = array.shape
  # Channels come last, or are planes.
  is_gray = array.ndim == 3 and not {1, 3, 4} & {*shape[1:]}
  if is_gray:
    array = array[..., np.newaxis]
  is_sound = array.ndim == 4 and array.shape[3] in (1, 3) and array.size
  if array.dtype != np.uint8 or not is_sound:
    raise ValueError(
      f"{path} holds {array.dtype} {shape}; images must be uint8 (number, rows,"
      " columns), without 1, 3 or 4 of these, or (number, rows, columns, 1 or 3"
      " channels): of one,"
      " save x[None]; of flat pixels, x.reshape(-1, rows, columns, 3); of"
      " planes, as CIFAR-10 and ImageNet 64x64 are published,"
      " x.reshape(-1, 3, rows, columns).transpose(0, 2, 3, 1)"
    )
  if is_gray:
    files.tell(
      f"{path}: read as {shape[0]:,} gray images of {shape[1]:,} x"
      f" {shape[2]:,}; if its last axis counts them, save np.moveaxis(x, -1, 0)"
    )
  return array
