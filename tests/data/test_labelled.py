"""Tests of labelled sources: rows, splits, and what does not fit."""

import numpy as np
import pytest
import small_data
from small_data import SHARED, config

from sparse_transformer import data
from sparse_transformer.data import array_records, download, labelled

CIFAR10 = SHARED / "tensorflow_datasets"


def write(folder, texts):
  """Writes {class: texts} into a folder for each class."""
  for name, of_class in texts.items():
    (folder / name).mkdir(parents=True)
    for i, text in enumerate(of_class):
      (folder / name / f"{i:02}.txt").write_bytes(text)


TEXTS = {"no": [bytes([k] * (k + 1)) for k in range(20)], "yes": [b"abc"] * 8}


def test_rows_have_symbols_label_and_size(tmp_path):
  write(tmp_path, TEXTS)
  source = data.source(config("labelled", tmp_path, length=10))
  assert source.classes == ("no", "yes")
  rows = {x: np.stack(list(source.examples(x))) for x in data.SPLITS}
  assert [len(x) for x in rows.values()] == [14, 7, 7]
  assert rows["train"].dtype == np.uint8
  no, yes = (rows["train"][rows["train"][:, -2] == x] for x in (0, 1))
  # The first half of the files of each class, in an order of no class.
  assert sorted(no[:, 0]) == [*range(10)] and len(yes) == 4
  for row in no:
    assert row[-1] == row[0] + 1
    assert (row[: row[-1]] == row[0]).all() and not row[row[-1] : -2].any()
  assert (yes == [*b"abc", *[0] * 7, 1, 3]).all()
  assert (np.diff(rows["train"][:, -2].astype(int)) != 0).sum() > 1
  longest = np.stack(list(source.examples("test")))
  assert longest[:, -1].max() == 10  # cut
  window, scored = source.windows("test")[0]
  np.testing.assert_array_equal(window, longest[0])
  assert scored.tolist() == [True]
  with pytest.raises(ValueError, match="min_context=3 must be 0 for labels"):
    source.windows("test", 3)


def test_folders_of_splits_and_digest(tmp_path):
  for split in ("train", "validation", "test"):
    write(tmp_path / split, TEXTS)
  source = data.source(config("labelled", tmp_path, length=10))
  assert [len(source.examples(x)) for x in data.SPLITS] == [28] * 3
  digest = source.digest()
  assert digest["examples"] == 28
  assert digest == data.source(config("labelled", tmp_path, length=10)).digest()
  (tmp_path / "test" / "yes" / "00.txt").write_bytes(b"abd")
  assert data.source(config("labelled", tmp_path, length=10)).digest() != digest
  (tmp_path / "test" / "more").mkdir()
  with pytest.raises(ValueError, match="test has the classes more, no, yes"):
    data.source(config("labelled", tmp_path))


@pytest.mark.parametrize(
  "size, label, phrase",
  [
    (0, 0, "0 symbols; .* between 1 and 4"),
    (5, 0, "5 symbols; .* between 1 and 4"),
    (3, -1, "has label=-1, but there are 2 classes"),
    (3, 2, "has label=2, but there are 2 classes"),
  ],
)
def test_examples_must_fit_the_source(size, label, phrase):
  examples = [(np.ones(size, np.uint8), label)]
  source = data.Sequences(
    4, (2, 2), 7, ("a", "b"), lambda: dict.fromkeys(data.SPLITS, examples)
  )
  with pytest.raises(ValueError, match=phrase):
    source.examples("train")[0]


def test_gray_is_the_luma_of_itu_r_601():
  image = np.zeros((1, 5, 3), np.uint8)
  image[0, :3] = 255 * np.eye(3, dtype=np.uint8)
  image[0, 3:] = [[255] * 3, [10, 20, 30]]
  # 76.22, 149.69, 29.07, 254.97, 18.15
  assert labelled.gray(image).tolist() == [76, 150, 29, 255, 18]


@pytest.mark.skipif(
  not (CIFAR10 / "cifar10").is_dir(), reason="needs a prepared CIFAR-10"
)
def test_cifar10_gray_is_cifar10_with_labels():
  source = data.source(config("cifar10_gray", CIFAR10))
  color = data.source(config("cifar10", CIFAR10))
  names = (CIFAR10 / "cifar10/3.0.2/label.labels.txt").read_text().split()
  assert list(source.classes) == names
  for split in data.SPLITS:
    rows, images = source.examples(split), color.examples(split)
    assert len(rows) == len(images)
    row = rows[7]
    np.testing.assert_array_equal(row[:1024], labelled.gray(images[7]))
    assert row[-1] == 1024 and row[-2] < 10
  labels = [rows[i][-2] for i in range(200)]
  assert len({*labels}) == 10


def test_prepared_cifar10_has_labels(tmp_path, monkeypatch):
  files = small_data.small_cifar10(tmp_path, monkeypatch)
  builder = download.prepare("cifar10_gray", str(tmp_path))
  source = data.source(config("cifar10_gray", tmp_path))
  expected = {
    (*labelled.gray(image.reshape(3, 1024).T), label, 1024)
    for name in builder.TEST_FILES
    for label, image in zip(files[name][:, 0], files[name][:, 1:], strict=True)
  }
  assert {tuple(row) for row in source.examples("test")} == expected


def test_cifar10_without_labels_is_rejected_in_one_line(tmp_path, monkeypatch):
  small_data.write("cifar10", tmp_path, monkeypatch)
  read = array_records.read
  with pytest.raises(
    ValueError, match="the records have no hue, only image, label"
  ):
    read(next((tmp_path / "cifar10_bytes").iterdir()), "train", "hue")
