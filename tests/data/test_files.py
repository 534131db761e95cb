"""Tests of files.py: compressed files and damaged ones."""

import bz2
import gzip
import lzma
import zlib

import pytest
import small_data
from small_data import TEXT

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
    good[:middle] + flipped + good[middle + 9 :],
    b"this is no archive at all",
  ):
    file.write_bytes(bad)
    with pytest.raises(ValueError, match=f"{file} is damaged .*get it again"):
      files.read(file)


def test_system_error_is_not_mistaken_for_damage(tmp_path):
  for name in ("none", "none.gz", "none.zip"):
    with pytest.raises(FileNotFoundError):
      files.read(tmp_path / name)
  with pytest.raises(IsADirectoryError):
    files.read(tmp_path)


def test_checksum_covers_all_files_in_turn(tmp_path):
  paths = [tmp_path / "a", tmp_path / "b"]
  paths[0].write_bytes(TEXT[:500])
  paths[1].write_bytes(TEXT[500:])
  assert files.crc32(paths) == f"{zlib.crc32(TEXT):08x}"
