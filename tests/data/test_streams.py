"""Tests of streams.py: which files are read and how they are split."""

import gzip
import os
import pathlib

import numpy as np
import pytest
import small_data
from small_data import SHARED, TEXT, config, contents

from sparse_transformer import data
from sparse_transformer.data import codecs, streams


def test_folder_is_read_in_the_order_of_paths_and_split(tmp_path):
  (tmp_path / "b" / "empty").mkdir(parents=True)
  (tmp_path / "c").write_bytes(TEXT[900:])
  (tmp_path / "b" / "2.gz").write_bytes(gzip.compress(TEXT[500:900]))
  (tmp_path / "a").write_bytes(TEXT[:500])
  source = data.source(config("bytes", tmp_path))
  assert contents(source) == TEXT
  sizes = [len(source.load()[split]) for split in data.SPLITS]
  assert sizes == [516, 257, 258]


@pytest.mark.parametrize("name", ["bytes", "enwik8", "imagenet64", "cifar10"])
def test_unknown_home_is_an_error(name):
  with pytest.raises(FileNotFoundError, match="~nobody_here/x.* set data.path"):
    data.source(config(name, "~nobody_here/x/y")).examples("train")


def test_folder_with_a_file_that_cannot_be_read_is_an_error(tmp_path):
  (tmp_path / "a").write_bytes(TEXT)
  (tmp_path / "b").symlink_to(tmp_path / "gone")
  source = data.source(config("bytes", tmp_path))
  with pytest.raises(FileNotFoundError, match=f"{tmp_path}/b"):
    source.examples("train")
  # One that is not chosen does no harm.
  (tmp_path / "x.fasta").write_text(">a\nACGT\n")
  assert contents(data.source(config("fasta", tmp_path, length=1)))


def test_files_are_read_once(tmp_path):
  path = tmp_path / "text"
  path.write_bytes(b"0")
  source = data.source(config("bytes", path, length=2))
  with pytest.raises(ValueError, match="is empty"):
    source.examples("train")
  path.write_bytes(bytes(100))
  assert len(source.examples("train")) == 49  # the error was not cached
  path.unlink()
  assert len(source.examples("test")) == 24


def test_digest_differs_in_each_symbol_of_each_split(tmp_path):
  path, found = tmp_path / "text", set()
  for text in (b"a" * 100, b"a" * 99 + b"b", b"b" + b"a" * 99, b"a" * 110):
    path.write_bytes(text)
    digest = data.source(config("bytes", path)).digest()
    found.add(tuple(digest.items()))
  assert len(found) == 4


def test_standard_library_is_python_text_without_its_tests():
  text = contents(data.source(config("stdlib")))
  assert len(text) > 2_000_000
  assert pathlib.Path(os.__file__).read_bytes() in text
  assert b"import pytest" not in text


def test_text8_has_its_published_splits(tmp_path, monkeypatch):
  path = tmp_path / "text8"
  path.write_bytes(b"anarchz i")
  with pytest.raises(ValueError, match="9 characters, .* has 100,000,000"):
    data.source(config("text8", path)).examples("train")
  assert streams.TEXT8 == (90_000_000, 5_000_000, 5_000_000)
  monkeypatch.setattr(streams, "TEXT8", (6, 2, 1))
  splits = data.source(config("text8", path)).load()
  found = [splits[split].tolist() for split in data.SPLITS]
  assert found == [[1, 14, 1, 18, 3, 8], [26, 0], [9]]


def test_enwik8_is_split_90_5_5(tmp_path, monkeypatch):
  text = small_data.small_enwik8(tmp_path, monkeypatch)
  (tmp_path / "enwik8").write_bytes(text)
  for path in ("enwik8", "downloads/manual/enwik8.zip"):
    splits = data.source(config("enwik8", tmp_path / path)).load()
    parts = [splits[split].tobytes() for split in data.SPLITS]
    assert parts == [text[:1800], text[1800:1900], text[1900:]]


def test_other_text_is_not_mistaken_for_enwik8(tmp_path, monkeypatch):
  path = tmp_path / "enwik8"
  source = data.source(config("enwik8", path))
  path.write_bytes(b"text")
  with pytest.raises(
    ValueError, match="4 bytes with .* but enwik8 has 100,000,000"
  ):
    source.examples("train")
  text = small_data.small_enwik8(tmp_path, monkeypatch)
  path.write_bytes(text[::-1])
  with pytest.raises(
    ValueError, match="2,000 bytes with md5 .* set data.name to bytes"
  ):
    source.examples("train")


RECORDS = "the first\nrecord", "", "föx"


def test_records_are_read_as_bytes(tmp_path):
  (tmp_path / "notes.txt").write_text("x")
  small_data.write_records(tmp_path / "a.jsonl", RECORDS)
  lines = (tmp_path / "a.jsonl").read_bytes()
  (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\n" + lines))
  for documents, end in ((False, b"\n"), (True, b"\0")):
    changes = dict(length=1, documents=documents)
    source = data.source(config("jsonl", tmp_path, **changes))
    assert contents(source) == 2 * b"".join(x.encode() + end for x in RECORDS)
    assert source.separator == (0 if documents else None)


NONE = b"the fox", b"[" * 100_000, b'"text"', b'{"text": 3}', b"3", b"[{}]"
NONE += b'{"text": "\xff"}', b'{"text": "\\ud800"}', b'{"body": "a"}'


@pytest.mark.parametrize(
  "line, message",
  [
    *((line, "line 3 is not JSON with a text in its field") for line in NONE),
    (b'{"text": "a\\u0000"}', "line 3 has byte 0 at 1"),
  ],
)
def test_line_that_is_no_record_is_named(tmp_path, line, message):
  good = b'{"text": "a"}\n\n'
  (tmp_path / "x.jsonl").write_bytes(good + line + b"\n" + good)
  source = data.source(config("jsonl", tmp_path, documents=True))
  with pytest.raises(ValueError, match=f"x.jsonl, {message}"):
    source.examples("train")


# Real data.


@pytest.mark.skipif(not (SHARED / "genome").is_dir(), reason="needs the genome")
def test_whole_genome_is_read():
  path = SHARED / "genome" / "ecoli-k12-mg1655.fasta.gz"
  bases = contents(data.source(config("fasta", path)))
  counts = np.bincount(np.frombuffer(bases, np.uint8))
  assert counts.tolist() == [1_142_228, 1_179_554, 1_176_923, 1_140_970]


@pytest.mark.skipif(not (SHARED / "audio").is_dir(), reason="needs the music")
def test_music_is_resampled():
  source = data.source(config("audio", SHARED / "audio"))
  symbols = np.frombuffer(contents(source), np.uint8)
  seconds = sum(
    (path.stat().st_size - 44) / 2 / 22_050
    for path in (SHARED / "audio").glob("*.wav")
  )
  assert len(symbols) == pytest.approx(seconds * 12_000, abs=200)
  assert 0.001 < np.mean(codecs.expand(symbols) ** 2) < 0.5
