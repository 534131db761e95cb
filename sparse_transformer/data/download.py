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


# Not called Cifar10: the folder is named after the class, and a copy that the
# stock `cifar10` builder has made in the same place must not be changed.
class Cifar10Bytes(tfds.core.GeneratorBasedBuilder):
  """CIFAR-10 in the stock builder's order, without its need of TensorFlow."""

  VERSION = tfds.core.Version("1.1.0")  # 1.0.0 had no labels
  IMAGES_PER_FILE = 10_000
  TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
  TEST_FILES = ("test_batch.bin",)
  url_infos = {URL: ARCHIVE}

  def _info(self):
    image = tfds.features.Tensor(
      shape=(32, 32, 3),
      dtype=np.uint8,
      # By default each byte is stored as an integer, which is slow to read.
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
          # Records are hashed by these numbers into the stock builder's order.
          first = names.index(name) * self.IMAGES_PER_FILE
          yield from _records(file.read(), first)


def _records(data, first):
  """(number, record) for the images of a file: a label, and three planes."""
  # 3,073 = 1 label + 3 * 32 * 32 levels.
  rows = np.frombuffer(data, np.uint8).reshape(-1, 3073)
  for number, row in enumerate(rows, start=first):
    planes = row[1:].reshape(3, 32, 32)
    image = planes.transpose(1, 2, 0).copy()
    yield number, {"image": image, "label": int(row[0])}


def prepare(data_dir: str = "") -> tfds.core.DatasetBuilder:
  """Writes CIFAR-10 into the folder of all data sets, unless it is there.

  Args:
    data_dir: that folder; "" is the default of tensorflow-datasets.

  Returns:
    The builder, whose `data_path` has the records.

  Raises:
    ConnectionError: the archive cannot be downloaded.
    ValueError: it, or what is there, is damaged.
  """
  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  root = cifar10.root(data_dir)
  # The builder reads what an earlier call has left, which may be damaged.
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
  """Puts the archive where tensorflow-datasets looks for it."""
  print(f"downloads {ARCHIVE.size:,} bytes from {URL}", file=sys.stderr)
  try:
    # A connection that says nothing for 8 seconds is given up.
    with urllib.request.urlopen(URL, timeout=8) as answer:
      with atomic.writing(path) as new, new.open("wb") as file:
        shutil.copyfileobj(answer, file)

        # A connection that breaks may look like the end of the file.
        size = file.tell()
        if size != ARCHIVE.size:
          raise EOFError(f"the answer has {size:,} bytes")
  except (OSError, EOFError, http.client.HTTPException) as error:
    raise ConnectionError(
      f"cannot download {URL} ({error}); put the file at {path} and run this"
      " command again"
    ) from error
