"""CIFAR-10, as tensorflow-datasets prepares it, read without TensorFlow."""

import functools
import io
import os
import pathlib
import shlex

import numpy as np

from sparse_transformer.data import files
from sparse_transformer.data.batches import Lazy
from sparse_transformer.data.sources import (
  ConfigDict,
  Images,
  Sequences,
  register,
)

HELD_OUT = 2_000  # training images for validation: as in Child et al. 2019
SEED = 11172018  # selects them in github.com/openai/distribution_augmentation
CLASSES = (
  *("airplane", "automobile", "bird", "cat", "deer"),
  *("dog", "frog", "horse", "ship", "truck"),
)
NAMES = "cifar10", "cifar10_bytes"  # the stock builder's folder, and ours
LUMA = 0.2989, 0.5870, 0.1140  # ITU-R 601, of red, green and blue
PREPARE = "python -m sparse_transformer.data prepare cifar10"


@register("cifar10")
def cifar10(config: ConfigDict) -> Images:
  """CIFAR-10, as the stock tensorflow-datasets builder or ours prepares it."""
  return Images((32, 32, 3), 256, *_opened(config, lambda x: x["image"]))


@register("cifar10_distaug")
def cifar10_distaug(config: ConfigDict) -> Images:
  """CIFAR-10 with the validation images of Jun et al. 2020."""
  return Images((32, 32, 3), 256, *_opened(config, lambda x: x["image"], SEED))


@register("cifar10_gray")
def cifar10_gray(config: ConfigDict) -> Sequences:
  """CIFAR-10 in gray, by rows, with its labels: Image of Long Range Arena."""
  load, paths = _opened(config, lambda x: (gray(x["image"]), int(x["label"])))
  return Sequences(
    1024, (32, 32, 1), 256, CLASSES, load, paths, "levels", "bits/dim"
  )


def gray(image: np.ndarray) -> np.ndarray:
  """The luma of the pixels of an RGB image, uint8 [pixels]."""
  return np.rint(image.reshape(-1, 3) @ np.array(LUMA)).astype(np.uint8)


def root(data_dir: str) -> pathlib.Path:
  """The folder of all data sets; the default of tensorflow-datasets if ""."""
  default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
  return files.from_config(data_dir or default)


def _opened(config, example, seed=0):
  """Functions that return the examples of the splits, and their files."""

  @functools.cache
  def load():
    from tensorflow_datasets.core.hashing import Hasher

    folder = newest(config.path)
    train, test = (_read(folder, split, example) for split in ("train", "test"))
    order = np.random.RandomState(seed).permutation(len(train))
    if seed:  # builders order records by the hash of the image's number
      hashes = [*map(Hasher("train").hash_key, range(len(train)))]
      order = np.argsort(np.argsort(hashes))[order]
    part = lambda chosen: Lazy(len(chosen), lambda i: train[chosen[i]])
    validation, rest = map(np.sort, np.split(order, [HELD_OUT]))
    return dict(train=part(rest), validation=part(validation), test=test)

  return load, lambda: sorted(newest(config.path).glob("*.array_record-*"))


def newest(data_dir: str) -> pathlib.Path:
  """The folder of the newest version of the stock copy, or else of ours.

  `data_dir` is the folder of all data sets, or of either copy, or a version.
  """
  from tensorflow_datasets.core import Version

  folder = root(data_dir)
  places = [folder / name for name in NAMES]
  places += [x for x in (folder, folder.parent) if x.name in NAMES]
  for place in places:
    # A version starts with a digit, an unfinished one with "incomplete.".
    # Other formats need TensorFlow or, like parquet, silently lose records.
    version = folder.name if place == folder.parent else "[0-9]*"
    paths = place.glob(f"{version}/*.array_record-*")
    versions = {path.parent.name for path in paths}
    if versions := {*filter(Version.is_valid, versions)}:
      return place / max(versions, key=Version)
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
    is_encoded = isinstance(builder.info.features["image"], tfds.features.Image)
    skip = tfds.decode.SkipDecoding()  # theirs needs OpenCV
    decoders = {"image": skip} if is_encoded else None
    records = builder.as_data_source(split, decoders=decoders)
    number, ends = len(records), builder.info.splits[split].shard_lengths

  def item(i):
    with files.blame(folder):
      record = records[i]
      if is_encoded:
        image = PIL.Image.open(io.BytesIO(record["image"]))
        record["image"] = np.asarray(image)
      if (shape := record["image"].shape) != (32, 32, 3):
        raise ValueError(f"it has an image of {shape}, not RGB of 32 x 32")
      return example(record)

  # The length comes from dataset_info.json: a file that is truncated or has too
  # few records is noticed now, not in the middle of a run.
  for end in np.cumsum(ends):
    item(end - 1)
  return Lazy(number, item)
