"""Sources of images."""

import contextlib
import functools
import itertools
import warnings

import numpy as np

from sparse_transformer import atomic
from sparse_transformer.data import files, splits
from sparse_transformer.data.batches import Lazy, chosen
from sparse_transformer.data.sources import ConfigDict, Images, register

# The number of training images used for validation, as in the released code of
# Jun et al. 2020.
IMAGENET64_HELD_OUT = 50_000
# The number of channels of a picture, by its mode.
CHANNELS = {"L": 1, "RGB": 3}
PICTURES = ".png", ".jpg", ".jpeg"


@register("digits", reads_path=False)
def digits(config: ConfigDict) -> Images:
  """Gray 8x8 digits with 17 levels, which are part of scikit-learn.

  Of 1,797 digits, 200 are used for validation and 200 for the test.
  """

  @functools.cache
  def load():
    import sklearn.datasets

    images = sklearn.datasets.load_digits().images.astype(np.uint8)
    order = _order(len(images))
    parts = np.split(images[order], [-400, -200])
    return dict(zip(splits.SPLITS, parts, strict=True))

  return Images(shape=(8, 8, 1), vocab_size=17, load=load)


def _order(number):
  """Returns a fixed random order, for images that are in no meaningful order.

  The order is drawn with RandomState, not Generator, because NumPy guarantees
  only for RandomState that all versions draw the same order (NEP 19). A
  held-out image therefore stays held out.
  """
  return np.random.RandomState(0).permutation(number)


@register("imagenet64")
def imagenet64(config: ConfigDict) -> Images:
  """ImageNet 64x64, from train_64x64.npy and valid_64x64.npy in a folder.

  Both files are uint8 [images, 64, 64, 3]. The published validation set is the
  test split, and the last 50,000 training images are the validation split.
  """
  folder = files.from_config(config.path)
  paths = [folder / "train_64x64.npy", folder / "valid_64x64.npy"]

  @functools.cache
  def load():
    files.check_path(config.path)
    # Map the files into memory, because the training images take 16 GB.
    train, test = map(_open_array, paths)
    if {train.shape[1:], test.shape[1:]} != {(64, 64, 3)}:
      raise ValueError(
        f"{paths[0]} and {paths[1]} contain {train.shape} and {test.shape}, not"
        " images of 64 x 64 x 3; for other images, set data.name=images"
      )
    return {
      "train": train[:-IMAGENET64_HELD_OUT],
      "validation": train[-IMAGENET64_HELD_OUT:],
      "test": test,
    }

  return Images((64, 64, 3), vocab_size=256, load=load, files=lambda: paths)


@register("images")
def any_images(config: ConfigDict) -> Images:
  """PNG or JPEG files of equal size in a folder, or images in .npy files.

  If names do not define the splits, images are shuffled before they are split,
  because they may be sorted by class. Clips are assumed to be in chronological
  order, so they are not shuffled.
  """
  path = files.check_path(config.path)
  if path.is_file() and path.suffix.lower() != ".npy":
    raise ValueError(
      f"{path} must be a folder of PNG or JPEG files, or a .npy file; convert"
      " other files to an array, and write it with np.save"
    )

  if path.is_file() or _has_arrays(path):
    groups = splits.listed(path, ".npy", by=config.splits)
    return _of_arrays(groups, config.fractions)

  groups = splits.listed(path, *PICTURES, by_file=False, by=config.splits)
  return _of_pictures(groups, config.fractions)


def _has_arrays(folder):
  """Returns whether the images of a folder are read from .npy files.

  This is the case if a .npy file is named after a split, or if the folder
  contains .npy files but no PNG or JPEG files.
  """
  if any(splits.FILE.fullmatch(x.name) for x in folder.glob("*.npy")):
    return True
  has = lambda *x: any(files.has_suffix(y, *x) for y in files.below(folder))
  return has(".npy") and not has(*PICTURES)


def _distinct(groups):
  """Returns the files of all splits without duplicates.

  Duplicates occur because two splits may consist of the same files.
  """
  return list(dict.fromkeys(itertools.chain.from_iterable(groups.values())))


def _of_arrays(groups, fractions):
  """Returns the source of images in .npy files.

  Args:
    groups: the files of each split that names define, see `splits.listed`.
    fractions: the fractions of the three splits, for splits that names do not
      define.

  Raises ValueError if a file does not contain images, or if sizes differ.
  """
  arrays = {path: _open_array(path) for path in _distinct(groups)}

  shape, *different = {array.shape[1:] for array in arrays.values()}
  if different:
    names = ", ".join(map(str, arrays))
    raise ValueError(
      f"{names} contain images of different sizes; convert them to one size"
    )

  images = {}
  for split, paths in groups.items():
    of_split = [arrays[path] for path in paths]
    # A single array stays memory-mapped.
    images[split] = of_split[0] if len(paths) == 1 else np.concatenate(of_split)

  # How images are divided depends on `frames` of the source, so create the
  # source before `parts`.
  source = Images(
    shape=shape,
    vocab_size=256,
    load=lambda: parts,
    files=lambda: list(arrays),
  )
  parts = _divide(images, fractions, source.frames)
  return source


def _of_pictures(groups, fractions):
  """Returns the source of images in PNG and JPEG files.

  Only the first file is opened here. `load` checks all files, which may take
  minutes.

  Args:
    groups: the files of each split that folders define, see `splits.listed`.
    fractions: the fractions of the three splits, for splits that folders do not
      define.
  """
  paths = _distinct(groups)
  shape = _geometry(paths[0])
  parts = _divide(groups, fractions)
  # If the first picture is in color, gray pictures are converted.
  mode = "L" if shape[2] == 1 else "RGB"

  @functools.cache
  def load():
    for path in paths:
      _check_geometry(path, paths[0], shape)
    # Each picture has been opened once, and Pillow's warnings reported. Do not
    # repeat them.
    warnings.filterwarnings("ignore", module="PIL")
    return {split: of_files(x) for split, x in parts.items()}

  def of_files(files):
    return Lazy(len(files), lambda i: _pixels(files[i], mode))

  return Images(shape, vocab_size=256, load=load, files=lambda: paths)


def _divide(groups, fractions, frames=1):
  """Divides images into the splits that names do not define.

  Images are shuffled in a fixed order, because files may be sorted by class.
  Clips stay in chronological order.
  """
  if "validation" in groups:
    return groups

  whole = next(iter(groups))
  images = groups[whole]
  order = _order(len(images))
  if frames > 1:
    # Undo the shuffle, to keep the order of time.
    order.sort()
    files.warn(
      f"clips of {frames} frames are split in their order, which is taken for"
      " that of time; for other splits, name files train.npy, val.npy and"
      " test.npy"
    )

  # Divide indices instead of images, because images may not fit in memory.
  parts = splits.divide({**groups, whole: order}, fractions, "images")
  for split, numbers in parts.items():
    if split == whole or split not in groups:
      parts[split] = chosen(images, numbers)
  return parts


@contextlib.contextmanager
def _opened(path):
  """Yields a picture as stored, and the EXIF orientation in its header."""
  import PIL.ExifTags
  import PIL.Image

  atomic.size(path)  # raises ValueError for a pipe, which might never end
  with files.blame(path), PIL.Image.open(path) as image:
    # In other formats, the tag may follow the pixels, and reading it would
    # decode them.
    is_photo = image.format in ("JPEG", "MPO") or "exif" in image.info
    tags = image.getexif() if is_photo else {}
    yield image, tags.get(PIL.ExifTags.Base.Orientation, 1)


def _pixels(path, mode):
  """Returns the pixels of a picture, rotated by its EXIF orientation."""
  import PIL.ImageOps

  with _opened(path) as (image, orientation):
    if orientation != 1:
      image = PIL.ImageOps.exif_transpose(image)
    return np.asarray(image.convert(mode))


def _geometry(path):
  """Returns (rows, columns, channels) of a picture, rotated by orientation."""
  with warnings.catch_warnings(record=True) as doubts:
    warnings.simplefilter("always")
    with _opened(path) as (image, orientation):
      mode = _mode(image)
      columns, rows = image.size
  for doubt in doubts:
    files.warn(f"{path}: {doubt.message}")

  if mode not in CHANNELS:
    raise ValueError(
      f"{path} has the color mode {mode}; convert it to 8-bit RGB or 8-bit gray"
    )
  if orientation in (5, 6, 7, 8):  # rotated by 90 degrees
    rows, columns = columns, rows
  return rows, columns, CHANNELS[mode]


def _mode(image):
  """Returns the mode of a picture.

  A suffix is added to the mode if a conversion by Pillow would lose
  information: transparency, 16-bit levels, or further frames.
  """
  mode = image.mode
  if "transparency" in image.info:
    mode += "A"
  # Pillow opens 16-bit RGB as 8-bit RGB. Only this argument of its decoder
  # shows it.
  tiles = [tile[3] for tile in getattr(image, "tile", ())]
  if mode == "RGB" and ";16" in str(tiles):
    mode += ";16"
  number = getattr(image, "n_frames", 1)
  # MPO files of phones contain an additional small copy, which can be ignored.
  if number > 1 and image.format != "MPO":
    mode += f", {number} times"
  return mode


def _check_geometry(path, first, shape):
  """Raises ValueError if a picture does not have the shape of the first one."""
  size = _geometry(path)
  # Among color pictures, there may be gray ones.
  if size[:2] != shape[:2] or size[2] > shape[2]:
    raise ValueError(
      f"{path} has (rows, columns, channels) = {size}, but {first} has"
      f" {shape}; all images must have the same size; convert or remove it"
    )


def _open_array(path):
  """Maps a .npy file of images, uint8 [number, rows, columns, channels]."""
  array = files.map_array(path)
  shape = array.shape
  # An axis of 1, 3 or 4 is that of channels, either last or as planes.
  is_gray = array.ndim == 3 and not {1, 3, 4} & set(shape[1:])
  if is_gray:
    array = array[..., np.newaxis]
  are_images = array.ndim == 4 and array.shape[3] in (1, 3) and array.size
  if array.dtype != np.uint8 or not are_images:
    raise ValueError(
      f"{path} contains {array.dtype} {shape}; images must be uint8 (number,"
      " rows, columns), where rows and columns are not 1, 3 or 4, or (number,"
      " rows, columns, 1 or 3 channels); for a single image, save x[None]; for"
      " flat pixels, save x.reshape(-1, rows, columns, 3); for planes, as"
      " CIFAR-10 and ImageNet 64x64 are published, save"
      " x.reshape(-1, 3, rows, columns).transpose(0, 2, 3, 1)"
    )

  if is_gray:
    number, rows, columns = shape
    files.warn(
      f"{path}: read as {number:,} gray images of {rows:,} x {columns:,}; if"
      " the last axis is that of images, save np.moveaxis(x, -1, 0)"
    )
  return array
