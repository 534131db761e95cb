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

# The number of training images for validation, as in Child et al. 2019.
HELD_OUT = 2_000
# The seed that selects them in github.com/openai/distribution_augmentation.
SEED = 11172018
CLASSES = tuple(
  "airplane automobile bird cat deer dog frog horse ship truck".split()
)
# The folders of the stock builder, and of ours.
NAMES = "cifar10", "cifar10_bytes"
# The weights of red, green and blue: ITU-R 601.
LUMA = 0.2989, 0.5870, 0.1140
PREPARE = "python -m sparse_transformer.data prepare cifar10"


@register("cifar10")
def cifar10(config: ConfigDict) -> Images:
  """CIFAR-10, as the stock tensorflow-datasets builder or ours prepares it.

  The published test images are the test split; 2,000 of the 50,000 training
  images are for validation.
  """
  return _in_color(config, seed=0)


@register("cifar10_distaug")
def cifar10_distaug(config: ConfigDict) -> Images:
  """CIFAR-10 with the validation images of Jun et al. 2020."""
  return _in_color(config, seed=SEED)


def _in_color(config, seed):
  """Images of CIFAR-10, of which `seed` chooses those for validation."""
  return Images(
    shape=(32, 32, 3),
    vocab_size=256,
    load=_load(config, lambda record: record["image"], seed),
    files=lambda: _paths(config),
  )


@register("cifar10_gray")
def cifar10_gray(config: ConfigDict) -> Sequences:
  """CIFAR-10 in gray, by rows, with its labels: Image of Long Range Arena."""
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
  """The luma of an RGB image.

  Args:
    image: uint8 [rows, columns, 3].

  Returns:
    uint8 [rows * columns], row by row.
  """
  # The weights are those of `tf.image.rgb_to_grayscale`.
  return np.rint(image.reshape(-1, 3) @ np.array(LUMA)).astype(np.uint8)


def root(data_dir: str) -> pathlib.Path:
  """The folder of all data sets; the default of tensorflow-datasets if ""."""
  default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
  return files.from_config(data_dir or default)


def _paths(config):
  """The files of the copy that is read, for its checksum."""
  return sorted(newest(config.path).glob("*.array_record-*"))


def _load(config, example, seed=0):
  """A function that returns `example` of the records of each split.

  Args:
    config: the `data` group of a config.
    example: maps a record, with "image" and "label", to what is kept of it.
    seed: of the images for validation; unless 0, numbers are those of images in
      the original files, as in the released code.
  """

  @functools.cache
  def load():
    from tensorflow_datasets.core.hashing import Hasher

    folder = newest(config.path)

    train = _read(folder, "train", example)
    test = _read(folder, "test", example)
    # The validation records are the first of a random order.
    order = np.random.RandomState(seed).permutation(len(train))

    # With seed 0 that is an order of records. The authors of another seed draw
    # an order of images, as CIFAR-10's files number them. Builders sort records
    # by the hash of this number, so the rank of an image's hash is its record.
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
  """The folder of the newest version of the stock copy, or else of ours.

  Args:
    data_dir: the folder of all data sets, or of either copy.

  Raises:
    FileNotFoundError: the folder has neither copy.
  """
  from tensorflow_datasets.core import Version

  folder = root(data_dir)
  # A version starts with a digit, an unfinished one with "incomplete.".
  places = [folder / name for name in NAMES]
  if folder.name in NAMES:
    places.append(folder)
  for place in places:
    # Other formats need TensorFlow or, like parquet, silently lose records.
    paths = place.glob("[0-9]*/*.array_record-*")
    names = {path.parent.name for path in paths}
    versions = list(filter(Version.is_valid, names))
    if versions:
      return place / max(versions, key=Version)

  # The command is quoted for a shell, since folders may have spaces.
  command = f"{PREPARE} {shlex.quote(f'--data_dir={folder}')}"
  raise FileNotFoundError(
    f"{folder} has no cifar10 in the array_record format; run `{command}`, or"
    " set data.path to the folder that contains it"
  )


def _read(folder, split, example):
  """What `example` makes of each record; ValueError if a file is damaged."""
  import PIL.Image
  import tensorflow_datasets as tfds

  with files.blame(folder):
    builder = tfds.builder_from_directory(folder, file_format="array_record")
    # The stock builder stores PNG files, and ours pixels.
    is_encoded = isinstance(builder.info.features["image"], tfds.features.Image)
    skip = tfds.decode.SkipDecoding()  # theirs needs OpenCV
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
        raise ValueError(f"it has an image of {shape}, not RGB of 32 x 32")
      return example(record)

  # The length comes from dataset_info.json: a file that is truncated or has too
  # few records is noticed now, not in the middle of a run.
  for end in np.cumsum(shard_lengths):
    item(end - 1)
  return Lazy(number, item)
