"""Tests of download.py and its command: small archives, no network."""

import io
import shutil
import subprocess
import sys

import pytest
import small_data
from small_data import config, contents

from sparse_transformer import data
from sparse_transformer.data import download


@pytest.fixture
def enwik8(monkeypatch, tmp_path):
  """The text of a small enwik8, whose archive is where users should put it."""
  return small_data.small_enwik8(tmp_path, monkeypatch)


def command(*words):
  return subprocess.run(
    [sys.executable, "-m", "sparse_transformer.data", *words],
    cwd=small_data.REPO,
    capture_output=True,
    text=True,
  )


def test_enwik8_is_prepared_from_a_manually_placed_archive(
  tmp_path, enwik8, monkeypatch
):
  builder = download.prepare("enwik8", str(tmp_path))
  assert builder.info.splits["train"].num_examples == 36
  splits = data.source(config("enwik8", tmp_path)).load()
  parts = [splits[split].tobytes() for split in data.SPLITS]
  assert parts == [enwik8[:1800], enwik8[1800:1900], enwik8[1900:]]
  assert "tensorflow" not in sys.modules
  # Without the archive, in the default folder, by the command: it is prepared.
  shutil.rmtree(tmp_path / "downloads")
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
  assert contents(data.source(config("enwik8"))) == enwik8
  sizes = "36 train, 2 validation, 2 test"
  expected = f"enwik8 is in {builder.data_path}: {sizes} records"
  assert expected in command("prepare", "enwik8").stdout


def test_wrong_archive_is_an_error_and_leaves_nothing(tmp_path, enwik8):
  archive = tmp_path / "downloads" / "manual" / "enwik8.zip"
  small_data.write_zip(archive, {"enwik8": enwik8[::-1]})
  with pytest.raises(ValueError, match=r"manual/enwik8.zip.*wrong checksum"):
    download.prepare("enwik8", str(tmp_path))
  with pytest.raises(FileNotFoundError):
    data.source(config("enwik8", tmp_path)).examples("train")


def test_archive_is_downloaded_once_and_completely(
  tmp_path, enwik8, monkeypatch
):
  manual = tmp_path / "downloads" / "manual" / "enwik8.zip"
  archive = manual.rename(tmp_path / "enwik8.zip")
  size = archive.stat().st_size
  for content in archive.read_bytes()[:-1], archive.read_bytes():
    answer = lambda url, timeout, content=content: io.BytesIO(content)
    monkeypatch.setattr("urllib.request.urlopen", answer)
    if len(content) < size:
      message = f"the answer has {size - 1:,} bytes.; put the file at {manual}"
      with pytest.raises(ConnectionError, match=message):
        download.prepare("enwik8", str(tmp_path))
    else:
      download.prepare("enwik8", str(tmp_path))
  assert contents(data.source(config("enwik8", tmp_path))) == enwik8
  monkeypatch.delattr("urllib.request.urlopen")
  download.prepare("enwik8", str(tmp_path))


def test_prepare_without_network_says_where_to_put_the_archive(
  tmp_path, enwik8
):
  root = tmp_path / "root"
  place = root / "downloads" / "manual" / "enwik8.zip"
  with pytest.raises(
    ConnectionError, match=f"nowhere.invalid/.*put the file at {place}"
  ):
    download.prepare("enwik8", str(root))
  assert not place.exists()


# The builder of CIFAR-10.


@pytest.fixture
def cifar10(monkeypatch, tmp_path):
  """Pixels and labels of a small CIFAR-10, by file name."""
  return small_data.small_cifar10(tmp_path, monkeypatch)


def test_cifar10_is_prepared_and_read_back(tmp_path, cifar10):
  builder = download.prepare("cifar10", str(tmp_path))
  # Not where the stock builder writes.
  assert builder.data_path.parent == tmp_path / "cifar10_bytes"
  source = data.source(config("cifar10", tmp_path))
  train, validation, test = (
    [image.tobytes() for image in source.examples(split)]
    for split in data.SPLITS
  )
  assert (len(train), len(validation), len(test)) == (34, 6, 8)

  def expected(names):
    return sorted(
      image.reshape(3, 32, 32).transpose(1, 2, 0).tobytes()
      for name in names
      for image in cifar10[name][:, 1:]
    )

  assert sorted(test) == expected(builder.TEST_FILES)
  assert sorted(train + validation) == expected(builder.TRAIN_FILES)
