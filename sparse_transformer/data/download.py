"""CIFAR-10, downloaded and written without TensorFlow."""

import http.client
import pathlib
import shutil
import sys
import tarfile
import urllib.request

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo

from sparse_transformer import atomic
from sparse_transformer.data import cifar10, files

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE = UrlInfo(
  size=170_052_171,
  checksum="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
  filename="cifar-10-binary.tar.gz",
)


# The class must not be called Cifar10. Its folder is named after the class, and
# it must not modify a copy that the builder `cifar10` of tensorflow-datasets
# has written to the same place.
class Cifar10Bytes(tfds.core.GeneratorBasedBuilder):
  """Builds CIFAR-10 without TensorFlow.

  Records are in the same order as with the builder of tensorflow-datasets.
  """

  VERSION = tfds.core.Version("1.1.0")  # version 1.0.0 had no labels
  IMAGES_PER_FILE = 10_000
  TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
  TEST_FILES = ("test_batch.bin",)
  url_infos = {URL: ARCHIVE}

  def _info(self):
    image = tfds.features.Tensor(
      shape=(32, 32, 3),
      dtype=np.uint8,
      # By default, each byte is stored as an integer, which is slow to read.
      encoding=tfds.features.Encoding.BYTES,
    )
    label = tfds.features.ClassLabel(num_classes=10)
    features = tfds.features.FeaturesDict({"image": image, "label": label})
    return self.dataset_info_from_configs(features=features)

  def _split_generators(self, dl_manager):
    archive = dl_manager.download(URL)
    return {
      "train": self._generate_examples(archive, self.TRAIN_FILES),
      "test": self._generate_examples(archive, self.TEST_FILES),
    }

  def _generate_examples(self, archive, names):
    with tarfile.open(archive, "r:gz") as tar:
      for member in tar:
        name = member.name.rpartition("/")[2]
        file = tar.extractfile(member)
        if file and name in names:
          # Records are sorted by the hash of these indices, which gives the
          # order of the builder of tensorflow-datasets.
          first = names.index(name) * self.IMAGES_PER_FILE
          yield from _records(file.read(), first)


def _records(data, first):
  """Yields (index, record) for the images of a file.

  In the file, an image is a label followed by three planes of levels.
  """
  # An image has 3,073 bytes: 1 label and 3 * 32 * 32 levels.
  rows = np.frombuffer(data, np.uint8).reshape(-1, 3073)
  for number, row in enumerate(rows, start=first):
    planes = row[1:].reshape(3, 32, 32)
    image = planes.transpose(1, 2, 0).copy()
    yield number, {"image": image, "label": int(row[0])}


def prepare(data_dir: str = "") -> tfds.core.DatasetBuilder:
  """Writes CIFAR-10 into the folder of all data sets, unless it exists there.

  Args:
    data_dir: the folder of all data sets; "" means the default of
      tensorflow-datasets.

  Returns:
    The builder. Its `data_path` is the folder of the records.

  Raises:
    ConnectionError: the archive cannot be downloaded.
    ValueError: the archive or an existing copy is damaged.
  """
  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  root = cifar10.root(data_dir)
  # The builder reads the results of an earlier call, which may be damaged.
  with files.blame(root / Cifar10Bytes.name):
    builder = Cifar10Bytes(data_dir=root, file_format="array_record")

  if not builder.data_path.exists():
    archive = root / "downloads" / "manual" / ARCHIVE.filename
    archive.parent.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
      _download(archive)
    with files.blame(archive):
      builder.download_and_prepare()
  return builder


def _download(path: pathlib.Path) -> None:
  """Downloads the archive to the path where tensorflow-datasets expects it."""
  print(f"downloads {ARCHIVE.size:,} bytes from {URL}", file=sys.stderr)
  try:
    # Give up if the connection sends nothing for 8 seconds.
    with urllib.request.urlopen(URL, timeout=8) as answer:
      with atomic.writing(path) as new, new.open("wb") as file:
        shutil.copyfileobj(answer, file)

        # Check the size, because a broken connection may look like the end of
        # the file.
        size = file.tell()
        if size != ARCHIVE.size:
          raise EOFError(f"only {size:,} bytes were received")
  except (OSError, EOFError, http.client.HTTPException) as error:
    raise ConnectionError(
      f"cannot download {URL} ({error}); download the file by other means to"
      f" {path}, and run this command again"
    ) from error
