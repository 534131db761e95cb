"""Data sets that tensorflow-datasets has prepared, read without TensorFlow.

They must be in the array_record format: any other needs TensorFlow or, like
parquet in tensorflow-datasets 4.9.10, silently loses records.
"""

import io
import os
import pathlib

import numpy as np

from sparse_transformer.data import files, registered
from sparse_transformer.data.batches import Lazy


def root(data_dir: str) -> pathlib.Path:
  """The folder of all data sets; the default of tensorflow-datasets if ""."""
  default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
  return files.from_config(data_dir or default)


def find(config: registered.ConfigDict, *names: str) -> pathlib.Path:
  """Finds the newest version of the first of these data sets in `config.path`.

  Raises:
    FileNotFoundError: if none of them is prepared.
  """
  import tensorflow_datasets as tfds

  folder = root(config.path)
  for name in names:
    # A version starts with a digit, an unfinished one with "incomplete.".
    paths = (folder / name).glob("[0-9]*/*.array_record-*")
    versions = {path.parent.name for path in paths}
    versions = set(filter(tfds.core.Version.is_valid, versions))
    if versions:
      return folder / name / max(versions, key=tfds.core.Version)
  remedy = "prepare it where TensorFlow is installed"
  if config.name in registered.BUILDERS:
    remedy = f"run `{registered.PREPARE} {config.name} --data_dir={folder}`"
  raise FileNotFoundError(
    f"{folder} has no {names[0]} in the array_record format; {remedy}, or set"
    " data.path to the folder that contains it"
  )


def paths(folder: pathlib.Path) -> list[pathlib.Path]:
  """The files of all records in a folder from `find`."""
  return sorted(folder.glob("*.array_record-*"))


def read(folder: pathlib.Path, split: str, feature: str) -> Lazy[np.ndarray]:
  """Opens one feature of all records of a split, as uint8 arrays, or integers.

  The folder is from `find`. Encoded images are decoded.

  Raises:
    ValueError: records lack the feature, or a file is damaged; now, or when the
      record is read.
  """
  import PIL.Image
  import tensorflow_datasets as tfds

  with files.blame(folder):
    builder = tfds.builder_from_directory(folder, file_format="array_record")
    if feature not in (features := builder.info.features):
      found = ", ".join(sorted(features))
      raise KeyError(f"the records have no {feature}, only {found}")
    decoders = {
      name: tfds.decode.SkipDecoding()  # theirs needs OpenCV
      for name, kind in features.items()
      if isinstance(kind, tfds.features.Image)
    }
    records = builder.as_data_source(split, decoders=decoders or None)
    number, ends = len(records), builder.info.splits[split].shard_lengths

  def item(i: int) -> np.ndarray:
    with files.blame(folder):
      value = records[i][feature]
      if feature not in decoders:
        return value
      return np.asarray(PIL.Image.open(io.BytesIO(value)).convert("RGB"))

  # The length comes from dataset_info.json: a file that is truncated or has too
  # few records is noticed now, not in the middle of a run.
  for end in np.cumsum(ends):
    item(end - 1)
  return Lazy(number, item)
