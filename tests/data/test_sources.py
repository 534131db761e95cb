"""Tests of sparse_transformer/data.py and datasets/: no network, small data."""

import bz2
import dataclasses
import gzip
import hashlib
import io
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import time
import types
import zipfile

import numpy as np
import pytest

from sparse_transformer import data
from sparse_transformer.data import codecs, tfds as prepared

REPO = pathlib.Path(__file__).parents[2]
SHARED = REPO.parent / "shared" / "data"
needs_cifar10 = pytest.mark.skipif(
  not (SHARED / "tensorflow_datasets" / "cifar10").is_dir(),
  reason="needs a prepared CIFAR-10",
)


def config(name, path="", length=16, columns=4, fractions=(0.9, 0.05, 0.05)):
  return types.SimpleNamespace(
    name=name,
    path=str(path),
    length=length,
    columns=columns,
    fractions=fractions,
    rate=12_000,
  )


def stream(size, length, columns=4):
  """A stream whose three splits are the same `size` random bytes."""
  split = np.random.RandomState(size).randint(1, 256, size).astype(np.uint8)
  return data.Stream(length, columns, lambda: dict.fromkeys(data.SPLITS, split))


def contents(source):
  """All bytes of the three splits of a stream, in order."""
  parts = []
  for split in data.SPLITS:
    windows = source.windows(split)
    parts += [tokens[scored].tobytes() for tokens, scored in windows]
  return b"".join(parts)


def image_bytes(source, split):
  return [image.tobytes() for image in source.examples(split)]


# Batches.


def test_batches_depend_only_on_seed_and_step():
  examples = np.arange(10, dtype=np.uint8)[:, None]
  first = data.batches(examples, 4, seed=3)
  in_order = [first[step] for step in range(12)]
  again = data.batches(examples, 4, seed=3)
  for step in reversed(range(12)):
    np.testing.assert_array_equal(again[step], in_order[step])
  other = data.batches(examples, 4, seed=4)
  assert any((other[step] != in_order[step]).any() for step in range(12))
  assert in_order[0].shape == (4, 1)
  assert in_order[0].dtype == np.uint8


@pytest.mark.parametrize("batch_size", [1, 4, 10, 23])
def test_each_epoch_has_each_example_once_in_an_order_of_its_own(batch_size):
  examples = np.arange(10, dtype=np.uint8)[:, None]
  batches = data.batches(examples, batch_size, seed=0)
  steps = -(-30 // batch_size)
  flat = np.concatenate([batches[step] for step in range(steps)])[:30]
  epochs = flat.reshape(3, 10)
  np.testing.assert_array_equal(np.sort(epochs), [list(range(10))] * 3)
  assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batches_never_end():
  batches = data.batches(np.arange(10, dtype=np.uint8)[:, None], 4, seed=0)
  assert batches[10**12].shape == (4, 1)


def test_empty_batches_are_an_error():
  with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
    data.batches(np.zeros((3, 1)), 0, seed=0)


def test_batches_of_a_stream_are_windows_of_it():
  source = stream(size=100, length=16)
  text = source.load()["train"].tobytes()
  batch = data.batches(source.examples("train"), 8, seed=1)[5]
  assert batch.shape == (8, 16)
  assert all(row.tobytes() in text for row in batch)


# Streams.


def test_examples_start_at_each_byte():
  source = stream(size=20, length=16)
  examples = source.examples("train")
  text = source.load()["train"]
  assert len(examples) == len(list(examples)) == 5
  for i in range(5):
    np.testing.assert_array_equal(examples[i], text[i : i + 16])
  np.testing.assert_array_equal(examples[-1], text[4:])
  with pytest.raises(IndexError):
    examples[5]


@pytest.mark.parametrize("size", [1, 12, 13, 14, 26, 31, 97])
@pytest.mark.parametrize("min_context", [0, 1, 5, 6, 12])
def test_windows_score_each_byte_once_with_its_context(size, min_context):
  source = stream(size, length=13)
  text = source.load()["test"]
  count = np.zeros(size, int)
  for i, (tokens, scored) in enumerate(source.windows("test", min_context)):
    assert tokens.shape == scored.shape == (13,)
    assert (tokens.dtype, scored.dtype) == (np.uint8, bool)
    first = i * (13 - min_context)
    for t in range(13):
      if first + t >= size:
        assert tokens[t] == 0 and not scored[t]
      else:
        assert tokens[t] == text[first + t]
        count[first + t] += scored[t]
        assert not scored[t] or i == 0 or t >= min_context
  np.testing.assert_array_equal(count, 1)


@pytest.mark.parametrize("min_context", [-1, 13, 14])
def test_context_outside_of_the_window_is_an_error(min_context):
  with pytest.raises(ValueError, match=rf"={min_context} must .*length=13"):
    stream(size=50, length=13).windows("test", min_context)


def test_split_shorter_than_a_window_is_scored_but_not_trained_on():
  source = stream(size=5, length=13)
  ((tokens, scored),) = source.windows("train", 4)
  assert scored.tolist() == [True] * 5 + [False] * 8
  assert tokens[:5].tolist() == source.load()["train"].tolist()
  with pytest.raises(ValueError, match=r"train has 5 symbols.*length=13.*use"):
    source.examples("train")


@pytest.mark.parametrize("length, columns", [(0, 4), (16, 0), (-1, 4)])
def test_stream_without_positions_is_an_error(length, columns):
  with pytest.raises(ValueError, match=f"length={length} .*columns={columns}"):
    data.source(config("stdlib", length=length, columns=columns))


# Sources.


@pytest.mark.parametrize(
  "name, vocab_size, shape, length, unit",
  [
    ("digits", 17, (8, 8, 1), 64, "bits/dim"),
    ("cifar10", 256, (32, 32, 3), 3072, "bits/dim"),
    ("imagenet64", 256, (64, 64, 3), 12_288, "bits/dim"),
    ("bytes", 256, (3, 7), 16, "bits/byte"),
    ("stdlib", 256, (3, 7), 16, "bits/byte"),
    ("enwik8", 256, (3, 7), 16, "bits/byte"),
  ],
)
def test_geometry_is_known_without_the_data(
  name, vocab_size, shape, length, unit
):
  source = data.source(config(name, path="/nowhere", columns=7))
  assert source.vocab_size == vocab_size
  assert source.shape == shape
  assert source.length == length
  assert source.unit == unit
  assert dataclasses.is_dataclass(source)


def test_import_needs_no_library_but_numpy():
  code = (
    "import sys, sparse_transformer.data; print({m.split('.')[0] for m in"
    " sys.modules} & {'tensorflow_datasets', 'grain', 'PIL', 'sklearn', 'jax'})"
  )
  command = [sys.executable, "-c", code]
  assert subprocess.check_output(command, cwd=REPO, text=True) == "set()\n"


def test_unknown_source_is_an_error_that_lists_the_known():
  known = ", ".join(data.SOURCES)
  with pytest.raises(ValueError, match=f"data.name='cifar'; known: {known}"):
    data.source(config("cifar"))


@pytest.mark.parametrize("name", ["digits", "cifar10", "stdlib", "enwik8"])
@pytest.mark.parametrize("method", ["examples", "windows"])
def test_unknown_split_is_an_error_that_lists_the_known(name, method):
  with pytest.raises(ValueError, match="'dev'; known: train, validation, test"):
    getattr(data.source(config(name)), method)("dev")


@pytest.mark.parametrize(
  "fractions",
  [(0.9, 0.1), (0.9, 0.1, 0.0), (0.5, 0.2, 0.2), (1.2, -0.1, -0.1)],
)
def test_wrong_fractions_are_an_error(fractions):
  with pytest.raises(ValueError, match="three positive.*sum 1"):
    data.source(config("bytes", fractions=fractions))


def test_digits_are_split_without_overlap():
  import sklearn.datasets

  source = data.source(config("digits"))
  splits = [image_bytes(source, split) for split in data.SPLITS]
  assert [len(split) for split in splits] == [1397, 200, 200]
  images = sklearn.datasets.load_digits().images.astype(np.uint8)
  # All digits are different, so that equal sorted lists mean no overlap.
  everything = sorted(image.tobytes() for image in images)
  assert sorted(sum(splits, [])) == everything
  assert len(set(everything)) == 1797
  assert max(map(max, everything)) == 16


def test_images_are_their_own_windows():
  source = data.source(config("digits"))
  windows = source.windows("test")
  assert len(windows) == 200
  tokens, scored = windows[7]
  np.testing.assert_array_equal(tokens, source.examples("test")[7])
  assert tokens.shape == (64,) and tokens.dtype == np.uint8
  assert scored.dtype == bool and scored.all()
  with pytest.raises(ValueError, match="min_context=3 must be 0 for images"):
    source.windows("test", 3)


def test_standard_library_is_python_text_without_its_tests():
  source = data.source(config("stdlib", length=1000))
  text = source.load()["train"].tobytes()
  assert len(text) > 1_000_000
  assert pathlib.Path(os.__file__).read_bytes() in contents(source)
  assert b"import" in text and b"import pytest" not in text


def test_splits_are_read_once(tmp_path):
  (tmp_path / "text").write_bytes(b"0123456789")
  source = data.source(config("bytes", tmp_path / "text", length=2))
  with pytest.raises(ValueError, match="is empty"):
    source.examples("train")
  (tmp_path / "text").write_bytes(bytes(100))
  assert len(source.examples("train")) == 89  # an error was not kept
  (tmp_path / "text").unlink()
  assert len(source.examples("test")) == 4


# Files.

TEXT = bytes(range(256)) * 4 + b"the end"


def write_zip(path, members):
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    for name, content in members.items():
      archive.writestr(name, content)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", ["", ".txt", ".GZ", *COMPRESS])
def test_file_is_read_through_its_compression(tmp_path, suffix):
  file = tmp_path / f"text{suffix}"
  file.write_bytes(COMPRESS.get(suffix.lower(), bytes)(TEXT))
  source = data.source(config("bytes", file, fractions=(0.5, 0.25, 0.25)))
  assert contents(source) == TEXT
  sizes = [len(source.load()[split]) for split in data.SPLITS]
  assert sizes == [516, 257, 258]


def test_zip_is_read_in_the_order_of_names(tmp_path):
  members = {"b/2": TEXT[500:900], "b/": b"", "a": TEXT[:500], "c": TEXT[900:]}
  write_zip(tmp_path / "text.zip", members)
  assert contents(data.source(config("bytes", tmp_path / "text.zip"))) == TEXT


def test_folder_is_read_in_the_order_of_paths(tmp_path):
  (tmp_path / "b" / "empty").mkdir(parents=True)
  (tmp_path / "c").write_bytes(TEXT[900:])
  (tmp_path / "b" / "2.gz").write_bytes(gzip.compress(TEXT[500:900]))
  (tmp_path / "a").write_bytes(TEXT[:500])
  assert contents(data.source(config("bytes", tmp_path))) == TEXT


@pytest.mark.parametrize("suffix", [*COMPRESS, ".zip"])
@pytest.mark.parametrize("damage", ["cut", "short", "garbage", "flipped", "0"])
def test_damaged_archive_is_an_error_that_names_it(tmp_path, suffix, damage):
  file = tmp_path / f"text{suffix}"
  if suffix == ".zip":
    write_zip(file, {"text": TEXT})
  else:
    file.write_bytes(COMPRESS[suffix](TEXT))
  good = file.read_bytes()
  middle = len(good) // 2
  flipped = bytes(255 - byte for byte in good[middle : middle + 9])
  file.write_bytes(
    {
      "cut": good[:middle],
      "short": good[:-1],
      "garbage": b"this is no archive at all",
      "flipped": good[:middle] + flipped + good[middle + 9 :],
      "0": good[:2],
    }[damage]
  )
  source = data.source(config("bytes", file))
  with pytest.raises(ValueError, match=f"{file} is damaged .*get it again"):
    source.examples("train")


def test_missing_path_is_an_error(tmp_path):
  with pytest.raises(FileNotFoundError, match=f"no file or folder {tmp_path}"):
    data.source(config("bytes", tmp_path / "none")).examples("train")
  with pytest.raises(FileNotFoundError, match="data.path is not set"):
    data.source(config("bytes")).examples("train")


@pytest.mark.parametrize("text", [b"", b"ab"])
def test_empty_split_is_an_error(tmp_path, text):
  (tmp_path / "text").write_bytes(text)
  with pytest.raises(ValueError, match=f"is empty: {len(text)} symbols in all"):
    data.source(config("bytes", tmp_path / "text")).windows("test")


def test_folder_without_files_is_an_error(tmp_path):
  with pytest.raises(ValueError, match="is empty: 0 symbols"):
    data.source(config("bytes", tmp_path)).windows("test")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs a sample of text")
def test_sample_of_wikipedia_is_read():
  path = SHARED / "text" / "enwiki-sample.xml.bz2"
  source = data.source(config("bytes", path, length=12_288, columns=128))
  text = contents(source)
  assert len(text) == 6_089_746
  assert text == bz2.decompress(path.read_bytes())
  assert source.shape == (96, 128)


# enwik8, in small.


@pytest.fixture
def enwik8(monkeypatch, tmp_path):
  """A text of 2,000 bytes in place of enwik8; its zip is in tmp_path."""
  import tensorflow_datasets as tfds

  from sparse_transformer.data.builders import enwik8

  text = np.random.RandomState(0).bytes(2_000)
  write_zip(tmp_path / "enwik8.zip", {"enwik8": text})
  raw = (tmp_path / "enwik8.zip").read_bytes()
  info = tfds.core.download.checksums.UrlInfo(
    len(raw), hashlib.sha256(raw).hexdigest(), "enwik8.zip"
  )
  url = "http://nowhere.invalid/enwik8.zip"
  monkeypatch.setattr(enwik8, "URL", url)
  for name, value in {
    "SIZE": 2_000,
    "MD5": hashlib.md5(text).hexdigest(),
    "RECORD": 50,
    "url_infos": {url: info},
  }.items():
    monkeypatch.setattr(enwik8.Enwik8, name, value)
  return text


def by_hand(root, archive):
  """Puts an archive where the messages tell the user to put it."""
  folder = root / "downloads" / "manual"
  folder.mkdir(parents=True)
  shutil.copy(archive, folder)


def test_enwik8_is_split_as_90_5_5(tmp_path, enwik8):
  (tmp_path / "enwik8").write_bytes(enwik8)
  for name in ("enwik8", "enwik8.zip"):
    source = data.source(config("enwik8", tmp_path / name))
    parts = [source.load()[split].tobytes() for split in data.SPLITS]
    assert parts == [enwik8[:1800], enwik8[1800:1900], enwik8[1900:]]


def test_other_text_is_not_taken_for_enwik8(tmp_path, enwik8):
  (tmp_path / "enwik8").write_bytes(enwik8[:-1])
  with pytest.raises(ValueError, match="1,999 bytes and enwik8 2,000"):
    data.source(config("enwik8", tmp_path / "enwik8")).examples("train")
  (tmp_path / "enwik8").write_bytes(enwik8[::-1])
  with pytest.raises(ValueError, match="has md5 .* and enwik8 .*get it from"):
    data.source(config("enwik8", tmp_path / "enwik8")).examples("train")


def test_real_enwik8_has_its_published_size(tmp_path):
  (tmp_path / "enwik8").write_bytes(TEXT)
  with pytest.raises(ValueError, match="1,031 bytes and enwik8 100,000,000"):
    data.source(config("enwik8", tmp_path / "enwik8")).examples("train")


def test_enwik8_is_prepared_from_an_archive_put_by_hand(
  tmp_path, enwik8, monkeypatch, capsys
):
  root = tmp_path / "root"
  by_hand(root, tmp_path / "enwik8.zip")
  builder = prepared.prepare("enwik8", str(root))
  assert builder.info.splits["train"].num_examples == 36
  source = data.source(config("enwik8", root))
  parts = [source.load()[split].tobytes() for split in data.SPLITS]
  assert parts == [enwik8[:1800], enwik8[1800:1900], enwik8[1900:]]
  # Prepared again, or in the default place: the same data.
  shutil.rmtree(root / "downloads")
  prepared.prepare("enwik8", str(root))
  monkeypatch.setenv("TFDS_DATA_DIR", str(root))
  assert contents(data.source(config("enwik8"))) == enwik8
  assert "tensorflow" not in sys.modules


def test_archive_in_the_download_cache_needs_no_network(tmp_path, enwik8):
  from tensorflow_datasets.core.download import resource

  from sparse_transformer.data.builders import enwik8 as module

  ((url, info),) = module.Enwik8.url_infos.items()
  cache = tmp_path / "root" / "downloads" / "enwik8"
  cache.mkdir(parents=True)
  archive = cache / resource.get_dl_fname(url, info.checksum)
  shutil.copy(tmp_path / "enwik8.zip", archive)
  archive.with_name(archive.name + ".INFO").write_text("{}")
  prepared.prepare("enwik8", str(tmp_path / "root"))
  assert contents(data.source(config("enwik8", tmp_path / "root"))) == enwik8


def test_wrong_archive_is_an_error_and_leaves_nothing(tmp_path, enwik8):
  write_zip(tmp_path / "enwik8.zip", {"enwik8": enwik8[::-1]})
  by_hand(tmp_path / "root", tmp_path / "enwik8.zip")
  with pytest.raises(ValueError, match=r"manual/enwik8.zip.*wrong checksum"):
    prepared.prepare("enwik8", str(tmp_path / "root"))
  with pytest.raises(FileNotFoundError):
    data.source(config("enwik8", tmp_path / "root")).examples("train")


def test_prepare_without_network_says_where_to_put_the_archive(
  tmp_path, enwik8
):
  start = time.monotonic()
  place = tmp_path / "root" / "downloads" / "manual" / "enwik8.zip"
  with pytest.raises(
    ConnectionError, match=f"nowhere.invalid/.*put the file at {place}"
  ):
    prepared.prepare("enwik8", str(tmp_path / "root"))
  assert time.monotonic() - start < 10
  assert not (tmp_path / "root").exists()


def test_prepare_gives_up_on_a_host_that_does_not_answer(
  tmp_path, enwik8, monkeypatch
):
  monkeypatch.setattr(prepared, "PATIENCE", 0.1)

  def urlopen(*args, **kwargs):
    time.sleep(0.5)
    raise TimeoutError

  monkeypatch.setattr("urllib.request.urlopen", urlopen)
  with pytest.raises(ConnectionError, match="no answer in 0.1 seconds"):
    prepared.prepare("enwik8", str(tmp_path))


@pytest.mark.parametrize("name", ["cifar10", "enwik8", "imagenet64"])
def test_data_set_that_is_not_prepared_is_an_error(tmp_path, name):
  remedy = {
    "imagenet64": "prepare it where TensorFlow is installed",
  }.get(name, f"{prepared.COMMAND} {name} --data_dir={tmp_path}")
  with pytest.raises(FileNotFoundError, match=re.escape(remedy)):
    data.source(config(name, tmp_path)).examples("train")


def test_unknown_data_set_is_not_prepared():
  with pytest.raises(ValueError, match="'digits'; known: cifar10, enwik8"):
    prepared.prepare("digits")


@pytest.mark.parametrize("words", [[], ["prepare"], ["fetch", "cifar10"]])
def test_command_without_a_data_set_prints_its_usage(words):
  command = [sys.executable, "-m", "sparse_transformer.data", *words]
  result = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
  assert result.returncode == 1
  (line,) = result.stderr.splitlines()
  assert f"usage: {prepared.COMMAND} cifar10|enwik8" in line


def test_command_says_where_the_data_went(tmp_path, enwik8):
  by_hand(tmp_path, tmp_path / "enwik8.zip")
  folder = prepared.prepare("enwik8", str(tmp_path)).data_path
  # Run again, the command finds the data that is there.
  command = [sys.executable, "-m", "sparse_transformer.data", "prepare"]
  command += ["enwik8", f"--data_dir={tmp_path}"]
  output = subprocess.check_output(command, cwd=REPO, text=True)
  sizes = "36 train, 2 validation, 2 test"
  assert f"enwik8 is in {folder}: {sizes} records" in output


# CIFAR-10.


@pytest.fixture
def small_cifar10(monkeypatch, tmp_path):
  """Batch files of 8 images in a tar in tmp_path; (images, labels) by file."""
  import tensorflow_datasets as tfds

  from sparse_transformer.data.builders import cifar10

  builder = cifar10.Cifar10Bytes
  archive = tmp_path / "cifar-10-binary.tar.gz"
  random = np.random.RandomState(0)
  files = {}
  with tarfile.open(archive, "w:gz") as tar:
    # Neither sorted nor alone, as in the published archive.
    for name in (
      "readme.html",
      *builder.TEST_FILES,
      *builder.TRAIN_FILES[::-1],
    ):
      files[name] = random.randint(0, 256, (8, 3073)).astype(np.uint8)
      member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
      member.size = files[name].size
      tar.addfile(member, io.BytesIO(files[name].tobytes()))
  raw = archive.read_bytes()
  info = tfds.core.download.checksums.UrlInfo(
    len(raw), hashlib.sha256(raw).hexdigest(), archive.name
  )
  monkeypatch.setattr(builder, "IMAGES_PER_FILE", 8)
  monkeypatch.setattr(builder, "url_infos", {cifar10.URL: info})
  monkeypatch.setitem(data.HELD_OUT, "cifar10", 6)
  by_hand(tmp_path, archive)
  return files


def test_cifar10_is_prepared_and_read_back(tmp_path, small_cifar10):
  builder = prepared.prepare("cifar10", str(tmp_path))
  assert builder.data_path.parent == tmp_path / "cifar10_bytes"
  source = data.source(config("cifar10", tmp_path))
  train, validation, test = (image_bytes(source, k) for k in data.SPLITS)
  assert (len(train), len(validation), len(test)) == (34, 6, 8)

  def expected(names):
    planes = np.concatenate([small_cifar10[name][:, 1:] for name in names])
    pixels = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return sorted(image.tobytes() for image in pixels)

  assert sorted(test) == expected(builder.TEST_FILES)
  assert sorted(train + validation) == expected(builder.TRAIN_FILES)


@pytest.mark.parametrize("images", [7, 9])
def test_cifar10_of_another_size_is_refused(
  tmp_path, small_cifar10, monkeypatch, images
):
  from sparse_transformer.data.builders import cifar10

  monkeypatch.setattr(cifar10.Cifar10Bytes, "IMAGES_PER_FILE", images)
  message = f"has {8 * 3073} bytes, must have {images * 3073}"
  with pytest.raises(ValueError, match=message):
    prepared.prepare("cifar10", str(tmp_path))
  assert not (tmp_path / "cifar10_bytes" / "1.0.0").exists()


def test_cifar10_with_a_missing_file_is_refused(
  tmp_path, small_cifar10, monkeypatch
):
  from sparse_transformer.data.builders import cifar10

  monkeypatch.setattr(cifar10.Cifar10Bytes, "TEST_FILES", ("test_2.bin",))
  with pytest.raises(ValueError, match=r"has no \['test_2.bin'\]"):
    prepared.prepare("cifar10", str(tmp_path))


@needs_cifar10
def test_stock_cifar10_is_read():
  import PIL.Image
  import tensorflow_datasets as tfds

  source = data.source(config("cifar10", SHARED / "tensorflow_datasets"))
  sizes = [len(source.examples(split)) for split in data.SPLITS]
  assert sizes == [48_000, 2_000, 10_000]
  examples = source.examples("train")
  pixels = np.stack([examples[i] for i in range(0, 48_000, 160)])
  # Published channel means of the training set: 0.491, 0.482, 0.447.
  means = pixels.reshape(-1, 3).mean(0) / 255
  np.testing.assert_allclose(means, [0.491, 0.482, 0.447], atol=0.03)
  assert (pixels.min(), pixels.max()) == (0, 255)

  builder = tfds.builder(
    "cifar10",
    data_dir=SHARED / "tensorflow_datasets",
    file_format="array_record",
  )
  skip = {"image": tfds.decode.SkipDecoding()}
  png = builder.as_data_source("test", decoders=skip)[0]["image"]
  image = PIL.Image.open(io.BytesIO(png))
  tokens = source.examples("test")[0]
  assert (tokens.shape, tokens.dtype) == ((3072,), np.uint8)
  x, y = 5, 20
  assert tuple(tokens.reshape(32, 32, 3)[y, x]) == image.getpixel((x, y))
  np.testing.assert_array_equal(tokens, np.asarray(image).ravel())


@needs_cifar10
def test_held_out_images_are_not_trained_on():
  source = data.source(config("cifar10", SHARED / "tensorflow_datasets"))
  held_out = image_bytes(source, "validation")
  again = data.source(config("cifar10", SHARED / "tensorflow_datasets"))
  assert held_out == image_bytes(again, "validation")
  sample = {source.examples("train")[i].tobytes() for i in range(0, 48_000, 40)}
  assert not sample & set(held_out)


@pytest.fixture
def stock(tmp_path):
  """A copy of the test split of stock CIFAR-10, to be damaged."""
  folder = tmp_path / "cifar10" / "3.0.2"
  folder.mkdir(parents=True)
  for file in (SHARED / "tensorflow_datasets" / "cifar10" / "3.0.2").iterdir():
    if "train" in file.name:
      (folder / file.name).symlink_to(file)
    else:
      (folder / file.name).write_bytes(file.read_bytes())
  return folder


@needs_cifar10
@pytest.mark.parametrize("size", [0, 100, 12_000_000, -10])
def test_truncated_records_are_found_when_they_are_opened(stock, size):
  file = stock / "cifar10-test.array_record-00000-of-00001"
  os.truncate(file, size % file.stat().st_size)
  source = data.source(config("cifar10", stock.parents[1]))
  with pytest.raises(ValueError, match=f"{stock} is damaged or truncated"):
    source.examples("test")


@needs_cifar10
def test_records_that_are_too_few_are_found_when_they_are_opened(stock):
  train = stock / "cifar10-train.array_record-00000-of-00001"
  train.unlink()
  train.symlink_to(stock / "cifar10-test.array_record-00000-of-00001")
  source = data.source(config("cifar10", stock.parents[1]))
  with pytest.raises(ValueError, match="49999 out of bound 10000"):
    source.examples("train")


@needs_cifar10
def test_flipped_byte_is_found_when_its_record_is_read(stock):
  file = stock / "cifar10-test.array_record-00000-of-00001"
  content = bytearray(file.read_bytes())
  content[1000] ^= 255
  file.write_bytes(content)
  examples = data.source(config("cifar10", stock.parents[1])).examples("test")
  assert examples[9_999].shape == (3072,)
  with pytest.raises(ValueError, match=f"{stock} is damaged or truncated"):
    examples[0]


@needs_cifar10
@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
@pytest.mark.parametrize("content", [None, b"{", b"{}"])
def test_broken_description_of_a_data_set_is_an_error(stock, name, content):
  (stock / name).unlink()
  if content:
    (stock / name).write_bytes(content)
  source = data.source(config("cifar10", stock.parents[1]))
  with pytest.raises(ValueError, match=f"{stock} is damaged or truncated"):
    source.examples("test")


@needs_cifar10
def test_newest_finished_version_is_read(stock):
  root = stock.parents[1]
  shutil.copytree(stock, stock.with_name("3.0.10"), symlinks=True)
  shutil.copytree(stock, stock.with_name("incomplete.X_4.0.0"), symlinks=True)
  assert prepared.find(config("cifar10", root), "cifar10").name == "3.0.10"


def test_imagenet64_holds_out_the_last_of_its_training_images(
  tmp_path, monkeypatch
):
  import PIL.Image
  import tensorflow_datasets as tfds

  def images(first, last):
    for i in range(first, last):
      file = io.BytesIO()
      PIL.Image.new("RGB", (64, 64), (i, 0, 255)).save(file, "PNG")
      file.seek(0)
      yield f"{i}.png", file

  builder = tfds.builder(
    "downsampled_imagenet/64x64", data_dir=tmp_path, file_format="array_record"
  )
  monkeypatch.setattr(
    builder,
    "_split_generators",
    lambda dl_manager: {
      "train": builder._generate_examples(images(0, 9)),
      "validation": builder._generate_examples(images(9, 13)),
    },
  )
  builder.download_and_prepare()
  monkeypatch.setitem(data.HELD_OUT, "imagenet64", 3)
  source = data.source(config("imagenet64", tmp_path))
  levels = [[x[0] for x in source.examples(split)] for split in data.SPLITS]
  assert [len(split) for split in levels] == [6, 3, 4]
  assert sorted(levels[0] + levels[1]) == list(range(9))
  assert sorted(levels[2]) == list(range(9, 13))
  assert source.examples("test")[0].shape == (12_288,)
  assert source.examples("test")[0][1:3].tolist() == [0, 255]


# Other symbols.


@pytest.fixture
def arrays(tmp_path, monkeypatch):
  """ImageNet in two small arrays: (folder, training images)."""
  monkeypatch.setitem(data.HELD_OUT, "imagenet64", 2)
  rng = np.random.RandomState(0)
  train, valid = (
    rng.randint(0, 256, (size, 64, 64, 3)).astype(np.uint8) for size in (5, 3)
  )
  np.save(tmp_path / "train_64x64.npy", train)
  np.save(tmp_path / "valid_64x64.npy", valid)
  return tmp_path, train, valid


def test_imagenet_is_read_from_arrays(arrays):
  folder, train, valid = arrays
  source = data.source(config("imagenet64", folder))
  for split, expected in (
    ("train", train[:3]),
    ("validation", train[3:]),
    ("test", valid),
  ):
    found = np.stack(list(source.examples(split)))
    np.testing.assert_array_equal(found, expected.reshape(len(expected), -1))


@pytest.mark.parametrize(
  "spoil, message",
  [
    (lambda path: path.write_bytes(path.read_bytes()[:9000]), "damaged"),
    (lambda path: path.unlink(), "no file"),
    (lambda path: np.save(path, np.zeros((5, 3), np.uint8)), "uint8 .5, 3."),
    (lambda path: np.save(path, np.zeros((5, 64, 64, 3))), "float64"),
  ],
)
def test_array_that_holds_no_images_is_named(spoil, message, arrays):
  folder, *_ = arrays
  spoil(folder / "valid_64x64.npy")
  source = data.source(config("imagenet64", folder))
  with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
    source.examples("test")
  assert "valid_64x64.npy" in str(error.value)


def test_text8_of_another_size_is_refused(tmp_path):
  (tmp_path / "text8").write_bytes(b"anarchism")
  source = data.source(config("text8", tmp_path / "text8"))
  assert (source.vocab_size, source.unit) == (27, "bits/character")
  with pytest.raises(ValueError, match="9 characters, text8 100,000,000"):
    source.examples("train")


def test_text8_is_split_as_it_is_by_all(tmp_path, monkeypatch):
  monkeypatch.setattr(data, "TEXT8", (6, 2, 1))
  (tmp_path / "text8").write_bytes(b"anarch is")
  source = data.source(config("text8", tmp_path / "text8", length=1))
  found = [source.load()[split].tolist() for split in data.SPLITS]
  assert found == [[1, 14, 1, 18, 3, 8], [0, 9], [19]]


def test_folder_without_such_files_is_named(tmp_path):
  (tmp_path / "notes.txt").write_text("x")
  for name, suffix in (("audio", ".wav"), ("fasta", ".fasta")):
    source = data.source(config(name, tmp_path))
    with pytest.raises(FileNotFoundError, match=f"ends in {suffix}"):
      source.examples("train")


def test_digest_tells_data_apart(tmp_path):
  path, found = tmp_path / "text", set()
  for text in (b"a" * 100, b"a" * 99 + b"b", b"b" + b"a" * 99, b"a" * 110):
    path.write_bytes(text)
    source = data.source(config("bytes", path, length=4))
    found.add(tuple(source.digest().items()))
  assert len(found) == 4  # the second differs in the test split alone
  digits = data.source(config("digits"))
  assert digits.digest() == data.source(config("digits")).digest()
  assert digits.digest()["images"] == 1397


def test_digest_of_images_covers_every_byte_of_their_files(arrays):
  folder, *_ = arrays
  before = data.source(config("imagenet64", folder)).digest()
  assert before["images"] == 3
  for name in ("train_64x64.npy", "valid_64x64.npy"):
    content = bytearray((folder / name).read_bytes())
    content[-7000] ^= 1
    (folder / name).write_bytes(content)
    after = data.source(config("imagenet64", folder)).digest()
    assert after != before
    before = after


@needs_cifar10
@pytest.mark.parametrize("split", ["train", "test"])
def test_damaged_record_is_noticed_before_the_first_step(split, tmp_path):
  shutil.copytree(
    SHARED / "tensorflow_datasets" / "cifar10",
    tmp_path / "cifar10",
    copy_function=shutil.copyfile,
  )
  whole = data.source(config("cifar10", tmp_path)).digest()
  assert whole["images"] == 48_000
  assert whole == data.source(config("cifar10", tmp_path)).digest()
  (file,) = tmp_path.glob(f"cifar10/*/*{split}.array_record-*")
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)
  with pytest.raises(ValueError, match=f"{file.name} is damaged"):
    data.source(config("cifar10", tmp_path)).digest()


@pytest.mark.skipif(not (SHARED / "genome").is_dir(), reason="needs the genome")
def test_whole_genome_is_read():
  path = SHARED / "genome" / "ecoli-k12-mg1655.fasta.gz"
  source = data.source(config("fasta", path, length=64))
  bases = np.concatenate([source.load()[split] for split in data.SPLITS])
  counts = np.bincount(bases, minlength=4)
  assert counts.tolist() == [1_142_228, 1_179_554, 1_176_923, 1_140_970]


@pytest.mark.skipif(not (SHARED / "audio").is_dir(), reason="needs the music")
def test_music_is_read_at_its_rate():
  source = data.source(config("audio", SHARED / "audio", length=64))
  symbols = np.concatenate([source.load()[split] for split in data.SPLITS])
  seconds = sum(
    (path.stat().st_size - 44) / 2 / 22_050
    for path in (SHARED / "audio").glob("*.wav")
  )
  assert len(symbols) == pytest.approx(seconds * 12_000, abs=200)
  assert 0.001 < np.mean(codecs.expand(symbols) ** 2) < 0.5
