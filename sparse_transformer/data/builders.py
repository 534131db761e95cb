"""tensorflow-datasets builders that download and write without TensorFlow.

Each is named where its source is registered, and lists its archive in
`url_infos`.
"""

import hashlib
import pathlib
import tarfile
import zipfile

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo


def _describe(builder, name, shape, others, **settings):
  """The info of records of one array of bytes, and other features."""
  array = tfds.features.Tensor(
    shape=shape,
    dtype=np.uint8,
    # By default each byte is stored as an integer, which is slow to read.
    encoding=tfds.features.Encoding.BYTES,
  )
  return builder.dataset_info_from_configs(
    features=tfds.features.FeaturesDict({name: array} | others),
    **settings,
  )


class Enwik8(tfds.core.GeneratorBasedBuilder):
  """The first 100,000,000 bytes of an English Wikipedia dump.

  90M train, 5M validation and 5M test bytes, as records in file order.
  """

  VERSION = tfds.core.Version("1.0.0")
  SIZE = 100_000_000
  MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # MD5 of the unpacked file
  RECORD = 100_000  # bytes; a divisor of SIZE / 20
  url_infos = {
    "http://mattmahoney.net/dc/enwik8.zip": UrlInfo(
      size=36_445_475,
      checksum="547994d9980ebed1288380d652999f38"
      "a14fe291a6247c157c3d33d4932534bc",
      filename="enwik8.zip",
    )
  }

  @classmethod
  def splits(cls, data: bytes, path: pathlib.Path) -> dict[str, np.ndarray]:
    """Splits the contents of the file at `path`.

    Raises:
      ValueError: the file is not enwik8.
    """
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if md5 != cls.MD5:
      raise ValueError(
        f"{path} has {len(data):,} bytes with md5 {md5}, but enwik8 has"
        f" {cls.SIZE:,} with {cls.MD5}; for other text, set data.name to bytes"
      )
    array = np.frombuffer(data, np.uint8)
    parts = np.split(array, [cls.SIZE * 18 // 20, cls.SIZE * 19 // 20])
    return dict(zip(("train", "validation", "test"), parts, strict=True))

  def _info(self):
    # The records of a text have an order.
    return _describe(self, "bytes", (self.RECORD,), {}, disable_shuffling=True)

  def _split_generators(self, dl_manager):
    archive = dl_manager.download(*self.url_infos)
    with zipfile.ZipFile(archive) as members:
      data = members.read("enwik8")
    splits = self.splits(data, archive)
    return {k: self._generate_examples(v) for k, v in splits.items()}

  def _generate_examples(self, data):
    for i, record in enumerate(data.reshape(-1, self.RECORD)):
      yield i, {"bytes": record}


# Not called Cifar10: the folder is named after the class, and a copy that the
# stock `cifar10` builder has made in the same place must not be changed.
class Cifar10Bytes(tfds.core.GeneratorBasedBuilder):
  """CIFAR-10 (Krizhevsky 2009): 50,000 train and 10,000 test images, labelled.

  In the order of the stock builder, which needs TensorFlow to encode PNG.
  """

  VERSION = tfds.core.Version("1.1.0")  # 1.0.0 had no labels
  IMAGES_PER_FILE = 10_000
  TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
  TEST_FILES = ("test_batch.bin",)
  url_infos = {
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz": UrlInfo(
      size=170_052_171,
      checksum="c4a38c50a1bc5f3a1c5537f2155ab9d6"
      "8f9f25eb1ed8d9ddda3db29a59bca1dd",
      filename="cifar-10-binary.tar.gz",
    )
  }

  def _info(self):
    label = tfds.features.ClassLabel(num_classes=10)
    return _describe(self, "image", (32, 32, 3), {"label": label})

  def _split_generators(self, dl_manager):
    archive = dl_manager.download(*self.url_infos)
    parts = {"train": self.TRAIN_FILES, "test": self.TEST_FILES}
    return {k: self._generate_examples(archive, v) for k, v in parts.items()}

  def _generate_examples(self, archive, names):
    with tarfile.open(archive, "r:gz") as tar:
      for member in tar:
        name = member.name.rpartition("/")[2]
        if name in names and (file := tar.extractfile(member)):
          data = np.frombuffer(file.read(), np.uint8)
          first = names.index(name) * self.IMAGES_PER_FILE
          for i, record in enumerate(data.reshape(-1, 3073), start=first):
            image = record[1:].reshape(3, 32, 32).transpose(1, 2, 0).copy()
            yield i, {"image": image, "label": int(record[0])}
