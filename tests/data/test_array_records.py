"""Tests of array_records.py: PNG images, and damaged files."""

import io
import os
import shutil

import numpy as np
import pytest
from small_data import config

from sparse_transformer import data
from sparse_transformer.data import array_records, images

NAME = "downsampled_imagenet/64x64"
PIXELS = np.random.RandomState(0).randint(0, 256, (13, 64, 64, 3))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """9 training and 4 test images, as the stock ImageNet builder writes them."""
  import PIL.Image
  import tensorflow_datasets as tfds

  def pngs(pixels):
    for i, image in enumerate(pixels.astype(np.uint8)):
      file = io.BytesIO()
      PIL.Image.fromarray(image).save(file, "PNG")
      file.seek(0)
      yield f"{i}.png", file

  root = tmp_path_factory.mktemp("prepared")
  builder = tfds.builder(NAME, data_dir=root, file_format="array_record")
  builder._split_generators = lambda dl_manager: {
    "train": builder._generate_examples(pngs(PIXELS[:9])),
    "validation": builder._generate_examples(pngs(PIXELS[9:])),
  }
  builder.download_and_prepare()
  return root


@pytest.fixture
def root(prepared, tmp_path, monkeypatch):
  """A copy of them, for tests to damage."""
  monkeypatch.setattr(images, "IMAGENET64_HELD_OUT", 3)
  return shutil.copytree(prepared, tmp_path / "root")


@pytest.fixture
def folder(root):
  (folder,) = (root / NAME).iterdir()
  return folder


def source(root):
  return data.source(config("imagenet64", root))


def shard(folder, split):
  (path,) = folder.glob(f"*{split}.array_record-*")
  return path


def test_images_are_read_and_the_last_training_ones_held_out(root):
  splits = [
    [image.tolist() for image in source(root).examples(split)]
    for split in data.SPLITS
  ]
  assert [len(split) for split in splits] == [6, 3, 4]
  train, test = PIXELS[:9].reshape(9, -1), PIXELS[9:].reshape(4, -1)
  assert sorted(splits[0] + splits[1]) == sorted(train.tolist())
  assert sorted(splits[2]) == sorted(test.tolist())


def test_newest_finished_version_is_read(root, folder):
  newest = folder.with_name("2.0.10")
  shutil.copytree(folder, newest)
  shutil.copytree(folder, folder.with_name("2.0.9"))
  shutil.copytree(folder, folder.with_name("incomplete.X_4.0.0"))
  shutil.copytree(folder, folder.with_name("3.x"))
  assert array_records.find(config("imagenet64", root), "none", NAME) == newest


@pytest.mark.parametrize("size", [0, 100, 12_000, -10])
def test_truncated_file_is_found_when_it_is_opened(root, folder, size):
  path = shard(folder, "validation")
  os.truncate(path, size % path.stat().st_size)
  with pytest.raises(ValueError, match=f"{folder} is damaged or truncated"):
    source(root).examples("test")


def test_damaged_record_is_found_when_read(root, folder):
  path = shard(folder, "validation")
  content = bytearray(path.read_bytes())
  digest = source(root).digest()
  assert digest == source(root).digest()
  content[len(content) // 4] ^= 1
  path.write_bytes(content)
  assert source(root).digest() != digest
  examples = source(root).examples("test")
  assert len(examples[3]) == 12_288
  with pytest.raises(ValueError, match=f"{folder} is damaged or truncated"):
    list(examples)


@pytest.mark.parametrize(
  "content", [None, "{", '{"splits": 5}', '"-1"', '"99"']
)
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
  with pytest.raises(ValueError, match=f"{folder} is damaged or truncated"):
    source(root).examples("train")
