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
from sparse_transformer.data import cifar10, generated, images, sources, streams

REPO = pathlib.Path(__file__).parents[3]
SHARED = REPO.parent / "shared" / "data"  # real data, if present
TEXT = bytes(range(256)) * 4 + b"the end"


def config(name, path="", **changes):
  """The `data` group of a config."""
  fields = dict(
    length=16,
    columns=4,
    fractions=(0.5, 0.25, 0.25),
    rate=12_000,
    symbols=7,
    period=6,
    noise=0.2,
    pairs=3,
    documents=False,
    vocab_size=2**16,
    sizes=(9, 3, 3),
    orders=(),
    splits="auto",
  )
  return types.SimpleNamespace(
    name=name,
    path=str(path),
    **fields | changes,
  )


def source_of(name, path="", **changes):
  """The source of a config."""
  return data.source(config(name, path, **changes))


def contents(source):
  """All bytes of the three splits of a stream, in order."""
  return b"".join(source.load()[split].tobytes() for split in data.SPLITS)


def write_zip(path, members):
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    for name, content in members.items():
      archive.writestr(name, content)


def small_cifar10(root, patch):
  """Puts an archive with 8 images per file where messages tell users to.

  Returns the files by name.
  """
  from tensorflow_datasets.core.download.checksums import UrlInfo

  from sparse_transformer.data import download

  builder = download.Cifar10Bytes
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

  content = archive.getvalue()
  path = root / "downloads" / "manual" / download.ARCHIVE.filename
  path.parent.mkdir(parents=True)
  path.write_bytes(content)
  checksum = hashlib.sha256(content).hexdigest()
  info = UrlInfo(len(content), checksum, path.name)
  patch.setattr(download, "ARCHIVE", info)
  patch.setattr(builder, "url_infos", {download.URL: info})
  patch.setattr(builder, "IMAGES_PER_FILE", 8)
  patch.setattr(cifar10, "HELD_OUT", 6)
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


# Of the files of each source in any folder.
SUFFIXES = dict(
  bytes=".txt",
  jsonl=".jsonl",
  tokens=".bin",
  fasta=".fasta",
  audio=".wav",
  images=".png",
  labelled=".txt",
)


def write_symbols(path, symbols):
  """Writes uint8 symbols in the format of the path's suffix."""
  path.parent.mkdir(parents=True, exist_ok=True)
  match path.suffix:
    case ".bin":
      symbols.astype("<u2").tofile(path)
    case ".wav":
      scipy.io.wavfile.write(path, 12_000, symbols)
    case ".png":
      Image.fromarray(symbols.reshape(-1, 4)).save(path)
    case ".jsonl":
      write_records(path, [symbols.tobytes().decode("latin1")])
    case ".fasta":
      path.write_text(">x\n" + "".join("ACGT"[x % 4] for x in symbols))
    case _:
      path.write_bytes(symbols.tobytes())


def write_records(path, texts):
  path.write_text("".join(json.dumps(dict(text=x)) + "\n" for x in texts))


def write(name, folder, patch):
  """Writes small data for a source; returns its config."""
  path = folder
  if name in ("bytes", "stdlib"):
    (folder / "text.py").write_bytes(TEXT)
    patch.setattr(sysconfig, "get_paths", lambda: {"stdlib": folder})
  elif name in ("enwik8", "text8"):
    path = folder / name
    path.write_bytes(text := b"the quick brown fox jumps over" * 40)
    patch.setattr(streams, "SIZE", len(text))
    patch.setattr(streams, "ENWIK8", hashlib.md5(text).hexdigest())
  elif name in ("repeat", "recall"):
    patch.setattr(generated, "SIZES", dict.fromkeys(data.SPLITS, 2**12))
  elif name == "jsonl":
    write_records(folder / "x.jsonl", ["some text", "and\nmore"] * 20)
  elif name == "tokens":
    path = folder / "x.npy"
    np.save(path, np.random.RandomState(0).randint(0, 2**16, 300, np.uint16))
  elif name == "images":
    pixels = np.random.RandomState(0).randint(0, 256, (12, 5, 4, 3), np.uint8)
    write_pictures(folder, pixels)
  elif name == "fasta":
    (folder / "x.fasta").write_bytes(b">x\n" + b"ACGTNRacgu\n" * 20)
  elif name == "audio":
    scipy.io.wavfile.write(folder / "x.wav", 12_000, np.sin(np.arange(300.0)))
  elif name in ("cifar10", "cifar10_distaug"):
    from sparse_transformer.data import download

    small_cifar10(folder, patch)
    download.prepare(str(folder))
  elif name == "imagenet64":
    small_imagenet64(folder, patch)

  return config(name, "" if name in sources.WITHOUT_PATH else path)
