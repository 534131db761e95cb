"""enwik8: the first 100,000,000 bytes of an English Wikipedia dump."""

import hashlib
import pathlib
import zipfile

import numpy as np
import tensorflow_datasets as tfds

URL = "http://mattmahoney.net/dc/enwik8.zip"


class Enwik8(tfds.core.GeneratorBasedBuilder):
  """90M train, 5M validation and 5M test bytes, as records in file order."""

  VERSION = tfds.core.Version("1.0.0")
  SIZE = 100_000_000
  MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # MD5 of the unpacked file
  RECORD = 100_000  # bytes; a divisor of SIZE / 20
  url_infos = {
    URL: tfds.core.download.checksums.UrlInfo(
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
      ValueError: if the file is not enwik8.
    """
    if len(data) != cls.SIZE:
      raise ValueError(
        f"{path} has {len(data):,} bytes, but enwik8 has {cls.SIZE:,}; for"
        " other text, set data.name to bytes"
      )
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if md5 != cls.MD5:
      raise ValueError(
        f"{path} has md5 {md5}, but enwik8 has {cls.MD5}; get it from {URL}"
      )
    array = np.frombuffer(data, np.uint8)
    train, validation, test = np.split(
      array, [cls.SIZE * 18 // 20, cls.SIZE * 19 // 20]
    )
    return {"train": train, "validation": validation, "test": test}

  def _info(self):
    record = tfds.features.Tensor(
      shape=(self.RECORD,),
      dtype=np.uint8,
      # By default each byte is stored as an integer, which is slow to read.
      encoding=tfds.features.Encoding.BYTES,
    )
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict({"bytes": record}),
      disable_shuffling=True,  # the records of a text have an order
    )

  def _split_generators(self, dl_manager):
    archive = dl_manager.download(URL)
    with zipfile.ZipFile(archive) as members:
      data = members.read("enwik8")
    splits = self.splits(data, archive)
    return {k: self._generate_examples(v) for k, v in splits.items()}

  def _generate_examples(self, data):
    for i, record in enumerate(data.reshape(-1, self.RECORD)):
      yield i, {"bytes": record}
