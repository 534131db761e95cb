"""Tests of splits.py: the names of folders and files, for all sources."""

import gzip

import numpy as np
import pytest
import small_data
from small_data import SUFFIXES, config

from sparse_transformer import data
from sparse_transformer.data import splits

NUMBERS = dict(train=1, validation=2, test=3)  # the symbol of each split


def write(path, number):
  """Writes 40 symbols of one kind."""
  small_data.write_symbols(path, np.full(40, 33 * number, np.uint8))


FOLDERS = ("train/a", "dev/a", "test/a"), ("Training/a", "valid/b/a", "TEST/a")
FILES = (
  ("train", "valid", "test"),
  ("training", "validation", "test"),
  ("wiki.train", "wiki.val", "wiki.test"),
  ("en-train", "dev", "test"),
  ("Train-00000-of-00002", "small_validation_7", "test"),
)


@pytest.mark.parametrize(
  "name, paths",
  [
    *((name, paths) for name in SUFFIXES for paths in FOLDERS),
    *((name, x) for name in [*SUFFIXES][:5] for x in FILES),
  ],
)
def test_named_splits_are_not_mixed(tmp_path, name, paths, capfd):
  paths = [path + SUFFIXES[name] for path in paths]
  for path, number in zip(paths, NUMBERS.values(), strict=True):
    if name == "labelled":
      for label in "no", "yes":
        split, _, rest = path.partition("/")
        write(tmp_path / split / label / rest, number)
    else:
      write(tmp_path / path, number)
  (tmp_path / ".test.fasta.swp").write_text("hidden")
  made = data.source(config(name, tmp_path, columns=4, length=1))
  found = [
    {int(x[0]) for x in made.examples(split)} - {ord("\n")}
    for split in data.SPLITS
  ]
  assert [len(x) for x in found] == [1, 1, 1] and len(set.union(*found)) == 3
  assert not capfd.readouterr().err


def test_numbered_files_of_a_split_are_joined(tmp_path):
  for name, number in (("b_2", 4), ("train-1", 1), ("train-2", 2), ("val", 3)):
    (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(bytes([number])))
  (tmp_path / "test").mkdir()
  for name, number in ("test/a", 5), ("test/c", 6), ("train-2.txt", 2):
    (tmp_path / name).write_bytes(bytes([number]))  # the last has a copy
  found = data.source(config("bytes", tmp_path, length=1)).load()
  found = {split: bytes(symbols) for split, symbols in found.items()}
  assert found == dict(train=b"\1\2", validation=b"\3", test=b"\5\6")


def test_lack_of_a_test_split_and_files_that_are_not_read_are_told(
  tmp_path, capfd
):
  for path in "train.txt", "b.val.txt", "README.md", "b/c.txt":
    write(tmp_path / path, 1)
  found = data.source(config("bytes", tmp_path)).load()
  assert found["test"] is found["validation"]
  err = capfd.readouterr().err
  assert "has no test: b.val.txt is used, as for validation" in err
  assert "files that are not read: 2, such as README.md\n" in err


@pytest.mark.parametrize(
  "names",
  [("train_x.txt", "test_x.txt"), ("a/train", "a/dev"), ("a/train", "b/test")],
)
@pytest.mark.parametrize("archive", ["", "all.zip"])
def test_names_of_splits_that_are_joined_are_told(
  tmp_path, names, archive, capfd
):
  if archive:
    small_data.write_zip(tmp_path / archive, dict.fromkeys(names, "a" * 40))
  else:
    [write(tmp_path / name, 1) for name in names]
  data.source(config("bytes", tmp_path / archive)).load()
  err = capfd.readouterr().err
  assert all(name in err for name in names), err
  assert (
    "split by data.fractions; in a folder, give them the names train" in err
  )


@pytest.mark.parametrize(
  "paths, message",
  [
    (["train.txt", "train/a", "val/a"], "train and .*train.txt are both there"),
    (["train.txt", "train.txt.raw", "val.txt"], "train.txt.raw are both there"),
    (["train/a", "val/a", "valid/a"], "val and .*valid are both there; rename"),
    (["train.txt", "b/a"], "has train.txt, but no val; add it, or rename"),
    (["wiki.test.txt", "b"], "has wiki.test.txt, but no train; add"),
    (["test/a", "b"], "has test, but no train; add it, or rename"),
    (["train/a", "val/"], "val has no file; set data.path"),
  ],
)
def test_names_that_tell_no_splits_are_an_error(tmp_path, paths, message):
  for path in paths:
    if path.endswith("/"):
      (tmp_path / path).mkdir()
    else:
      write(tmp_path / path, 1)
  with pytest.raises((ValueError, OSError), match=message):
    data.source(config("bytes", tmp_path)).load()


def test_empty_split_is_an_error_that_names_it(tmp_path):
  for name in NUMBERS:
    (tmp_path / f"{name}.txt").write_text("" if name == "test" else "text")
  with pytest.raises(ValueError, match="the test split is empty"):
    data.source(config("bytes", tmp_path, length=1)).examples("test")


def test_other_names_tell_no_splits(tmp_path):
  names = "how-to-train-it.txt", "latest.txt", "contest", "test_x.py", "a/test"
  for name in names:
    write(tmp_path / name, 1)
  (tmp_path / ".train").touch()
  for path, number in ((tmp_path, 5), (tmp_path / names[0], 1)):
    (found,) = splits.listed(path, "").items()
    assert found[0] == "" and len(found[1]) == number
