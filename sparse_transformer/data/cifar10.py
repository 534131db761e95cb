"""CIFAR-10, as tensorflow-datasets prepares it, read without TensorFlow."""

import functools
import io
import os
import pathlib
import shlex

import numpy as np

from sparse_transformer.data import files
from sparse_transformer.data.batches import Lazy, chosen
from sparse_transformer.data.sources import (
  ConfigDict,
  Images,
  Sequences,
  register,
)

# The number of training images used for validation, as in Child et al. 2019.
HELD_OUT = 2_000
# The seed that chooses these images in
# github.com/openai/distribution_augmentation.
SEED = 11172018
CLASSES = tuple(
  "airplane automobile bird cat deer dog frog horse ship truck".split()
)
# The folders of the builder of tensorflow-datasets, and of our own builder.
NAMES = "cifar10", "cifar10_bytes"
# The luma weights of red, green and blue (ITU-R 601).
LUMA = 0.2989, 0.5870, 0.1140
PREPARE = "python -m sparse_transformer.data prepare cifar10"


@register("cifar10")
def cifar10(config: ConfigDict) -> Images:
  """CIFAR-10, prepared by tensorflow-datasets or by our own builder.

  The published test images are the test split. Of the 50,000 training images,
  2,000 are used for validation.
  """
  return _in_color(config, seed=0)


@register("cifar10_distaug")
def cifar10_distaug(config: ConfigDict) -> Images:
  """CIFAR-10 with the validation images of Jun et al. 2020."""
  return _in_color(config, seed=SEED)


def _in_color(config, seed):
  """Returns the images of CIFAR-10; `seed` selects the validation images."""
  return Images(
    shape=(32, 32, 3),
    vocab_size=256,
    load=_load(config, lambda record: record["image"], seed),
    files=lambda: _paths(config),
  )


@register("cifar10_gray")
def cifar10_gray(config: ConfigDict) -> Sequences:
  """Gray CIFAR-10 with labels, as in the task Image of Long Range Arena."""
  example = lambda record: (gray(record["image"]), int(record["label"]))
  return Sequences(
    length=1024,
    shape=(32, 32, 1),
    vocab_size=256,
    classes=CLASSES,
    load=_load(config, example),
    files=lambda: _paths(config),
    symbols="levels",
  )


def gray(image: np.ndarray) -> np.ndarray:
  """Returns the luma of an RGB image.

  Args:
    image: uint8 [rows, columns, 3].

  Returns:
    uint8 [rows * columns], row by row.
  """
  # The weights equal those of `tf.image.rgb_to_grayscale`.
  return np.rint(image.reshape(-1, 3) @ np.array(LUMA)).astype(np.uint8)


def root(data_dir: str) -> pathlib.Path:
  """Returns the folder of all data sets.

  If `data_dir` is "", this is the default folder of tensorflow-datasets.
  """
  default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
  return files.from_config(data_dir or default)


def _paths(config):
  """Returns the files of the CIFAR-10 copy in use, to compute a checksum."""
  return sorted(newest(config.path).glob("*.array_record-*"))


def _load(config, example, seed=0):
  """Returns a function that loads the examples of each split.

  Args:
    config: the `data` group of a config.
    example: converts a record, with "image" and "label", to an example.
    seed: the seed that chooses the images for validation. Seed 0 shuffles the
      indices of records. Any other seed shuffles the indices of images in the
      original files, as in the released code.
  """

  @functools.cache
  def load():
    from tensorflow_datasets.core.hashing import Hasher

    folder = newest(config.path)

    train = _read(folder, "train", example)
    test = _read(folder, "test", example)
    # The validation records are the first in a random order.
    order = np.random.RandomState(seed).permutation(len(train))

    # With seed 0, this is an order of records. With another seed, it is an
    # order of the image indices in CIFAR-10's files, as in the released code.
    # Builders sort records by the hash of the image index, so the index of an
    # image's record is the rank of its hash.
    if seed:
      hashes = list(map(Hasher("train").hash_key, range(len(train))))
      record_of_image = np.argsort(np.argsort(hashes))
      order = record_of_image[order]

    validation, rest = map(np.sort, np.split(order, [HELD_OUT]))
    return {
      "train": chosen(train, rest),
      "validation": chosen(train, validation),
      "test": test,
    }

  return load


def newest(data_dir: str) -> pathlib.Path:
  """Returns the folder of the newest version of CIFAR-10.

  If both exist, a copy prepared by tensorflow-datasets is preferred to a copy
  prepared by our builder.

  Args:
    data_dir: the folder of all data sets, or the folder of either copy.

  Raises:
    FileNotFoundError: the folder contains neither copy.
  """
  from tensorflow_datasets.core import Version

  folder = root(data_dir)
  # The folder of a complete version starts with a digit, and that of an
  # incomplete one with "incomplete.".
  places = [folder / name for name in NAMES]
  if folder.name in NAMES:
    places.append(folder)
  for place in places:
    # Only this format is read: others require TensorFlow or, like parquet, can
    # silently lose records.
    paths = place.glob("[0-9]*/*.array_record-*")
    names = {path.parent.name for path in paths}
    versions = list(filter(Version.is_valid, names))
    if versions:
      return place / max(versions, key=Version)

  # Quote the command for a shell, because names of folders may contain spaces.
  command = f"{PREPARE} {shlex.quote(f'--data_dir={folder}')}"
  raise FileNotFoundError(
    f"{folder} has no cifar10 in the array_record format; run `{command}`, or"
    " set data.path to the folder that contains it"
  )


def _read(folder, split, example):
  """Applies `example` to each record; raises ValueError if one is damaged."""
  import PIL.Image
  import tensorflow_datasets as tfds

  with files.blame(folder):
    builder = tfds.builder_from_directory(folder, file_format="array_record")
    # The builder of tensorflow-datasets stores PNG files, and ours stores
    # pixels. The decoder of tensorflow-datasets requires OpenCV, so decode PNG
    # files below.
    is_encoded = isinstance(builder.info.features["image"], tfds.features.Image)
    skip = tfds.decode.SkipDecoding()
    decoders = {"image": skip} if is_encoded else None
    records = builder.as_data_source(split, decoders=decoders)
    number = len(records)
    shard_lengths = builder.info.splits[split].shard_lengths

  def item(i):
    with files.blame(folder):
      record = records[i]
      if is_encoded:
        image = PIL.Image.open(io.BytesIO(record["image"]))
        record["image"] = np.asarray(image)
      shape = record["image"].shape
      if shape != (32, 32, 3):
        raise ValueError(
          f"it contains an image of shape {shape}; images must be (32, 32, 3)"
        )
      return example(record)

  # The number of records is that in dataset_info.json. Read the last record of
  # each file, so that a truncated file is noticed now, not in the middle of a
  # run.
  for end in np.cumsum(shard_lengths):
    item(end - 1)
  return Lazy(number, item)
