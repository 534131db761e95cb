"""Tests of files.py: compressed, damaged, special and large files."""

import bz2
import gzip
import lzma
import os
import zlib

import pytest
import small_data
from small_data import TEXT

from sparse_transformer import machine
from sparse_transformer.data import files

COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", ["", ".txt", ".GZ", *COMPRESS])
def test_file_is_decompressed_by_its_suffix(tmp_path, suffix):
  file = tmp_path / f"text{suffix}"
  file.write_bytes(COMPRESS.get(suffix.lower(), bytes)(TEXT))
  assert files.read(file) == TEXT


def test_zip_is_read_in_the_order_of_names(tmp_path):
  members = {"b/2": TEXT[500:900], "b/": b"", "a": TEXT[:500], "c": TEXT[900:]}
  small_data.write_zip(tmp_path / "text.zip", members)
  assert files.read(tmp_path / "text.zip") == TEXT


@pytest.mark.parametrize("suffix", [*COMPRESS, ".zip"])
def test_damaged_archive_is_an_error_that_names_it(tmp_path, suffix):
  file = tmp_path / f"text{suffix}"
  if suffix == ".zip":
    small_data.write_zip(file, {"text": TEXT})
  else:
    file.write_bytes(COMPRESS[suffix](TEXT))
  good = file.read_bytes()
  middle = len(good) // 2
  flipped = bytes(255 - byte for byte in good[middle : middle + 9])
  for bad in (
    good[:middle],
    good[:-1],
    good[:2],
    good[9:],
    good[:middle] + flipped + good[middle + 9 :],
    b"this is not an archive",
  ):
    file.write_bytes(bad)
    with pytest.raises(ValueError, match=f"{file} is damaged .*get it again"):
      files.read(file)


def test_system_error_is_not_mistaken_for_damage(tmp_path):
  for name in ("none", "none.gz", "none.zip"):
    with pytest.raises(FileNotFoundError):
      files.read(tmp_path / name)


@pytest.fixture
def small_machine(monkeypatch):
  """Half of its memory is 2 MiB."""
  monkeypatch.setattr(machine, "memory", lambda: 2**22)


def test_file_that_is_not_regular_is_rejected(tmp_path):
  os.mkfifo(tmp_path / "pipe")  # reading it would never end
  (tmp_path / "text.gz").symlink_to(tmp_path / "pipe")
  for path in (tmp_path, tmp_path / "pipe", tmp_path / "text.gz"):
    with pytest.raises(ValueError, match=f"{path} is not a regular file"):
      files.read(path)


def test_file_larger_than_memory_is_an_error(tmp_path):
  path = tmp_path / "text"
  path.touch()
  os.truncate(path, 2**42)  # without a byte on disk
  with pytest.raises(ValueError, match="half of this machine's memory is"):
    files.read(path)


def test_files_that_are_larger_than_memory_together_are_an_error(
  tmp_path, small_machine
):
  paths = [tmp_path / name for name in "abc"]
  for path in paths:
    path.write_bytes(bytes(2**20))
  assert len(list(files.read_all(paths[:2]))) == 2
  with pytest.raises(ValueError, match="up to .*c take at least 3,145,728 "):
    next(files.read_all(paths))  # before any is read


def archive(path, content):
  if path.suffix == ".zip":
    small_data.write_zip(path, {"a": content[:500], "b": content[500:]})
  else:
    path.write_bytes(COMPRESS[path.suffix](content))
  return path


@pytest.mark.parametrize("suffix", [*COMPRESS, ".zip"])
def test_archive_that_expands_beyond_memory_is_an_error(
  suffix, tmp_path, small_machine
):
  first = archive(tmp_path / f"a{suffix}", bytes(2**20))
  second = archive(tmp_path / f"b{suffix}", bytes(2**20 + 1))
  contents = files.read_all([second, first])
  assert next(contents) == (first, bytes(2**20))
  with pytest.raises(ValueError, match=f"b{suffix} take at least 2,"):
    next(contents)


def test_links_to_folders_are_not_followed(tmp_path):
  (tmp_path / "b" / "c").mkdir(parents=True)
  for name in ("a", "b/2", "b/c/3", "d"):
    (tmp_path / name).touch()
  (tmp_path / "b" / "loop").symlink_to(tmp_path)
  (tmp_path / "e").symlink_to(tmp_path / "d")
  found = [str(p.relative_to(tmp_path)) for p in files.below(tmp_path)]
  assert sorted(found) == ["a", "b/2", "b/c/3", "d", "e"]


def test_checksum_covers_all_files_in_turn(tmp_path):
  paths = [tmp_path / "a", tmp_path / "b"]
  paths[0].write_bytes(TEXT[:500])
  paths[1].write_bytes(TEXT[500:])
  assert files.crc32(*paths) == zlib.crc32(TEXT)
