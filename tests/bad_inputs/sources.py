"""Files of data, and the command that prepares them."""

import bz2
import gzip
import io
import lzma
import pathlib
import struct
import zipfile
from collections.abc import Callable

import numpy as np

from bad_inputs.cases import DATA, EVAL, LONG, SAMPLE, Bad, on_run, train
from bad_inputs.files import (
  Prepare,
  bind,
  fifo,
  file,
  folder,
  link,
  several,
  some_text,
  sparse,
  text_run,
)


def wav(
  rate: int = 12_000, channels: int = 1, frames: int = 500, claimed: int = 0
) -> bytes:
  """A WAV file of 16-bit samples; `claimed` is what its header says."""
  data = bytes(2 * channels * frames)
  form = struct.pack(
    "<HHIIHH", 1, channels, rate, 2 * channels * rate % 2**32, 2 * channels, 16
  )
  size = claimed or len(data)
  body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
  body += b"data" + struct.pack("<I", size) + data
  return b"RIFF" + struct.pack("<I", len(body)) + body


def float_wav(*samples: float) -> bytes:
  form = struct.pack("<HHIIHH", 3, 1, 12_000, 48_000, 4, 32)
  data = np.array(samples, "<f4").tobytes()
  body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
  body += b"data" + struct.pack("<I", len(data)) + data
  return b"RIFF" + struct.pack("<I", len(body)) + body


def zipped(*members: tuple[str, bytes]) -> bytes:
  content = io.BytesIO()
  with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
    for name, data in members:
      archive.writestr(name, data)
  return content.getvalue()


def encrypted() -> bytes:
  """A zip archive whose member says that it is encrypted."""
  data = bytearray(zipped(("a", b"text" * 99)))
  data[6] |= 1
  data[data.index(b"PK\1\2") + 8] |= 1
  return bytes(data)


def npy(shape: tuple[int, ...], dtype: str = "|u1") -> bytes:
  """The header of a .npy file, with a few bytes of data."""
  header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}"
  line = header.ljust(117).encode() + b"\n"
  return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line + bytes(99)


RANDOM = np.random.RandomState(0).bytes(3000)
ZEROS = bytes(2**24)
MANY = 2**16  # of 16 MiB: 1 TiB


def repeated(part: Callable[[], bytes], times: int) -> Callable[[str], Prepare]:
  """A file of many equal compressed streams, of which each holds 16 MiB."""

  def of(name):
    def prepare(run):
      data, size = part(), 0
      with pathlib.Path(name).open("wb") as file:
        while size < times * len(data):
          size += file.write(data * 1000)

    return prepare

  return of


# What data.path names, for data.name=bytes; and what the error says.
TEXTS: tuple[tuple[str, str, Prepare | None], ...] = (
  ("", "data.path", None),
  ("nowhere", "nowhere.*data.path", None),
  ("~no-such-user/text", "~no-such-user/text", None),
  (LONG, "long", None),
  ("text/more", "text/more", some_text),
  ("text\udcff", "text", None),
  # Not regular files.
  ("fifo", "fifo", fifo("fifo")),
  ("socket", "socket", bind("socket")),
  ("/dev/zero", "/dev/zero", None),
  ("/dev/urandom", "/dev/urandom", None),
  ("/dev/tty", "/dev/tty", None),
  ("/dev/null", "/dev/null|empty", None),
  ("fifo.gz", "fifo.gz", fifo("fifo.gz")),
  ("fifo.zip", "fifo.zip", fifo("fifo.zip")),
  ("zero.gz", "zero.gz|/dev/zero", link("zero.gz", "/dev/zero")),
  ("zero", "zero", link("zero", "/dev/zero")),
  ("loop", "loop", link("loop", "loop")),
  ("dangling", "dangling", link("dangling", "nothing")),
  ("folder", "folder has no file", folder("folder")),
  ("folder", "fifo", several(folder("folder"), fifo("folder/fifo"))),
  ("folder", "folder has no file", folder("folder/folder")),
  (
    "folder",
    "z is a",
    several(folder("folder"), link("folder/z", "/dev/zero")),
  ),
  ("folder.zip", "empty|folder.zip", folder("folder.zip")),
  # Too small, too large.
  ("text", "empty", file("text")),
  ("text", "data.length=32", file("text", b"short " * 3)),
  ("text", "text.*memory", sparse("text", 2**43)),
  # Archives.
  ("a.gz", "a.gz is (damaged|empty)|empty", file("a.gz")),
  ("a.gz", "a.gz is damaged", file("a.gz", b"text" * 100)),
  ("a.gz", "a.gz is damaged", file("a.gz", gzip.compress(RANDOM)[:2000])),
  ("a.gz", "a.gz is damaged", file("a.gz", gzip.compress(RANDOM)[:-4])),
  ("a.gz", "a.gz is damaged", file("a.gz", gzip.compress(RANDOM) + b"\1" * 99)),
  ("a.bz2", "a.bz2 is damaged", file("a.bz2", bz2.compress(RANDOM)[:2000])),
  ("a.bz2", "a.bz2 is damaged", file("a.bz2", b"BZh9" + RANDOM)),
  ("a.bz2", "a.bz2 is damaged|empty", file("a.bz2")),
  ("a.xz", "a.xz is damaged", file("a.xz", lzma.compress(RANDOM)[:2000])),
  ("a.xz", "a.xz is damaged", file("a.xz", RANDOM)),
  ("a.XZ", "a.XZ is damaged", file("a.XZ", RANDOM)),
  ("a.zip", "a.zip is damaged", file("a.zip")),
  ("a.zip", "a.zip is damaged", file("a.zip", RANDOM)),
  ("a.zip", "a.zip is damaged", file("a.zip", zipped(("a", RANDOM))[:-30])),
  ("a.zip", "a.zip is damaged", file("a.zip", zipped(("a", RANDOM))[30:])),
  ("a.zip", "empty", file("a.zip", zipped())),
  ("a.zip", "empty", file("a.zip", zipped(("folder/", b"")))),
  ("a.zip", "a.zip.*(password|encrypted)", file("a.zip", encrypted())),
  # More than any memory holds.
  (
    "a.gz",
    "a.gz.*(memory|expands)",
    repeated(lambda: gzip.compress(ZEROS, 9), MANY // 16)("a.gz"),
  ),
  (
    "a.bz2",
    "a.bz2.*(memory|expands)",
    repeated(lambda: bz2.compress(ZEROS), MANY)("a.bz2"),
  ),
)

# {data.name: what data.path names, as above}
OF_OTHER_KINDS: dict[str, tuple[tuple[str, str, Prepare | None], ...]] = {
  "fasta": (
    ("dna.fa", "dna.fa is not a FASTA", file("dna.fa")),
    ("dna.fa", "dna.fa is not a FASTA", file("dna.fa", b"ACGT" * 100)),
    ("dna.fa", "empty", file("dna.fa", b">only a header")),
    ("dna.fa", "dna.fa.*ACGT", file("dna.fa", b">a\n" + b"PROTEIN" * 99)),
    ("dna.fa", "dna.fa.*ACGT", file("dna.fa", b">a\n" + RANDOM)),
    ("dna", r"dna has no file.*\.fasta", folder("dna")),
    ("dna", r"dna has no file.*\.fasta", file("dna/dna.txt", b">a\nACGT")),
    ("dna", "a.fa", several(folder("dna"), fifo("dna/a.fa"))),
    ("dna", "dna has no file", folder("dna/a.fa")),
    ("dna.fa.gz", "dna.fa.gz is damaged", file("dna.fa.gz", b">a\nACGT" * 9)),
  ),
  "audio": (
    ("a.wav", "a.wav is damaged", file("a.wav")),
    ("a.wav", "a.wav is damaged", file("a.wav", RANDOM)),
    ("a.wav", "a.wav is damaged", file("a.wav", wav()[:500])),
    ("a.wav", "a.wav is damaged", file("a.wav", b"RIFF\0\0\0\0WAVE")),
    ("a.wav", "a.wav has 2 channels", file("a.wav", wav(channels=2))),
    ("a.wav", "empty|a.wav", file("a.wav", wav(frames=0))),
    ("a.wav", "a.wav.*0", file("a.wav", wav(rate=0))),
    ("a.wav", "a.wav.*1", file("a.wav", wav(rate=1, frames=10**6))),
    ("a.wav", "a.wav|empty|length", file("a.wav", wav(rate=2**32 - 1))),
    ("a.wav", "a.wav", file("a.wav", wav(claimed=2**32 - 2))),
    ("a.wav", "sample 1 is nan", file("a.wav", float_wav(0, np.nan, 0))),
    ("a.wav", "sample 1 is inf", file("a.wav", float_wav(0, np.inf, 0))),
    ("music", r"music has no file.*\.wav", folder("music")),
    ("music", "a.wav", several(folder("music"), fifo("music/a.wav"))),
  ),
  "text8": (
    ("text", "text has 1,000 .*text8 has", some_text),
    ("text", "text.*a to z", file("text", b"UPPER" * 99)),
    ("fifo", "fifo", fifo("fifo")),
    ("folder", "folder", folder("folder")),
    ("", "data.path", None),
  ),
  "enwik8": (
    ("text", "text has 1,000 bytes, but enwik8 has", some_text),
    ("folder", "folder.*prepare enwik8", folder("folder")),
    ("nowhere", "nowhere.*prepare enwik8", None),
    ("fifo", "fifo", fifo("fifo")),
    ("/dev/zero", "/dev/zero", None),
    ("a.zip", "a.zip is damaged", file("a.zip", RANDOM)),
  ),
  "cifar10": (
    ("folder", "folder.*prepare cifar10", folder("folder")),
    ("text", "text.*prepare cifar10|text", some_text),
    (
      "folder",
      "damaged|cifar10",
      file("folder/cifar10/3.0.2/cifar10-train.array_record-0-of-1", RANDOM),
    ),
    (
      "folder",
      "cifar10",
      file("folder/cifar10/3.x/cifar10-train.array_record-0-of-1", RANDOM),
    ),
  ),
  "imagenet64": (
    ("folder", "folder.*downsampled_imagenet", folder("folder")),
    *(
      ("npy", message, file("npy/train_64x64.npy", content))
      for message, content in (
        ("train_64x64.npy is damaged", b""),
        ("train_64x64.npy is damaged", RANDOM),
        ("train_64x64.npy is damaged", npy((10**6, 64, 64, 3))),
        ("train_64x64.npy", npy((10**30, 64, 64, 3))),
        ("train_64x64.npy", npy((-1, 64, 64, 3))),
        ("valid_64x64.npy", npy((0, 64, 64, 3))),
        ("train_64x64.npy holds float", npy((1, 4), "<f4")),
        ("train_64x64.npy holds uint8", npy((3, 3))),
        ("train_64x64.npy holds uint8", npy(())),
        ("train_64x64.npy", npy((1,), "|O")),
      )
    ),
    (
      "npy",
      "train_64x64.npy",
      several(folder("npy"), fifo("npy/train_64x64.npy")),
    ),
  ),
}


def data():
  small = "--config.data.length=32", "--config.data.columns=8"
  for path, message, prepare in TEXTS:
    words = "--config.data.name=bytes", f"--config.data.path={path}"
    yield train(*words, *small, message=message, prepare=prepare)
  for name, cases in OF_OTHER_KINDS.items():
    for path, message, prepare in cases:
      words = f"--config.data.name={name}", f"--config.data.path={path}"
      yield train(*words, *small, message=message, prepare=prepare)
  # Other commands read the same files.
  for path, message, step in (
    ("nowhere", "nowhere", None),
    ("fifo", "fifo", fifo("fifo")),
    ("/dev/zero", "/dev/zero", None),
    ("a.gz", "a.gz is damaged", file("a.gz", RANDOM)),
  ):
    prepare = several(text_run, step) if step else text_run
    word = f"--config.data.path={path}"
    yield on_run(EVAL, word, message=message, prepare=prepare)
    word = f"--prompt={path}"
    yield on_run(SAMPLE, word, message=message, prepare=prepare)
  for words, message in (
    (("--prompt=",), "prompt|checkpoint"),
    (("--prompt=empty",), "empty has 0 symbols.*32"),
    (("--prompt=text",), "text has 500 symbols.*32"),
    (("--prompt=folder",), "folder"),
    (("--prompt=empty", "--given=3"), "--given and --prompt"),
    (("--given=33",), "given=33 .*32"),
  ):
    files = text_run, file("empty"), folder("folder")
    yield on_run(SAMPLE, *words, message=message, prepare=several(*files))
  for word in (
    "--min_context=-1",
    "--min_context=32",
    f"--min_context={2**70}",
    "--min_context=0,32",
  ):
    yield on_run(EVAL, word, message=word[2:13], prepare=text_run)


def preparing():
  for words, message in (
    ((), "usage.*prepare.*cifar10"),
    (("prepare",), "usage"),
    (("prepair", "cifar10"), "usage"),
    (("prepare", "mnist"), "mnist.*cifar10"),
    (("prepare", ""), "''"),
    (("prepare", "digits"), "digits.*cifar10"),
    (("prepare", "cifar10", "enwik8"), "usage"),
    (("prepare", "cifar10", "--data_dri=x"), "data_dri"),
    (("prepare", "cifar10", "--data_dir"), "data_dir"),
    (("prepare", "../cifar10"), "cifar10"),
  ):
    yield Bad(DATA, words, message)
  words = "prepare", "enwik8", "--data_dir=data"
  yield Bad(DATA, words, "data", file("data", "mine"))
  for content in b"", RANDOM, zipped(("enwik8", b"text")):
    path = "data/downloads/manual/enwik8.zip"
    message = "data/downloads.* is damaged|enwik8.zip"
    yield Bad(DATA, words, message, file(path, content))
