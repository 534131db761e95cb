"""Tests of files.py: which there are; compressed, damaged, special ones."""

import bz2
import functools
import gzip
import lzma
import os
import zipfile
import zlib

import numpy as np
import pytest
from helpers import small_data
from helpers.errors import refused
from helpers.small_data import TEXT, source_of

from sparse_transformer import data
from sparse_transformer.data import files

COMPRESS = {
  ".gz": gzip.compress,
  ".bz2": bz2.compress,
  ".xz": lzma.compress,
}


def write_archive(path):
  if path.suffix == ".zip":
    members = {
      "b/2": TEXT[500:900],
      "b/": b"",
      "a": TEXT[:500],
      "c": TEXT[900:],
      "__MACOSX/._a": b"hidden",
      ".DS_Store": b"hidden",
      "b/.x/y": b"hidden",
    }
    small_data.write_zip(path, members)
  else:
    compress = COMPRESS.get(path.suffix.lower(), bytes)
    path.write_bytes(compress(TEXT))


@pytest.mark.parametrize("suffix", ["", ".txt", ".GZ", ".zip", *COMPRESS])
def test_file_is_decompressed_by_its_suffix(tmp_path, suffix):
  path = tmp_path / f"text{suffix}"
  write_archive(path)
  assert files.read(path) == TEXT


@pytest.mark.parametrize("suffix", [*COMPRESS, ".zip"])
def test_damaged_archive_is_an_error_that_names_it(tmp_path, suffix):
  path = tmp_path / f"text{suffix}"
  write_archive(path)
  good = path.read_bytes()
  middle = len(good) // 2
  flipped = bytes(255 - byte for byte in good[middle : middle + 9])
  contents = (
    good[:middle],
    good[:2],
    good[9:],
    good[:middle] + flipped + good[middle + 9 :],
    b"no archive",
    b"",
  )
  for content in contents:
    path.write_bytes(content)
    with refused(f"{path} is damaged .* or its format is"):
      files.read(path)

  path.unlink()
  with pytest.raises(FileNotFoundError):
    files.read(path)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_what_follows_a_member_is_another_or_an_error(tmp_path, suffix):
  first = COMPRESS[suffix](TEXT[:500])
  second = COMPRESS[suffix](TEXT[500:])
  path = tmp_path / f"x{suffix}"
  path.write_bytes(first + second)
  assert files.read(path) == TEXT
  damaged = bytes([second[0] ^ 1]) + second[1:]
  for rest in b"no member", damaged:
    path.write_bytes(first + rest)
    with refused(f"{path} is damaged"):
      files.read(path)


def write_zip_of(path, *members):
  """Writes members (name, content), of which two may have one name."""
  with zipfile.ZipFile(path, "w") as archive:
    for name, content in members:
      archive.writestr(name, content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archive_of_two_members_of_one_name_is_rejected(tmp_path):
  path = tmp_path / "x.zip"
  write_zip_of(path, ("b", "1"), ("a", "2"), ("c/", ""), ("b", "3"))
  with refused(f"{path} .*two .* members are named b$"):
    files.parts(path)
  write_zip_of(path, ("b", "1"), ("a", "2"), ("c/", ""), ("a/b", "3"))
  assert files.parts(path) == [b"2", b"3", b"1"]


def test_file_that_is_not_regular_or_too_large_is_rejected(tmp_path):
  os.mkfifo(tmp_path / "pipe")  # reading it would never end
  (tmp_path / "text.gz").symlink_to(tmp_path / "pipe")
  for path in (tmp_path, tmp_path / "pipe", tmp_path / "text.gz"):
    with refused(f"{path} is not a regular file"):
      files.read(path)
  (tmp_path / "large").touch()
  os.truncate(tmp_path / "large", 2**36 + 1)  # without a byte on disk
  with refused("large has 68,719,476,737 bytes, more"):
    files.read(tmp_path / "large")


def test_files_of_a_folder(tmp_path):
  """Links are followed, in no circle; hidden files and side files are none."""
  inside = tmp_path / "inside"
  outside = tmp_path / "outside"
  for name in (
    "d.fa",
    "b/2.FA",
    "b/c/3.fa.gz",
    ".x.fa",
    ".git/y.fa",
    "__MACOSX/z.fa",
    "d.fa.fai",
    "d.fa.gz.fai",
    "d.txt",
    "fa",
  ):
    (inside / name).parent.mkdir(
      parents=True,
      exist_ok=True,
    )
    (inside / name).touch()

  outside.mkdir()
  (outside / "4.fa").touch()
  (inside / "b" / "loop").symlink_to(inside)
  (inside / "b" / "a").symlink_to(outside)
  (inside / "more").symlink_to(outside)  # again
  (inside / "e.fa").symlink_to(inside / "d.fa")
  found = [str(p.relative_to(inside)) for p in files.find(inside, ".fa")]

  assert found == ["b/2.FA", "b/a/4.fa", "b/c/3.fa.gz", "d.fa", "e.fa"]
  assert len(files.find(inside, "")) == 9
  with pytest.raises(FileNotFoundError, match="no file that ends in .x, .y;"):
    files.find(inside, ".x", ".y")


def test_copies_are_no_other_data(tmp_path):
  for name in "b.txt", "b.txt.gz", "c.txt.gz", "b.txt~", "c.part", "Thumbs.db":
    (tmp_path / name).touch()
  (tmp_path / "d").mkdir()
  for name in "d/e.txt", "d.zip":  # an archive, and what was in it
    (tmp_path / name).touch()
  found = [x.name for x in files.find(tmp_path, "")]
  assert found == ["b.txt", "c.txt.gz", "e.txt"]


@pytest.mark.parametrize(
  "kind, content",
  [
    ("Zstandard", b"\x28\xb5\x2f\xfd$\x05"),
    ("gzip", gzip.compress(b"text", mtime=0)),
    ("zip", b"PK\x03\x04"),
    ("tar", b"a" * 257 + b"ustar"),
    ("Parquet", b"PAR1"),
    ("UTF16", "text".encode("utf-16")),
  ],
)
def test_kind_that_is_not_unpacked_is_told(tmp_path, kind, content, capfd):
  (tmp_path / "x.txt").write_bytes(content * 9)
  source = functools.partial(source_of, path=tmp_path / "x.txt")

  assert small_data.contents(source("bytes")) == content * 9
  line = f"{tmp_path}/x.txt has {kind} data, unlike text, and other files"

  assert line in capfd.readouterr().err
  for name, phrase in (
    ("jsonl", "line must be: "),
    ("fasta", "file, but "),
  ):
    with refused(f"{phrase}{kind} data"):
      source(name).load()


@pytest.mark.parametrize(
  "name, suffix",
  [
    ("tokens", "bin"),
    ("tokens", "npy"),
    ("images", "npy"),
  ],
)
def test_file_that_becomes_shorter_is_an_error(tmp_path, name, suffix):
  """Reading past the end of a mapped file kills the process silently."""
  path = tmp_path / f"x.{suffix}"
  array = np.ones((20, 64, 64), np.uint8)
  array = array if name == "images" else array.ravel()
  array.tofile(path) if suffix == "bin" else np.save(path, array)
  size = 2**16 if suffix == "bin" else 2**8
  source = source_of(name, path, vocab_size=size)
  batches = data.batches(source.examples("train"), 4, seed=0)

  assert batches[0].sum()
  os.truncate(path, 4096)
  for read in (lambda: batches[1], lambda: [*source.windows("test")]):
    with pytest.raises(OSError, match=f"{path} has become shorter"):
      read()


def test_checksum_covers_all_files_in_turn(tmp_path):
  paths = [tmp_path / "a", tmp_path / "b"]
  paths[0].write_bytes(TEXT[:500])
  paths[1].write_bytes(TEXT[500:])
  assert files.crc32(*paths) == zlib.crc32(TEXT)
