"""Tests of streams.py: which files are read and how they are split."""

import bz2
import gzip
import json
import os
import pathlib

import numpy as np
import pytest
from helpers import small_data
from helpers.errors import refused
from helpers.small_data import SHARED, TEXT, contents, source_of

from sparse_transformer import data
from sparse_transformer.data import audio, streams


def test_folder_is_read_in_the_order_of_paths_and_split(tmp_path):
  (tmp_path / "b" / "empty").mkdir(parents=True)
  (tmp_path / "c").write_bytes(TEXT[900:])
  packed = gzip.compress(TEXT[500:900])
  (tmp_path / "b" / "2.gz").write_bytes(packed)
  (tmp_path / "a").write_bytes(TEXT[:500])
  source = source_of("bytes", tmp_path)
  assert contents(source) == TEXT
  splits = source.load()
  assert len(splits["train"]) == 516
  assert len(splits["validation"]) == 257
  assert len(splits["test"]) == 258


def test_data_of_another_kind_beside_text_are_told(tmp_path, capfd):
  (tmp_path / "a.txt").write_bytes(TEXT[1:256] * 9)
  source_of("bytes", tmp_path).load()

  assert not capfd.readouterr().err
  for name in "b", "c":  # one line, not one of each folder
    (tmp_path / name).mkdir()
    (tmp_path / name / "x.tar.gz").write_bytes(gzip.compress(bytes(100)))
  source_of("bytes", tmp_path).load()
  err = capfd.readouterr().err

  assert (
    "b/x.tar.gz has zero bytes, unlike text, and other files may, too; unp"
    in err
  )
  assert err.count("\n") == 1


# Files as other programs write them, and the bytes that are read.
WRITTEN = {
  "mark": ({"a": b"\xef\xbb\xbfab"}, b"\xef\xbb\xbfab"),
  "Latin-1": ({"a": b"caf\xe9"}, b"caf\xe9"),
  "ends of lines": ({"a": b"a\r\nb\rc\n"}, b"a\r\nb\rc\n"),
  "no last newline": ({"a": b"ab", "b": b"cd"}, b"abcd"),
  "numbers": ({"a10": b"10", "a9": b"9_", "B": b"B_"}, b"B_109_"),
  "hidden": (
    {
      "a": b"abcd",
      ".b": b"x",
      "b~": b"x",
      "c.bak": b"x",
    },
    b"abcd",
  ),
  "empty": ({"a": b"", "b": b"abcd"}, b"abcd"),
  "archives": (
    {
      "a.gz": gzip.compress(b"ab"),
      "b.BZ2": bz2.compress(b"c"),
      "c.txt": b"de",
    },
    b"abcde",
  ),
}


@pytest.mark.parametrize("there, text", WRITTEN.values(), ids=WRITTEN)
def test_bytes_are_read_as_they_are(tmp_path, there, text, capfd):
  for name, content in there.items():
    (tmp_path / name).write_bytes(content)
  found = source_of("bytes", tmp_path, length=1)
  assert contents(found) == text
  assert not capfd.readouterr().err


def test_each_file_is_a_document_also_if_empty(tmp_path):
  (tmp_path / "a").write_bytes(b"")
  (tmp_path / "b").write_bytes(b"bb")
  (tmp_path / "c").write_bytes(b"c")
  source = source_of("bytes", tmp_path, documents=True)
  assert contents(source) == b"\0bb\0c\0"


def test_folder_with_a_file_that_cannot_be_read_is_an_error(tmp_path):
  (tmp_path / "a").write_bytes(TEXT)
  (tmp_path / "b").symlink_to(tmp_path / "gone")
  source = source_of("bytes", tmp_path)
  with pytest.raises(FileNotFoundError, match=f"{tmp_path}/b"):
    source.examples("train")
  # One that is not chosen does no harm.
  (tmp_path / "x.fasta").write_text(">a\nACGT\n")
  assert contents(source_of("fasta", tmp_path, length=1))


def test_files_are_read_once(tmp_path):
  path = tmp_path / "text"
  path.write_bytes(b"0")
  source = source_of("bytes", path, length=2)
  with refused("is empty"):
    source.examples("train")
  path.write_bytes(bytes(100))

  assert len(source.examples("train")) == 49  # the error was not cached
  path.unlink()
  assert len(source.examples("test")) == 24


def test_standard_library_is_python_text_without_its_tests():
  text = contents(source_of("stdlib"))
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
  for source in data.source(made), source_of(name, archive):
    encoded = {}
    for split, symbols in source.load().items():
      encoded[split] = source.codec.encode([symbols])
    assert encoded == dict(
      train=text[:1080],
      validation=text[1080:1140],
      test=text[1140:],
    )


@pytest.mark.parametrize(
  "name, change, message",
  [
    ("enwik8", lambda text: text + b"\n", "1,201 bytes with MD5"),
    ("text8", lambda text: text + b"\n", "has 1,201 bytes"),
    ("text8", lambda text: text.replace(b"t", b"T"), "40 other characters"),
    ("text8", lambda text: b"\xef\xbb\xbf" + text, "3 other characters"),
    ("text8", lambda text: text[:-1], "has 1,199 bytes"),
    ("enwik8", lambda text: text[::-1], "1,200 bytes with MD5 .* with .*; for"),
  ],
)
def test_changed_copy_of_a_published_text_is_rejected(
  tmp_path, monkeypatch, name, change, message
):
  path = pathlib.Path(small_data.write(name, tmp_path, monkeypatch).path)
  path.write_bytes(change(path.read_bytes()))
  with refused(message):
    source_of(name, path).load()


def test_standard_library_without_programs_is_an_error(tmp_path, monkeypatch):
  (tmp_path / "python.zip").touch()
  paths = {"stdlib": tmp_path}
  monkeypatch.setattr(streams.sysconfig, "get_paths", lambda: paths)
  with refused("train is empty: 0 symbols in all"):
    source_of("stdlib").load()


RECORDS = "the first\nrecord", "", "föx"


@pytest.mark.parametrize(
  "documents, end, separator",
  [
    (False, b"\n", None),
    (True, b"\0", 0),
  ],
)
def test_records_are_read_as_bytes(tmp_path, documents, end, separator):
  (tmp_path / "notes.txt").write_text("x")
  path = tmp_path / "a.jsonl"
  small_data.write_records(path, RECORDS)
  packed = gzip.compress(b"\n" + path.read_bytes())
  (tmp_path / "b.jsonl.gz").write_bytes(packed)
  source = source_of("jsonl", tmp_path, length=1, documents=documents)
  texts = [record.encode() + end for record in RECORDS]
  assert contents(source) == b"".join(texts + texts)
  assert source.separator == separator


def test_records_are_in_json_files_if_there_are_no_others(tmp_path, capfd):
  def write(name, text):
    line = json.dumps(dict(text=text)) + "\n"
    packed = gzip.compress(line.encode())
    (tmp_path / f"{name}.json.gz").write_bytes(packed)

  write("c4-train.00000-of-01024", "one")
  write("c4-train.00001-of-01024", "two")
  write("c4-validation.00000-of-00008", "three")
  splits = source_of("jsonl", tmp_path, length=1).load()
  assert bytes(splits["train"]) == b"one\ntwo\n"
  assert bytes(splits["validation"]) == b"three\n"
  assert bytes(splits["test"]) == b"three\n"

  (tmp_path / "x.jsonl").write_text('{"text": "four"}')
  capfd.readouterr()
  assert contents(source_of("jsonl", tmp_path)) == b"four\n"
  line = "files that are not read: 3, such as c4-train.00000-of-01024.json.gz\n"
  assert line in capfd.readouterr().err


LINE = b'{"text": "abcd"}'
RECORDS_WRITTEN = {
  "mark": (b"\xef\xbb\xbf" + LINE + b"\n" + LINE, b"abcd\nabcd\n"),
  "ends of lines": (LINE + b"\r\n" + LINE + b"\r\n", b"abcd\nabcd\n"),
  "blank lines": (b"\n\n" + LINE + b"\n \t\n", b"abcd\n"),
  "other fields": (b'{"n": NaN, "text": "abcd", "m": {"text": 3}}', b"abcd\n"),
  "two fields": (b'{"text": "x", "text": "abcd"}', b"abcd\n"),
  "ends in the text": (
    '{"text": "a\u2028\\r\\nb"}'.encode(),
    b"a\xe2\x80\xa8\r\nb\n",
  ),
  "empty text": (LINE + b'\n{"text": ""}', b"abcd\n\n"),
}


@pytest.mark.parametrize(
  "lines, text", RECORDS_WRITTEN.values(), ids=RECORDS_WRITTEN
)
def test_records_are_read_as_others_write_them(tmp_path, lines, text):
  (tmp_path / "x.jsonl").write_bytes(lines)
  (tmp_path / "y.jsonl").touch()  # a shard may be empty
  assert contents(source_of("jsonl", tmp_path, length=1)) == text


# Lines that are no records, and what is said of them.
NO_RECORDS = {
  b"the fox": "Expecting value",
  b"[" * 100_000: "recursion",
  b'"text"': "'str' object is not a mapping",
  b"3": "'int' object is not a mapping",
  b"[" + LINE + b"]": "'list' object is not a mapping",
  b'{"text": 3}': "got 'int'",
  b'{"text": ["a", "b"]}': "got 'list'",
  b'{"text": null}': "got 'NoneType'",
  b'{"id": 1, "body": "a"}': r"its fields are \['id', 'body'\]",
  '{"text": "\xe9"}'.encode("latin1"): "can't decode byte 0xe9",
  LINE + b"\r" + LINE: "Extra data",
}


@pytest.mark.parametrize("line", NO_RECORDS)
def test_line_that_is_no_record_is_named(tmp_path, line):
  good = b'{"text": "a"}\n\n'
  (tmp_path / "x.jsonl").write_bytes(good + line + b"\n" + good)
  phrase = "x.jsonl, line 3 is not JSON with text in its field"
  with refused(phrase, NO_RECORDS[line]):
    source_of("jsonl", tmp_path).examples("train")


@pytest.mark.parametrize(
  "content, phrase",
  [
    (LINE.decode().encode("utf-16") * 2, "line 1 is not .*UTF16 data"),
    (gzip.compress(LINE, mtime=0), "line 1 is not .*gzip data"),
    (LINE + b'\n{"text": "a\\u0000"}', "line 2 contains byte 0 at index 1"),
  ],
)
def test_other_files_of_records_are_rejected(tmp_path, content, phrase):
  (tmp_path / "x.jsonl").write_bytes(content)
  with refused(f"x.jsonl, {phrase}"):
    source_of("jsonl", tmp_path, documents=True).load()


def test_half_a_character_becomes_another_one(tmp_path, capfd):
  lines = '{"text": "a\\ud83d"}', '{"text": "\\ud83d\\ude00\\ude00"}'
  (tmp_path / "x.jsonl").write_text("\n".join(lines))
  text = contents(source_of("jsonl", tmp_path)).decode()
  assert text == "a\ufffd\n\U0001f600\ufffd\n"
  line = "x.jsonl: 2 surrogates (halves of characters) were replaced by"
  assert line in capfd.readouterr().err


# Files with labels.


def write_classes(folder, texts):
  for name, of_class in texts.items():
    (folder / name).mkdir(parents=True)
    for i, text in enumerate(of_class):
      (folder / name / f"{i:02}.txt").write_bytes(text)


TEXTS = {
  "no": [bytes([k] * (k + 1)) for k in range(20)],
  "yes": [b"abc"] * 8,
}


def sizes_of(source):
  """The number of examples of each split."""
  return [len(source.examples(split)) for split in data.SPLITS]


def test_rows_have_symbols_label_and_size(tmp_path):
  write_classes(tmp_path, TEXTS)
  source = source_of("labelled", tmp_path, length=10)
  train = np.stack([*source.examples("train")])
  test = np.stack([*source.examples("test")])
  labels = train[:, -2]
  assert source.classes == ("no", "yes")
  assert sizes_of(source) == [14, 7, 7]
  assert train.dtype == np.uint8

  # The first half of the files of each class, in an order of no class.
  no = train[labels == 0]
  assert sorted(no[:, 0]) == [*range(10)]
  for row in no:
    size = row[0] + 1
    assert (row[:size] == row[0]).all()
    assert not row[size:-2].any()
    assert row[-1] == size

  yes = [*b"abc", 0, 0, 0, 0, 0, 0, 0, 1, 3]
  np.testing.assert_array_equal(train[labels == 1], [yes] * 4)
  is_change = np.diff(labels.astype(int)) != 0
  assert is_change.sum() > 1

  assert test[:, -1].max() == 10  # cut
  window, scored = source.windows("test")[0]
  np.testing.assert_array_equal(window, test[0])
  assert scored.tolist() == [True]


GOOD = dict.fromkeys(("no", "yes"), [b"abc"] * 8)


def test_files_beside_the_folders_of_classes_are_told(tmp_path, capfd):
  write_classes(tmp_path, GOOD)
  sizes = sizes_of(source_of("labelled", tmp_path))
  assert not capfd.readouterr().err

  (tmp_path / "README.md").write_text("x")
  assert sizes_of(source_of("labelled", tmp_path)) == sizes
  line = "not read: 1, such as README.md, because they are not"
  assert line in capfd.readouterr().err

  for split in "train", "val":
    folder = tmp_path / "more" / split
    write_classes(folder, GOOD)
    (folder / "urls.txt").write_text("x")
  source_of("labelled", tmp_path / "more")
  line = "not read: 2, such as train/urls.txt, because they are not"
  assert line in capfd.readouterr().err


def test_files_of_classes_that_are_no_text_are_told(tmp_path, capfd):
  pictures = [b"\x89PNG" + bytes(20)] * 8
  write_classes(tmp_path, GOOD | {"yes": pictures})
  source_of("labelled", tmp_path).load()
  err = capfd.readouterr().err
  assert "yes/00.txt has zero bytes, unlike text" in err
  assert err.count("\n") == 1


def test_classes_are_the_upper_folders(tmp_path):
  write_classes(
    tmp_path / "no",
    {
      "a": [b"x"] * 4,
      "b": [b"y"] * 4,
    },
  )
  write_classes(
    tmp_path,
    {
      "yes": [b"abc"] * 8,
      ".cache": [b"x"] * 4,
    },
  )
  (tmp_path / "empty").mkdir()
  source = source_of("labelled", tmp_path)
  assert source.classes == ("no", "yes")
  assert sizes_of(source) == [8, 4, 4]


@pytest.mark.parametrize(
  "texts, message",
  [
    ({"a": [b"x"] * 8, "b": [b"x"]}, "train is empty: 1 files in .*b in all"),
    ({"a": [b"x"] * 8, "b": [b""] * 8}, "b/00.txt is empty; remove it"),
    ({"a": [b"x"] * 8}, "at least 2 classes, .* it contains a$"),
  ],
)
def test_classes_that_cannot_be_learned_are_an_error(tmp_path, texts, message):
  write_classes(tmp_path, texts)
  with refused(message):
    source_of("labelled", tmp_path).load()


def test_folders_of_splits_have_the_same_classes(tmp_path):
  for split in ("train", "validation", "test"):
    write_classes(tmp_path / split, TEXTS)

  def source():
    return source_of("labelled", tmp_path, length=10)

  assert sizes_of(source()) == [28, 28, 28]
  digest = source().digest()
  assert digest["examples"] == 28
  assert digest == source().digest()

  test = tmp_path / "test"
  latin = test / os.fsdecode(b"caf\xe9")
  (test / "no").rename(latin)
  with refused("names in UTF-8; .* test caf.*, yes"):
    source()
  latin.rename(test / "no")
  (test / "yes" / "00.txt").write_bytes(b"abd")
  assert source().digest() != digest

  write_classes(test, {"more": TEXTS["yes"]})
  with refused("train no, yes; .* test more, no, yes"):
    source()


# Real data.


@pytest.mark.skipif(not (SHARED / "genome").is_dir(), reason="needs the genome")
def test_whole_genome_is_read():
  path = SHARED / "genome" / "ecoli-k12-mg1655.fasta.gz"
  bases = contents(source_of("fasta", path))
  counts = np.bincount(np.frombuffer(bases, np.uint8))
  assert counts.tolist() == [1_142_228, 1_179_554, 1_176_923, 1_140_970]


@pytest.mark.skipif(not (SHARED / "audio").is_dir(), reason="needs the music")
def test_music_is_resampled():
  source = source_of("audio", SHARED / "audio")
  symbols = np.frombuffer(contents(source), np.uint8)
  seconds = sum(
    (path.stat().st_size - 44) / 2 / 22_050
    for path in (SHARED / "audio").glob("*.wav")
  )
  assert len(symbols) == pytest.approx(seconds * 12_000, abs=200)
  assert 0.001 < np.mean(audio.expand(symbols) ** 2) < 0.5
