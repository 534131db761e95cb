"""Small data sets for the tests of sources: no network, few bytes."""

import hashlib
import io
import json
import pathlib
import sysconfig
import tarfile
import types
import zipfile

import numpy as np
import scipy.io.wavfile
from PIL import Image

from sparse_transformer import data
from sparse_transformer.data import (
  array_records,
  download,
  images,
  registered,
  streams,
)

REPO = pathlib.Path(__file__).parents[2]
SHARED = REPO.parent / "shared" / "data"  # real data, if present
TEXT = bytes(range(256)) * 4 + b"the end"


def config(name, path="", **changes):
  """The `data` group of a config."""
  fields = dict(length=16, columns=4, fractions=(0.5, 0.25, 0.25), rate=12_000)
  fields |= dict(symbols=7, period=6, noise=0.2, pairs=3, documents=False)
  fields |= dict(vocab_size=70_000, sizes=(9, 3, 3))
  return types.SimpleNamespace(name=name, path=str(path), **fields | changes)


def contents(source):
  """All bytes of the three splits of a stream, in order."""
  return b"".join(source.load()[split].tobytes() for split in data.SPLITS)


def write_zip(path, members):
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    for name, content in members.items():
      archive.writestr(name, content)


def put_archive(root, name, content):
  """Writes an archive where messages tell users to; returns its UrlInfo."""
  import tensorflow_datasets as tfds

  path = root / "downloads" / "manual" / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content)
  checksum = hashlib.sha256(content).hexdigest()
  return tfds.core.download.checksums.UrlInfo(len(content), checksum, name)


def small_enwik8(root, patch):
  """Puts an archive of 2,000 bytes in place of enwik8; returns the bytes."""
  from sparse_transformer.data.builders import Enwik8

  text = np.random.RandomState(0).bytes(2_000)
  archive = io.BytesIO()
  write_zip(archive, {"enwik8": text})
  info = put_archive(root, "enwik8.zip", archive.getvalue())
  url = "http://nowhere.invalid/enwik8.zip"
  patch.setattr(Enwik8, "url_infos", {url: info})
  patch.setattr(Enwik8, "SIZE", 2_000)
  patch.setattr(Enwik8, "MD5", hashlib.md5(text).hexdigest())
  patch.setattr(Enwik8, "RECORD", 50)
  return text


def small_cifar10(root, patch):
  """Puts an archive with 8 images per file; returns the files by name."""
  from sparse_transformer.data.builders import Cifar10Bytes as builder

  random = np.random.RandomState(0)
  files = {}
  archive = io.BytesIO()
  with tarfile.open(fileobj=archive, mode="w:gz") as tar:
    # With other files and unsorted, as in the published archive.
    for name in ("readme", *builder.TEST_FILES, *builder.TRAIN_FILES[::-1]):
      files[name] = random.randint(0, 256, (8, 3073)).astype(np.uint8)
      files[name][:, 0] %= 10  # labels
      member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
      member.size = files[name].size
      tar.addfile(member, io.BytesIO(files[name].tobytes()))
  info = put_archive(root, "cifar-10-binary.tar.gz", archive.getvalue())
  patch.setattr(builder, "url_infos", dict.fromkeys(builder.url_infos, info))
  patch.setattr(builder, "IMAGES_PER_FILE", 8)
  patch.setattr(images, "CIFAR10_HELD_OUT", 6)
  return files


def small_imagenet64(folder, patch):
  """Writes arrays of 5 and 3 images, which it returns."""
  patch.setattr(images, "IMAGENET64_HELD_OUT", 2)
  pixels = np.random.RandomState(0).randint(0, 256, (8, 64, 64, 3))
  train, valid = np.split(pixels.astype(np.uint8), [5])
  np.save(folder / "train_64x64.npy", train)
  np.save(folder / "valid_64x64.npy", valid)
  return train, valid


def write_pictures(folder, images, suffix=".png"):
  """Writes images as files 000.png, 001.png, ..."""
  folder.mkdir(parents=True, exist_ok=True)
  for i, image in enumerate(images):
    Image.fromarray(image).save(folder / f"{i:03}{suffix}")


def write_records(path, texts):
  """Writes texts as JSON Lines."""
  path.write_text("".join(json.dumps(dict(text=x)) + "\n" for x in texts))


def register_toys():
  """Adds two sources: one registration each, and a builder for the second."""

  @data.register("toy_stream")
  def toy_stream(config):
    splits = dict.fromkeys(data.SPLITS, np.arange(99, dtype=np.uint8))
    return data.Stream(config.length, config.columns, lambda: splits)

  @data.register("toy_images", builder="small_data.toy:Toy")
  def toy_images(config):
    def load():
      folder = array_records.find(config, "toy")
      return {k: array_records.read(folder, k, "image") for k in data.SPLITS}

    return data.Images((2, 3, 1), 256, load)


def write(name, folder, patch):
  """Writes small data for a source; returns its config."""
  path = folder
  if name in ("bytes", "stdlib"):
    (folder / "text.py").write_bytes(TEXT)
    patch.setattr(sysconfig, "get_paths", lambda: {"stdlib": folder})
  elif name == "enwik8":
    small_enwik8(folder, patch)
  elif name == "text8":
    patch.setattr(streams, "TEXT8", (200, 50, 50))
    path = folder / "text8"
    path.write_bytes(b"the quick brown fox jumps over" * 10)
  elif name == "jsonl":
    write_records(folder / "x.jsonl", ["some text", "and\nmore"] * 20)
  elif name == "tokens":
    path = folder / "x.npy"
    np.save(path, np.random.RandomState(0).randint(0, 70_000, 300, np.uint32))
  elif name == "images":
    pixels = np.random.RandomState(0).randint(0, 256, (12, 5, 4, 3), np.uint8)
    write_pictures(folder, pixels)
  elif name == "fasta":
    (folder / "x.fasta").write_bytes(b">x\n" + b"ACGTNRacgu\n" * 20)
  elif name == "audio":
    scipy.io.wavfile.write(folder / "x.wav", 12_000, np.sin(np.arange(300.0)))
  elif name == "cifar10":
    small_cifar10(folder, patch)
  elif name == "imagenet64":
    small_imagenet64(folder, patch)
  elif name == "toy_images":
    from small_data import toy

    put_archive(folder, "toy.bin", toy.ARCHIVE)
  if name in registered.BUILDERS:
    download.prepare(name, str(folder))
  return config(name, "" if name in registered.WITHOUT_PATH else path)
