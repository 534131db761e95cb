"""Data sets that tensorflow-datasets has prepared, without TensorFlow.

Always in the array_record format: any other needs TensorFlow or, as parquet in
tensorflow-datasets 4.9.10, loses records without a word.
"""

import contextlib
import http.client
import importlib
import io
import os
import pathlib
import queue
import sys
import threading
import urllib.request

import numpy as np

from sparse_transformer.data import files, lazy

# What the command prepares: modules of `datasets`, each with its builder.
BUILDERS = {"cifar10": "Cifar10Bytes", "enwik8": "Enwik8"}
PATIENCE = 8  # seconds for the host of a download to answer
BLOCK = 1024  # records read at once
COMMAND = "python -m sparse_transformer.data prepare"


def _root(data_dir):
  """The folder of tensorflow-datasets; its default one for ""."""
  default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
  return pathlib.Path(data_dir or default).expanduser()


def find(config, *names):
  """The folder of the first of `names` that is prepared, newest version."""
  import tensorflow_datasets as tfds

  root = _root(config.path)
  for name in names:
    # A version starts with a digit, an unfinished one with "incomplete.".
    files = (root / name).glob("[0-9]*/*.array_record-*")
    versions = {file.parent.name for file in files}
    if versions:
      return root / name / max(versions, key=tfds.core.Version)
  if config.name in BUILDERS:
    remedy = f"run `{COMMAND} {config.name} --data_dir={root}`"
  else:
    remedy = "prepare it where TensorFlow is installed"
  raise FileNotFoundError(
    f"{root} has no {names[0]} in the array_record format; {remedy}, or set"
    " data.path to where it is"
  )


def verified_files(folder):
  """The files that hold the records of all splits, each read through.

  They hold checksums: damage is noticed now, not in the middle of a run.
  """
  from array_record.python import array_record_module

  paths = sorted(folder.glob("*.array_record-*"))
  for path in paths:
    try:
      with contextlib.closing(
        array_record_module.ArrayRecordReader(str(path))
      ) as reader:
        num = reader.num_records()
        for first in range(0, num, BLOCK):
          reader.read(first, min(first + BLOCK, num))
    except (RuntimeError, IndexError, OSError) as error:
      raise files.damaged(path, error) from error
  return paths


def records(folder, split, key):
  """Feature `key` of all records of a split as uint8 arrays, read lazily."""
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder_from_directory(folder, file_format="array_record")
  except Exception as error:  # of many types, each for another broken file
    raise files.damaged(folder, error) from error
  decoders = None
  if isinstance(builder.info.features[key], tfds.features.Image):
    decoders = {key: tfds.decode.SkipDecoding()}  # its own needs OpenCV
  records = builder.as_data_source(split, decoders=decoders)

  def item(i):
    try:
      value = records[i][key]
      return _decode(value) if decoders else value
    except (RuntimeError, IndexError, OSError) as error:
      raise files.damaged(folder, error) from error

  # The length comes from dataset_info.json. The last record of each file is
  # found through an index at its end: a file that is cut short or has too few
  # records is noticed now, not in the middle of a run.
  for end in np.cumsum(builder.info.splits[split].shard_lengths):
    item(end - 1)
  return lazy.Lazy(len(records), item)


def _decode(image):
  import PIL.Image

  return np.asarray(PIL.Image.open(io.BytesIO(image)).convert("RGB"))


def prepare(name, data_dir=""):
  """Download and write a data set below `data_dir`; its builder."""
  if name not in BUILDERS:
    raise ValueError(f"cannot prepare {name!r}; known: {', '.join(BUILDERS)}")
  import tensorflow_datasets as tfds

  module = importlib.import_module(f"sparse_transformer.data.builders.{name}")
  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  root = _root(data_dir)
  make = getattr(module, BUILDERS[name])
  builder = make(data_dir=root, file_format="array_record")
  if not builder.data_path.exists():
    _check_archive(builder, root / "downloads")
  download = tfds.core.download
  try:
    builder.download_and_prepare()
  except download.download_manager.NonMatchingChecksumError as error:
    raise files.damaged(
      f"the archive in {root / 'downloads'}", error
    ) from error
  except download.DownloadError as error:
    raise ConnectionError(str(error)) from error
  return builder


def _check_archive(builder, downloads):
  """Raise ConnectionError unless the archive is here or its host answers.

  Without a network, tensorflow-datasets would try for more than 3 minutes.
  """
  from tensorflow_datasets.core.download import resource

  ((url, info),) = builder.url_infos.items()
  cached = resource.get_dl_fname(url, info.checksum) + ".INFO"
  by_hand = downloads / "manual" / info.filename
  places = (by_hand, downloads / cached, downloads / builder.name / cached)
  if any(place.exists() for place in places):
    return
  answer = queue.SimpleQueue()

  def probe():
    try:
      urllib.request.urlopen(url, timeout=PATIENCE).close()
      answer.put(None)
    except (OSError, http.client.HTTPException) as error:
      answer.put(error)

  # In a thread, because resolving a name has no timeout of its own.
  threading.Thread(target=probe, daemon=True).start()
  try:
    error = answer.get(timeout=PATIENCE)
  except queue.Empty:
    error = f"no answer in {PATIENCE} seconds"
  if error:
    raise ConnectionError(
      f"cannot download {url} ({error}); put the file at {by_hand} and run"
      " this again"
    )
