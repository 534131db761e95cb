"""Tests of cifar10.py and download.py: no network, few images."""

import io
import os
import shutil
import sys

import numpy as np
import PIL.Image
import pytest
from helpers import runs, small_data
from helpers.errors import refused
from helpers.small_data import SHARED, source_of
from sklearn.model_selection import train_test_split

from sparse_transformer import data
from sparse_transformer.data import cifar10, download

PIXELS = np.random.RandomState(0).randint(0, 256, (13, 32, 32, 3), np.uint8)


def rows(root, split, name="cifar10"):
  return list(map(bytes, source_of(name, root).examples(split)))


def prepare(root, pixels=PIXELS):
  """9 training and 4 test images, as the stock builder writes them."""
  import tensorflow_datasets as tfds

  def examples(numbers):
    for i in numbers:
      file = io.BytesIO()
      PIL.Image.fromarray(pixels[i]).save(file, "PNG")
      file.seek(0)
      yield i, {"id": f"{i}", "image": file, "label": i % 10}

  builder = tfds.builder(
    "cifar10",
    data_dir=root,
    file_format="array_record",
  )
  builder._split_generators = lambda dl_manager: {
    "train": examples(range(9)),
    "test": examples(range(9, 13)),
  }
  builder.download_and_prepare()
  return root


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  return prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def root(prepared, tmp_path, monkeypatch):
  """A copy of them, for tests to damage."""
  monkeypatch.setattr(cifar10, "HELD_OUT", 3)
  return shutil.copytree(prepared, tmp_path / "root")


@pytest.fixture
def folder(root):
  (folder,) = (root / "cifar10").iterdir()
  return folder


def test_stock_copy_is_read_in_color_and_in_gray(root):
  number_of = {bytes(image): i for i, image in enumerate(PIXELS)}
  numbers = {}
  for split in data.SPLITS:
    numbers[split] = [number_of[row] for row in rows(root, split)]

  assert len(numbers["train"]) == 6
  assert sorted(numbers["train"] + numbers["validation"]) == [*range(9)]
  assert sorted(numbers["test"]) == [*range(9, 13)]

  source = source_of("cifar10_gray", root)
  assert source.classes == cifar10.CLASSES
  for split, of_split in numbers.items():
    examples = source.examples(split)
    for number, row in zip(of_split, examples, strict=True):
      gray = cifar10.gray(PIXELS[number])
      np.testing.assert_array_equal(row, [*gray, number % 10, 1024])


def test_split_of_released_models_is_by_number(root):
  split = train_test_split(
    range(9),
    test_size=3,
    random_state=11172018,
  )
  for name, numbers in zip(("train", "validation"), split, strict=True):
    found = rows(root, name, "cifar10_distaug")
    assert sorted(found) == sorted(bytes(PIXELS[i]) for i in numbers)

  assert rows(root, "test", "cifar10_distaug") == rows(root, "test")


def test_gray_is_the_luma_of_itu_r_601():
  image = np.zeros((1, 5, 3), np.uint8)
  image[0, :3] = 255 * np.eye(3, dtype=np.uint8)
  image[0, 3:] = [[255] * 3, [10, 20, 30]]
  # 76.22, 149.69, 29.07, 254.97, 18.15
  assert cifar10.gray(image).tolist() == [76, 150, 29, 255, 18]


@pytest.mark.parametrize(
  "pixels", [PIXELS[:, :16, :16], PIXELS[..., 0], PIXELS[..., [0, 1, 2, 2]]]
)
def test_images_of_another_kind_are_refused(tmp_path, pixels):
  prepare(tmp_path, pixels)
  for name in "cifar10", "cifar10_distaug", "cifar10_gray":
    with refused(r"an image of shape .*; images must be"):
      source_of(name, tmp_path).examples("train")


def test_newest_finished_version_is_read(root, folder):
  newest = folder.with_name("4.0.10")
  for name in "4.0.10", "4.0.9", "incomplete.X_5.0.0", "5.x":
    shutil.copytree(folder, folder.with_name(name))
  for place in root, newest.parent:
    assert cifar10.newest(str(place)) == newest


@pytest.mark.parametrize("size", [0, 100, 3_000, -10])
def test_truncated_file_is_found_when_it_is_opened(root, folder, size):
  (path,) = folder.glob("*test.array_record-*")
  os.truncate(path, size % path.stat().st_size)
  with refused(f"{folder} is damaged or truncated"):
    source_of("cifar10", root).examples("test")


def test_damaged_record_is_found_when_read(root, folder):
  (path,) = folder.glob("*test.array_record-*")
  content = bytearray(path.read_bytes())
  digest = source_of("cifar10", root).digest()

  assert digest == source_of("cifar10", root).digest()
  content[2_000] ^= 1  # of the image of a record
  path.write_bytes(content)
  source = source_of("cifar10", root)

  assert source.digest() != digest
  examples = source.examples("test")
  with refused(f"{folder} is damaged or truncated"):
    list(examples)


@pytest.mark.parametrize("content", [None, "{", '{"splits": 5}', '"99"'])
@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
def test_description_that_is_broken_or_does_not_fit_is_an_error(
  root, folder, name, content
):
  path = folder / name
  if content is None:
    path.unlink()
  elif content.startswith("{"):
    path.write_text(content)
  else:
    path = folder / "dataset_info.json"
    path.write_text(path.read_text().replace('"9"', content))

  with refused(f"{folder} is damaged or truncated"):
    source_of("cifar10", root).examples("train")


# Our own copy.


@pytest.fixture
def archive(monkeypatch, tmp_path):
  """Pixels and labels of a small archive, by file name."""
  return small_data.small_cifar10(tmp_path, monkeypatch)


@pytest.fixture
def archive_path(tmp_path, archive):
  return tmp_path / "downloads" / "manual" / download.ARCHIVE.filename


def test_archive_is_prepared_and_read_back(tmp_path, archive, monkeypatch):
  builder = download.prepare(str(tmp_path))
  # Not where the stock builder writes.
  assert builder.data_path.parent == tmp_path / "cifar10_bytes"
  found = {split: rows(tmp_path, split) for split in data.SPLITS}
  assert [len(x) for x in found.values()] == [34, 6, 8]

  def in_order(names):
    images = []
    for name in names:
      planes = archive[name][:, 1:].reshape(-1, 3, 32, 32)
      images += map(bytes, planes.transpose(0, 2, 3, 1))
    return images

  assert sorted(found["test"]) == sorted(in_order(builder.TEST_FILES))
  every = in_order(builder.TRAIN_FILES)
  assert sorted(found["train"] + found["validation"]) == sorted(every)
  drawn = np.random.RandomState(cifar10.SEED).permutation(40)[:6]
  validation = rows(tmp_path, "validation", "cifar10_distaug")
  assert sorted(validation) == sorted(every[i] for i in drawn)

  gray = source_of("cifar10_gray", tmp_path)
  labels = [row[-2] for row in gray.examples("test")]
  assert sorted(labels) == sorted(archive["test_batch.bin"][:, 0])
  assert "tensorflow" not in sys.modules

  # Without the archive, in the default folder, by the command: it is prepared.
  shutil.rmtree(tmp_path / "downloads")
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
  assert rows("", "test") == found["test"]
  done = runs.python("-m", "sparse_transformer.data", "prepare", "cifar10")
  place = f"cifar10_bytes is in {builder.data_path}"
  assert f"{place}: 40 train, 8 test records" in done.stdout


def test_wrong_archive_is_an_error_and_leaves_nothing(tmp_path, archive_path):
  archive_path.write_bytes(archive_path.read_bytes()[::-1])
  with refused(f"{archive_path} is damaged.*checksum"):
    download.prepare(str(tmp_path))
  with pytest.raises(FileNotFoundError, match="prepare cifar10 --data_dir="):
    rows(tmp_path, "train")


def test_archive_is_downloaded_once_and_completely(
  tmp_path, archive_path, monkeypatch
):
  content = archive_path.read_bytes()
  archive_path.unlink()

  def prepare(answer):
    monkeypatch.setattr(
      "urllib.request.urlopen", lambda url, timeout: io.BytesIO(answer)
    )
    download.prepare(str(tmp_path))

  part = content[:-1]
  message = f"only {len(part):,} bytes were received.; download .* to "
  with pytest.raises(ConnectionError, match=f"{message}{archive_path}"):
    prepare(part)
  prepare(content)
  monkeypatch.delattr("urllib.request.urlopen")
  download.prepare(str(tmp_path))


@pytest.mark.skipif(
  not (SHARED / "tensorflow_datasets" / "cifar10").is_dir(),
  reason="needs a prepared CIFAR-10",
)
def test_published_images_are_read():
  root = SHARED / "tensorflow_datasets"
  names = (root / "cifar10/3.0.2/label.labels.txt").read_text().split()
  assert list(cifar10.CLASSES) == names

  source = source_of("cifar10", root)
  train = source.examples("train")
  held_out = source.examples("validation")
  assert len(train) == 48_000
  assert len(held_out) == 2_000
  assert len(source.examples("test")) == 10_000

  pixels = np.stack([train[i] for i in range(0, 48_000, 160)])
  # Published channel means of the training set: 0.491, 0.482, 0.447.
  means = pixels.reshape(-1, 3).mean(0) / 255
  np.testing.assert_allclose(means, [0.491, 0.482, 0.447], atol=0.03)
  # Held-out images are not trained on.
  images = {bytes(held_out[i]) for i in range(0, 2_000, 20)}
  assert not images & {*map(bytes, pixels)}
