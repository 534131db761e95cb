"""Tests of splits.py: the names of folders and files, for all sources."""

import gzip
import pathlib
import sysconfig

import numpy as np
import pytest
from helpers import small_data
from helpers.errors import refused
from helpers.small_data import SUFFIXES, source_of

from sparse_transformer import data
from sparse_transformer.data import files, splits

NUMBERS = dict(
  train=1,
  validation=2,
  test=3,
)  # the symbol of each split


def write(path, number):
  """Writes 40 symbols of one kind."""
  small_data.write_symbols(path, np.full(40, 33 * number, np.uint8))


FOLDERS = (
  ("train/a", "dev/a", "test/a"),
  ("Training/a", "valid/b/a", "TEST/a"),
)
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
  suffix = SUFFIXES[name]
  for path, number in zip(paths, NUMBERS.values(), strict=True):
    if name == "labelled":
      split, _, rest = path.partition("/")
      for label in "no", "yes":
        write(tmp_path / split / label / (rest + suffix), number)
    else:
      write(tmp_path / (path + suffix), number)

  (tmp_path / ".test.fasta.swp").write_text("hidden")
  source = source_of(
    name,
    tmp_path,
    columns=4,
    length=1,
  )
  every = set()
  for split in data.SPLITS:
    first = {int(row[0]) for row in source.examples(split)}
    symbols = first - {ord("\n")}
    assert len(symbols) == 1
    every |= symbols
  assert len(every) == 3
  assert not capfd.readouterr().err


def sizes(path, name="bytes", **changes):
  """The number of symbols in each split of a folder."""
  found = source_of(name, path, length=1, **changes).load()
  return [len(found[split]) for split in data.SPLITS]


NUMBERED = (
  ("train-1.txt.gz", "train-10.txt.gz", "val.txt"),
  ("wiki.train-1-of-4.txt", "wiki.train-2-of-4.txt", "wiki.valid.txt"),
  ("train-00000-of-00005.txt", "train-00001-of-00005.txt", "validation.txt"),
  (
    "c4-train.00000-of-01024.txt.gz",
    "c4-train.00001-of-01024.txt.gz",
    "c4-validation.00000-of-00008.txt.gz",
  ),
)


@pytest.mark.parametrize("first, second, validation", NUMBERED)
def test_numbered_files_of_a_split_are_joined(
  tmp_path, first, second, validation, capfd
):
  contents = {
    first: b"1" * 9,
    second: b"2" * 9,
    validation: b"3" * 9,
    "test.txt": b"4" * 9,
  }
  for name, content in contents.items():
    if name.endswith(".gz"):
      content = gzip.compress(content)
    (tmp_path / name).write_bytes(content)

  found = source_of("bytes", tmp_path, length=1).load()
  assert bytes(found["train"]) == b"1" * 9 + b"2" * 9
  assert bytes(found["validation"]) == b"3" * 9
  assert bytes(found["test"]) == b"4" * 9
  assert not capfd.readouterr().err


def test_several_names_of_a_split_are_joined_and_told(tmp_path, capfd):
  for name in "train.en", "train.fr", "valid.en", "valid.fr", "test.en":
    write(tmp_path / name, 1)
  (tmp_path / "Train").mkdir()
  write(tmp_path / "Train" / "x", 1)  # no folder for validation or test

  assert sizes(tmp_path) == [80, 80, 40]
  err = capfd.readouterr().err
  assert f"{tmp_path}: the train split joins train.en, train.fr\n" in err
  assert f"{tmp_path}: the validation split joins valid.en, valid.fr\n" in err
  assert (
    "files that are not read: 1, such as Train/x; to read all, set data" in err
  )
  assert sizes(tmp_path, splits="names") == [120, 80, 40]


def test_lack_of_a_split_and_files_that_are_not_read_are_told(tmp_path, capfd):
  for path in "train.txt", "b.val.txt", "README.md":
    write(tmp_path / path, 1)
  found = source_of("bytes", tmp_path).load()

  assert found["test"] is found["validation"]
  err = capfd.readouterr().err
  assert "has no test split; b.val.txt is used, as for validation" in err
  assert "warning: " in err
  assert (
    "files that are not read: 1, such as README.md; to read all, set"
    " data.splits=fractions\n" in err
  )
  (tmp_path / "b.val.txt").replace(tmp_path / "test.txt")
  assert sizes(tmp_path) == [20, 20, 40]
  err = capfd.readouterr().err
  assert (
    "has no validation split; the end of train.txt is used, by data.fr" in err
  )


# Folders as they are found, by the sizes of their files.

PROGRAMS = {f"{x}.py": 3_000 for x in "abcdefghijklmnopq"}
PICTURES = {f"{i}.png": 100 for i in range(30)}
CARDS = {
  "README.md": 900,
  "LICENSE": 1_100,
}
TEXTS = {
  "train.txt": 5_000,
  "valid.txt": 400,
  "test.txt": 600,
}
NATURAL = {
  "mixed files": ({"a.txt": 90, "b/c.csv": 80, "test.csv": 30}, "test.csv"),
  "a note among pictures": ({"train.md": 200} | PICTURES, "train.md"),
  "a package": (
    {"training/loop.py": 900, "model/net.py": 2_000, "train.py": 100},
    "train.py, training",
  ),
  "programs": (
    {"train.py": 3_994, "validation.py": 2_000} | PROGRAMS,
    "train.py, validation.py",
  ),
  "programs beside tests": (
    {"train.py": 3_000, "test/a.py": 500, "requirements-train.txt": 9},
    "requirements-train.txt, test, train.py",
  ),
  "splits of two kinds": ({"train/a": 90, "val.txt": 90}, "train, val.txt"),
  "no training data": ({"test/a": 90, "dev/b": 90}, "dev, test"),
  "no other data": ({"train/a": 90, "train/b": 90}, "train"),
}


def write_files(folder, sizes):
  for name, size in sizes.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"a" * size)


@pytest.mark.parametrize("there, names", NATURAL.values(), ids=NATURAL)
def test_names_that_tell_no_splits_are_told_and_all_is_read(
  tmp_path, there, names, capfd
):
  write_files(tmp_path, there)
  total = sum(there.values())
  assert sum(sizes(tmp_path)) == total
  line = (
    f"by data.fractions, not by the names {names}; if these are splits, set"
  )
  assert line in capfd.readouterr().err
  assert sum(sizes(tmp_path, splits="fractions")) == total
  assert not capfd.readouterr().err  # it is what was asked for


@pytest.mark.parametrize("more", [{}, CARDS, PICTURES])
def test_names_of_most_bytes_are_splits(tmp_path, more, capfd):
  write_files(tmp_path, TEXTS | more)
  assert sizes(tmp_path) == [5_000, 400, 600]
  line = f"warning: {tmp_path}: files that are not read: {len(more)}, such as"
  assert (line in capfd.readouterr().err) == bool(more)
  total = sum((TEXTS | more).values())
  assert sum(sizes(tmp_path, splits="fractions")) == total


def test_folders_without_validation_are_splits(tmp_path):
  write_files(
    tmp_path,
    {
      "train/a": 600,
      "train/b": 400,
      "test/a": 500,
      "c": 9,
    },
  )

  assert sizes(tmp_path) == [500, 500, 500]
  assert sizes(tmp_path, fractions=(0.9, 0.05, 0.05)) == [900, 100, 500]


def test_names_may_be_said_to_be_splits(tmp_path):
  write_files(
    tmp_path,
    {
      "train.py": 90,
      "dev/x": 10,
      "test": 20,
    }
    | PROGRAMS,
  )

  assert sum(sizes(tmp_path)) == 51_120
  assert sizes(tmp_path, splits="names") == [90, 10, 20]

  (tmp_path / "train.py").unlink()
  with refused("names requires files or folders in .*trai"):
    sizes(tmp_path, splits="names")
  with refused("requires a folder, but .*test is a file"):
    sizes(tmp_path / "test", splits="names")


@pytest.mark.parametrize("name", [*SUFFIXES][:6])
def test_setting_holds_for_every_source(tmp_path, name):
  for path in "train/a", "train/b", "val/a", "c/a", "c/b", "c/c":
    write(tmp_path / (path + SUFFIXES[name]), 1)
  write(tmp_path / ("d" + SUFFIXES[name]), 1)

  def numbers(by):
    changes = dict(
      length=1,
      splits=by,
    )
    source = source_of(name, tmp_path, **changes)
    return [len(source.examples(split)) for split in data.SPLITS]

  train, validation, test = numbers("names")

  assert train == 2 * validation == 2 * test
  total = 7 * validation
  for by in "fractions", "auto":
    assert numbers(by)[0] == round(total / 2)
    assert sum(numbers(by)) == total


FOUND = small_data.REPO, sysconfig.get_paths()["stdlib"], "/usr/share/man"


@pytest.mark.parametrize("path", FOUND, ids=["clone", "library", "manual"])
def test_folders_of_a_machine_are_read_whole(path):
  path = pathlib.Path(path)
  if not path.is_dir():
    pytest.skip(f"{path} is not there")
  ((split, found),) = splits.listed(path, "").items()
  assert split == ""
  assert {*found} == {*files.find(path, "")}


@pytest.mark.parametrize(
  "names",
  [
    ("train_x.txt", "test_x.txt"),
    ("a/train", "a/dev"),
    ("a/train", "b/test"),
  ],
)
@pytest.mark.parametrize("archive", ["", "all.zip"])
def test_names_of_splits_that_are_joined_are_told(
  tmp_path, names, archive, capfd
):
  if archive:
    small_data.write_zip(tmp_path / archive, dict.fromkeys(names, "a" * 40))
  else:
    [write(tmp_path / name, 1) for name in names]

  source_of("bytes", tmp_path / archive).load()
  err = capfd.readouterr().err

  assert all(name in err for name in names), err
  assert (
    "split by data.fractions; to split by names, put them into a folder" in err
  )


@pytest.mark.parametrize("name", SUFFIXES)
def test_digest_says_how_the_same_data_are_divided(tmp_path, name):
  """A file is moved from the end of training to the start of validation."""
  labels = ("no", "yes") if name == "labelled" else ("",)
  digests = []
  for end in "train", "val":
    root = tmp_path / end
    for number, split in enumerate(("train", end, "val", "test"), start=1):
      for label in labels:
        write(root / split / label / f"{number}{SUFFIXES[name]}", number)
    source = source_of(name, root, length=40)
    digests.append(source.digest())

  first, second = digests
  assert first.keys() == second.keys()
  assert first["splits"] != second["splits"]
  if name != "labelled":  # whose examples are shuffled
    assert first["crc32"] == second["crc32"]


def test_digest_says_how_the_same_arrays_are_divided(tmp_path):
  names = [f"{x}.npy" for x in ("train-1", "train-2", "val-3")]
  for name in names:
    np.save(tmp_path / name, np.ones((4, 8, 8), np.uint8))

  def digest():
    return source_of("images", tmp_path).digest()

  first = digest()

  assert first["splits"] == [8, 4, 4]
  (tmp_path / names[1]).replace(tmp_path / "val-2.npy")
  second = digest()

  assert second["splits"] == [4, 8, 8]
  assert first["crc32"] == second["crc32"]


@pytest.mark.parametrize(
  "fractions, sizes",
  [
    ((0.5, 0.25, 0.25), [20, 10, 10]),
    ((0.5, 0.3, 0.2), [20, 12, 8]),
  ],
)
def test_digest_says_where_fractions_cut(tmp_path, fractions, sizes):
  write(tmp_path / "x", 1)
  source = source_of("bytes", tmp_path / "x", fractions=fractions)
  assert source.digest()["splits"] == sizes


def test_empty_split_is_an_error_that_names_it(tmp_path):
  for name in NUMBERS:
    (tmp_path / f"{name}.txt").write_text("" if name == "test" else "text")
  with refused("the test split is empty"):
    source_of("bytes", tmp_path, length=1).examples("test")


def test_other_names_tell_no_splits(tmp_path):
  names = "how-to-train-it.txt", "latest.txt", "contest", "test_x.py", "a/test"
  for name in names:
    write(tmp_path / name, 1)
  (tmp_path / ".train").touch()
  for path, number in (
    (tmp_path, 5),
    (tmp_path / names[0], 1),
  ):
    ((split, found),) = splits.listed(path, "").items()
    assert split == ""
    assert len(found) == number
