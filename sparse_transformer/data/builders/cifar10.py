"""CIFAR-10 (Krizhevsky 2009), prepared without TensorFlow."""

import tarfile

import numpy as np
import tensorflow_datasets as tfds

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


# Not called Cifar10: the folder is named after the class, and a copy that the
# stock `cifar10` builder has made in the same place must not be changed.
class Cifar10Bytes(tfds.core.GeneratorBasedBuilder):
  """Images [32, 32, 3] as plain bytes: 50,000 train and 10,000 test.

  The stock builder needs TensorFlow to unpack the archive and to encode the
  images as PNG. The keys are the same as its own, and so the images have the
  same order.
  """

  VERSION = tfds.core.Version("1.0.0")
  IMAGES_PER_FILE = 10_000
  TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
  TEST_FILES = ("test_batch.bin",)
  url_infos = {
    URL: tfds.core.download.checksums.UrlInfo(
      size=170_052_171,
      checksum="c4a38c50a1bc5f3a1c5537f2155ab9d6"
      "8f9f25eb1ed8d9ddda3db29a59bca1dd",
      filename="cifar-10-binary.tar.gz",
    )
  }

  def _info(self):
    image = tfds.features.Tensor(
      shape=(32, 32, 3),
      dtype=np.uint8,
      # By default each byte is stored as an integer, which is slow to read.
      encoding=tfds.features.Encoding.BYTES,
    )
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict({"image": image})
    )

  def _split_generators(self, dl_manager):
    archive = dl_manager.download(URL)
    return {
      "train": self._generate_examples(archive, self.TRAIN_FILES),
      "test": self._generate_examples(archive, self.TEST_FILES),
    }

  def _generate_examples(self, archive, names):
    missing = set(names)
    with tarfile.open(archive, "r:gz") as tar:
      for member in tar:
        name = member.name.rpartition("/")[2]
        if name in missing and (file := tar.extractfile(member)):
          missing.remove(name)
          first = names.index(name) * self.IMAGES_PER_FILE
          for i, image in enumerate(self._images(name, file.read())):
            yield first + i, {"image": image}
    if missing:
      raise ValueError(f"{archive} is not CIFAR-10: has no {sorted(missing)}")

  def _images(self, name, data):
    """Images [10000, 32, 32, 3] of a file of (label, 3 x 32 x 32) records."""
    expected = self.IMAGES_PER_FILE * 3073
    if len(data) != expected:
      raise ValueError(f"{name} has {len(data)} bytes, expected {expected}")
    records = np.frombuffer(data, np.uint8).reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy()
