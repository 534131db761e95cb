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

# Training images for validation, as in the released code of Jun et al. 2020.
IMAGENET64_HELD_OUT = 50_000
# The channels of a picture, by its mode.
CHANNELS = {"L": 1, "RGB": 3}
PICTURES = ".png", ".jpg", ".jpeg"


@register("digits", reads_path=False)
def digits(config: ConfigDict) -> Images:
  """Gray 8x8 digits with 17 levels, bundled with scikit-learn.

  Of 1,797 digits, 200 each are for validation and for the test.
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
  """A fixed order of images, for those whose own order means nothing.

  NumPy guarantees the same one in all versions for RandomState, not for
  Generator (NEP 19): a held-out image must stay held out.
  """
  return np.random.RandomState(0).permutation(number)


@register("imagenet64")
def imagenet64(config: ConfigDict) -> Images:
  """ImageNet 64x64: train_64x64.npy and valid_64x64.npy in a folder.

  Both are uint8 [images, 64, 64, 3]. The published validation set is the test
  split; the last 50,000 training images are for validation.
  """
  folder = files.from_config(config.path)
  paths = [folder / "train_64x64.npy", folder / "valid_64x64.npy"]

  @functools.cache
  def load():
    files.check_path(config.path)
    # Mapped, since the training images take 16 GB.
    train, test = map(_open_array, paths)
    if {train.shape[1:], test.shape[1:]} != {(64, 64, 3)}:
      raise ValueError(
        f"{paths[0]} and {paths[1]} hold {train.shape} and {test.shape}, not"
        " images of 64 x 64 x 3; for others, set data.name to images"
      )
    return {
      "train": train[:-IMAGENET64_HELD_OUT],
      "validation": train[-IMAGENET64_HELD_OUT:],
      "test": test,
    }

  return Images((64, 64, 3), vocab_size=256, load=load, files=lambda: paths)


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
    groups = splits.listed(path, ".npy", by=config.splits)
    return _of_arrays(groups, config.fractions)

  groups = splits.listed(path, *PICTURES, by_file=False, by=config.splits)
  return _of_pictures(groups, config.fractions)


def _has_arrays(folder):
  """Whether the images of a folder are in .npy files.

  They are if an array is named after a split, or if there is no picture.
  """
  if any(splits.FILE.fullmatch(x.name) for x in folder.glob("*.npy")):
    return True
  has = lambda *x: any(files.has_suffix(y, *x) for y in files.below(folder))
  return has(".npy") and not has(*PICTURES)


def _distinct(groups):
  """The files of all splits, each once: two splits may have the same files."""
  return list(dict.fromkeys(itertools.chain.from_iterable(groups.values())))


def _of_arrays(groups, fractions):
  """The images of .npy files.

  Args:
    groups: the files of each split that names tell, see `splits.listed`.
    fractions: those of the three splits, for what names do not tell.

  Raises ValueError if a file does not hold images, or sizes differ.
  """
  arrays = {path: _open_array(path) for path in _distinct(groups)}

  shape, *different = {array.shape[1:] for array in arrays.values()}
  if different:
    names = ", ".join(map(str, arrays))
    raise ValueError(f"{names} have images of different sizes; give them one")

  images = {}
  for split, paths in groups.items():
    of_split = [arrays[path] for path in paths]
    # One array stays mapped.
    images[split] = of_split[0] if len(paths) == 1 else np.concatenate(of_split)

  # `frames` tells how to divide images, so `parts` is made after the source.
  source = Images(
    shape=shape,
    vocab_size=256,
    load=lambda: parts,
    files=lambda: list(arrays),
  )
  parts = _divide(images, fractions, source.frames)
  return source


def _of_pictures(groups, fractions):
  """The images of PNG and JPEG files.

  Only the first is opened at once; `load` checks the others, which may take
  minutes.

  Args:
    groups: the files of each split that folders tell, see `splits.listed`.
    fractions: those of the three splits, for what folders do not tell.
  """
  paths = _distinct(groups)
  shape = _geometry(paths[0])
  parts = _divide(groups, fractions)
  # Gray pictures among colored ones are converted.
  mode = "L" if shape[2] == 1 else "RGB"

  @functools.cache
  def load():
    for path in paths:
      _check_geometry(path, paths[0], shape)
    # Here, each picture has been opened once, and Pillow's doubts told.
    warnings.filterwarnings("ignore", module="PIL")
    return {split: of_files(x) for split, x in parts.items()}

  def of_files(files):
    return Lazy(len(files), lambda i: _pixels(files[i], mode))

  return Images(shape, vocab_size=256, load=load, files=lambda: paths)


def _divide(groups, fractions, frames=1):
  """Cuts the splits that names do not tell out of images in a fixed order.

  Images are shuffled, since files may be sorted by class. Clips stay in order
  of time.
  """
  if "validation" in groups:
    return groups

  whole = next(iter(groups))
  images = groups[whole]
  order = _order(len(images))
  if frames > 1:
    # Sorted again, the permutation is 0, 1, ...: the order of time.
    order.sort()
    files.warn(
      f"clips of {frames} frames are split in their order, as of time; for"
      " other splits, name files train.npy, val.npy and test.npy"
    )

  # Numbers are divided in place of images, which need not be in memory.
  parts = splits.divide({**groups, whole: order}, fractions, "images")
  for split, numbers in parts.items():
    if split == whole or split not in groups:
      parts[split] = chosen(images, numbers)
  return parts


@contextlib.contextmanager
def _opened(path):
  """A picture as stored, and the EXIF orientation that its header tells."""
  import PIL.ExifTags
  import PIL.Image

  atomic.size(path)  # a pipe would never end
  with files.blame(path), PIL.Image.open(path) as image:
    # In other files, the tag may be behind the pixels, which would be decoded.
    is_photo = image.format in ("JPEG", "MPO") or "exif" in image.info
    tags = image.getexif() if is_photo else {}
    yield image, tags.get(PIL.ExifTags.Base.Orientation, 1)


def _pixels(path, mode):
  """The pixels of a picture, turned as its camera was held."""
  import PIL.ImageOps

  with _opened(path) as (image, orientation):
    if orientation != 1:
      image = PIL.ImageOps.exif_transpose(image)
    return np.asarray(image.convert(mode))


def _geometry(path):
  """(rows, columns, channels) of a picture, turned as its camera was held."""
  with warnings.catch_warnings(record=True) as doubts:
    warnings.simplefilter("always")
    with _opened(path) as (image, orientation):
      mode = _mode(image)
      columns, rows = image.size
  for doubt in doubts:
    files.warn(f"{path}: {doubt.message}")

  if mode not in CHANNELS:
    raise ValueError(
      f"{path} has the color mode {mode}; convert it to RGB or gray of 8 bits"
    )
  if orientation in (5, 6, 7, 8):  # on its side
    rows, columns = columns, rows
  return rows, columns, CHANNELS[mode]


def _mode(image):
  """The mode of a picture, and what Pillow would drop when it converts it."""
  mode = image.mode
  if "transparency" in image.info:
    mode += "A"
  # Pillow opens RGB of 16 bits as 8, and only this argument of
  # its decoder tells.
  tiles = [tile[3] for tile in getattr(image, "tile", ())]
  if mode == "RGB" and ";16" in str(tiles):
    mode += ";16"
  number = getattr(image, "n_frames", 1)
  if number > 1 and image.format != "MPO":  # a phone's, which has a small copy
    mode += f", {number} times"
  return mode


def _check_geometry(path, first, shape):
  """Raises ValueError if a picture does not have the shape of the first one."""
  size = _geometry(path)
  # Gray pictures may be among others.
  if size[:2] != shape[:2] or size[2] > shape[2]:
    raise ValueError(
      f"{path} has (rows, columns, channels) = {size}, but {first} has"
      f" {shape}; all images must have one size: convert or remove it"
    )


def _open_array(path):
  """Maps a .npy file of images, uint8 [number, rows, columns, channels]."""
  array = files.map_array(path)
  shape = array.shape
  # Channels come last, or are planes.
  is_gray = array.ndim == 3 and not {1, 3, 4} & set(shape[1:])
  if is_gray:
    array = array[..., np.newaxis]
  are_images = array.ndim == 4 and array.shape[3] in (1, 3) and array.size
  if array.dtype != np.uint8 or not are_images:
    raise ValueError(
      f"{path} holds {array.dtype} {shape}; images must be uint8 (number, rows,"
      " columns), where rows and columns are not 1, 3 or 4, or (number, rows,"
      " columns, 1 or 3 channels): of one, save x[None]; of flat pixels,"
      " x.reshape(-1, rows, columns, 3); of planes, as CIFAR-10 and ImageNet"
      " 64x64 are published,"
      " x.reshape(-1, 3, rows, columns).transpose(0, 2, 3, 1)"
    )

  if is_gray:
    number, rows, columns = shape
    files.warn(
      f"{path}: read as {number:,} gray images of {rows:,} x {columns:,}; if"
      " its last axis counts them, save np.moveaxis(x, -1, 0)"
    )
  return array
