"""Tests of streams.py: which files are read and how they are split."""

import gzip
import json
import os
import pathlib

import numpy as np
import pytest
import small_data
from small_data import SHARED, TEXT, config, contents

from sparse_transformer import data
from sparse_transformer.data import codecs


def test_folder_is_read_in_the_order_of_paths_and_split(tmp_path):
  (tmp_path / "b" / "empty").mkdir(parents=True)
  (tmp_path / "c").write_bytes(TEXT[900:])
  (tmp_path / "b" / "2.gz").write_bytes(gzip.compress(TEXT[500:900]))
  (tmp_path / "a").write_bytes(TEXT[:500])
  source = data.source(config("bytes", tmp_path))
  assert contents(source) == TEXT
  sizes = [len(source.load()[split]) for split in data.SPLITS]
  assert sizes == [516, 257, 258]


def test_data_of_another_kind_beside_text_are_told(tmp_path, capfd):
  (tmp_path / "a.txt").write_bytes(TEXT[1:256] * 9)
  data.source(config("bytes", tmp_path)).load()
  assert not capfd.readouterr().err
  for name in "b", "c":  # one line, not one of each folder
    (tmp_path / name).mkdir()
    (tmp_path / name / "x.tar.gz").write_bytes(gzip.compress(bytes(100)))
  data.source(config("bytes", tmp_path)).load()
  err = capfd.readouterr().err
  assert "b/x.tar.gz has zero bytes, unlike text, and so may others: unp" in err
  assert err.count("\n") == 1


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
    found.add(str(digest))
  assert len(found) == 4


def test_standard_library_is_python_text_without_its_tests():
  text = contents(data.source(config("stdlib")))
  assert len(text) > 2_000_000
  assert pathlib.Path(os.__file__).read_bytes() in text
  assert b"import pytest" not in text


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_published_text_is_read_from_its_file_or_archive(
  tmp_path, monkeypatch, name
):
  made = small_data.write(name, tmp_path, monkeypatch)
  text = (tmp_path / name).read_bytes()
  archive = tmp_path / f"{name}.zip"
  small_data.write_zip(archive, {name: text})
  for source in data.source(made), data.source(config(name, archive)):
    splits = source.load()
    parts = [source.codec.encode([splits[split]]) for split in data.SPLITS]
    assert parts == [text[:1080], text[1080:1140], text[1140:]]


def test_other_text_is_not_mistaken_for_a_published_one(tmp_path, monkeypatch):
  path = tmp_path / "other"
  small_data.write("enwik8", tmp_path, monkeypatch)
  path.write_bytes((tmp_path / "enwik8").read_bytes()[::-1])
  with pytest.raises(ValueError, match="1,200 bytes with MD5 .* with .*; for"):
    data.source(config("enwik8", path)).examples("train")


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


def test_records_are_in_json_files_if_there_are_no_others(tmp_path, capfd):
  pack = lambda *texts: gzip.compress(
    b"".join(json.dumps(dict(text=x)).encode() + b"\n" for x in texts)
  )
  names = "c4-train.0000{}-of-01024.json.gz", "c4-validation.00000-of-00008"
  for i, text in enumerate(("one", "two")):
    (tmp_path / names[0].format(i)).write_bytes(pack(text))
  (tmp_path / f"{names[1]}.json.gz").write_bytes(pack("three"))
  found = data.source(config("jsonl", tmp_path, length=1)).load()
  found = [bytes(found[split]) for split in data.SPLITS]
  assert found == [b"one\ntwo\n", b"three\n", b"three\n"]
  (tmp_path / "x.jsonl").write_text('{"text": "four"}')
  capfd.readouterr()
  assert contents(data.source(config("jsonl", tmp_path))) == b"four\n"
  line = "files that are not read: 3, such as c4-train.00000-of-01024.json.gz\n"
  assert line in capfd.readouterr().err


NONE = b"the fox", b"[" * 100_000, b'"text"', b'{"text": 3}', b"3", b"[{}]"
NONE += b'{"text": "\xff"}', b'{"body": "a"}'


@pytest.mark.parametrize(
  "line, message",
  [
    *((line, "line 3 is not JSON with a text in its field") for line in NONE),
    (b'{"text": "a\\u0000"}', "line 3 has byte 0 at 1"),
    (b'{"id": 1, "body": "a"}', r"line 3 .*: its fields are \['id', 'body'\]"),
  ],
)
def test_line_that_is_no_record_is_named(tmp_path, line, message):
  good = b'{"text": "a"}\n\n'
  (tmp_path / "x.jsonl").write_bytes(good + line + b"\n" + good)
  source = data.source(config("jsonl", tmp_path, documents=True))
  with pytest.raises(ValueError, match=f"x.jsonl, {message}"):
    source.examples("train")


def test_half_a_character_becomes_another_one(tmp_path, capfd):
  lines = '{"text": "a\\ud83d"}', '{"text": "\\ud83d\\ude00\\ude00"}'
  (tmp_path / "x.jsonl").write_text("\n".join(lines))
  text = contents(data.source(config("jsonl", tmp_path))).decode()
  assert text == "a\ufffd\n\U0001f600\ufffd\n"
  line = "x.jsonl: 2 halves of characters became U+FFFD"
  assert line in capfd.readouterr().err


# Files with labels.


def write_classes(folder, texts):
  for name, of_class in texts.items():
    (folder / name).mkdir(parents=True)
    for i, text in enumerate(of_class):
      (folder / name / f"{i:02}.txt").write_bytes(text)


TEXTS = {"no": [bytes([k] * (k + 1)) for k in range(20)], "yes": [b"abc"] * 8}


def test_rows_have_symbols_label_and_size(tmp_path):
  write_classes(tmp_path, TEXTS)
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


def test_folders_of_splits_have_the_same_classes(tmp_path):
  for split in ("train", "validation", "test"):
    write_classes(tmp_path / split, TEXTS)
  source = lambda: data.source(config("labelled", tmp_path, length=10))
  assert [len(source().examples(x)) for x in data.SPLITS] == [28] * 3
  digest = source().digest()
  assert digest["examples"] == 28 and digest == source().digest()
  latin = tmp_path / "test" / os.fsdecode(b"caf\xe9")
  (tmp_path / "test" / "no").rename(latin)
  with pytest.raises(ValueError, match="names in UTF-8; .* test caf.*, yes"):
    source()
  latin.rename(tmp_path / "test" / "no")
  (tmp_path / "test" / "yes" / "00.txt").write_bytes(b"abd")
  assert source().digest() != digest
  write_classes(tmp_path / "test", {"more": TEXTS["yes"]})
  with pytest.raises(ValueError, match="train no, yes; .* test more, no, yes"):
    source()


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
