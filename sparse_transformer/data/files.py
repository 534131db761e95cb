"""Files of data: listing them, and reading them, compressed or not."""

import bz2
import contextlib
import errno
import gzip
import lzma
import os
import pathlib
import re
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from sparse_transformer import atomic

# Functions that decompress all members of a file. For bz2 and xz, Python's own
# functions are not used, because they silently ignore invalid data after a
# member.
DECOMPRESS: Any = {
  ".gz": gzip.decompress,
  ".bz2": lambda data: _members(bz2.BZ2Decompressor, data),
  ".xz": lambda data: _members(lzma.LZMADecompressor, data),
}
# The number of bytes read at once.
BLOCK = 2**24
# The size in bytes of the largest file that is read as a whole. Larger arrays
# can be mapped into memory.
LARGEST = 2**36
# The first bytes of other kinds of files.
KINDS = re.compile(
  rb"(?s)(?P<Zstandard>\x28\xb5\x2f\xfd)|(?P<tar>.{257}ustar)|(?P<Parquet>PAR1)"
  rb"|(?P<gzip>\x1f\x8b)|(?P<zip>PK\x03\x04)|(?P<UTF16>\xff\xfe|\xfe\xff)"
)
# Endings of names of files that are not data: those of backups, incomplete
# downloads and operating systems, and the table that `tokens.Tokens` reads.
NO_DATA = ("~", ".bak", ".part", "__MACOSX", "Thumbs.db", "token_bytes.npy")
# {name of a file or folder: its split}.
SPLIT_OF = {
  "train": "train",
  "training": "train",
  "test": "test",
  "val": "validation",
  "valid": "validation",
  "validation": "validation",
  "dev": "validation",
}
NAME = f"(?i:({'|'.join(SPLIT_OF)}))"
# The name of a split as a whole word, as in "my-train.txt", but not in
# "constrain.txt".
WORD = re.compile(rf"(?<![a-zA-Z0-9]){NAME}(?![a-zA-Z])")
# The topics about which `warn` has already printed a warning.
WARNED: set[str] = set()


def warn(message: str, topic: str = "") -> None:
  """Prints a warning on standard error, once per process.

  Args:
    message: what is unusual, and its consequence.
    topic: the topic of the message. Only the first message about a topic is
      printed, because a warning may apply to thousands of files. The default
      topic is the message itself.
  """
  topic = topic or message
  if topic not in WARNED:
    WARNED.add(topic)
    print(f"warning: {message}", file=sys.stderr)


@contextlib.contextmanager
def blame(culprit: pathlib.Path | str) -> Iterator[None]:
  """Converts errors of a library to a ValueError that names a file.

  Errors of the operating system are not converted. The exception is EINVAL,
  which occurs when a library seeks to an invalid position in the file.

  Args:
    culprit: the file or folder that is read, which the error names.
  """
  try:
    yield
  except Exception as error:
    # Errors of the operating system, such as that of a full disk, are clear by
    # themselves.
    code = getattr(error, "errno", None)
    if code not in (None, errno.EINVAL) or isinstance(error, MemoryError):
      raise

    reason = " ".join(str(error).split()) or type(error).__name__
    # NumPy's error about the header of a .npy file is not clear by itself.
    call = "its header has a call, such as np.int64(9); write a plain number"
    reason = re.sub("malformed node or string.*", call, reason)
    raise ValueError(
      f"{culprit} is damaged or truncated, or its format is not supported; copy"
      f" or download it again, or convert it: {reason}"
    ) from error


def from_config(path: str) -> pathlib.Path:
  """Returns the path in a config field, where ~ means the home folder."""
  return pathlib.Path(os.path.expanduser(path))


def check_path(path: str) -> pathlib.Path:
  """Returns the path in `data.path`.

  Raises FileNotFoundError if it is empty or does not exist.
  """
  if not path:
    raise FileNotFoundError(
      "data.path is not set; set it to a file or a folder"
    )
  existing = from_config(path)
  if not existing.exists():
    raise FileNotFoundError(
      f"no file or folder {existing}; set data.path to one that"
      f" exists{atomic.nearest(existing)}"
    )
  return existing


def check_names(place: pathlib.Path, names: Iterable[str]) -> None:
  """Warns if the names of files to concatenate refer to different splits.

  Args:
    place: the folder or archive that contains them.
    names: the names of the files.
  """
  # The name of a single split is fine, because shards of a train split may be
  # divided by fractions.
  example_of = {}
  for name in names:
    for word in WORD.findall(name):
      example_of[SPLIT_OF[word.lower()]] = name
  if len(example_of) > 1:
    warn(
      f"{place} contains {', '.join(example_of.values())}, but is split by"
      " data.fractions; to split by names, put them into a folder as train, val"
      " and test"
    )


def is_hidden(name: str) -> bool:
  """Returns whether to ignore a file by its name, such as .git or a.txt~."""
  return name.startswith(".") or name.endswith(NO_DATA)


def has_suffix(path: pathlib.Path, *suffixes: str) -> bool:
  """Returns whether a file has one of these suffixes; "" means any suffix.

  For a compressed file such as a.txt.gz, the suffix is .txt. If the
  uncompressed file exists, too, the compressed one is ignored.
  """
  suffix = path.suffix.lower()
  if suffix in (*DECOMPRESS, ".zip"):
    # If a folder contained a.txt and a.txt.gz, the text would be read twice.
    inner = path.with_suffix("")
    return not inner.exists() and has_suffix(inner, *suffixes)
  return "" in suffixes or suffix in suffixes


def find(path: pathlib.Path, *suffixes: str) -> list[pathlib.Path]:
  """Lists a file, or all files below a folder, sorted by path.

  Args:
    path: a folder, or a file with any suffix.
    *suffixes: the suffixes of files to list, see `has_suffix`.

  Raises:
    FileNotFoundError: the folder contains no such file.
  """
  if not path.is_dir():
    return [path]
  # Sort, because operating systems list files in different orders.
  paths = sorted(x for x in below(path) if has_suffix(x, *suffixes))
  if not paths:
    ending = "" if "" in suffixes else f" that ends in {', '.join(suffixes)}"
    raise FileNotFoundError(
      f"{path} has no file{ending}; set data.path to another file or folder"
    )
  return paths


def below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the files below a folder.

  Links are followed, but each folder is visited only once.
  """

  def fail(error):
    raise error

  visited = set()
  for parent, folders, names in os.walk(folder, True, fail, followlinks=True):
    # Otherwise, a link to a parent folder would cause an endless loop.
    real = os.path.realpath(parent)
    if real in visited:
      folders.clear()
      continue
    visited.add(real)
    # os.walk descends only into the folders left in this list.
    folders[:] = sorted(x for x in folders if not is_hidden(x))
    for name in names:
      if not is_hidden(name):
        yield pathlib.Path(parent, name)


class Mapped(np.memmap):
  """A memory-mapped file. It must not be truncated while it is mapped."""

  def __getitem__(self, key: Any) -> Any:
    file: Any = self._mmap  # type: ignore[attr-defined]
    # Reading beyond the end of the file would kill the process.
    if file and file.size() < len(file):
      raise OSError(f"{self.filename} has become shorter since it was opened")
    return super().__getitem__(key)


def map_array(path: pathlib.Path) -> np.ndarray:
  """Memory-maps the array in a .npy file; maps any other file as uint16.

  Raises ValueError if the file is not a regular file, is damaged, or contains
  more than one array. If the file becomes shorter later, indexing the array
  raises OSError.
  """
  size = atomic.size(path)
  with blame(path):
    if path.suffix.lower() != ".npy":
      # This is the format of nanoGPT: only tokens, little-endian on every
      # machine.
      return np.memmap(path, "<u2", mode="r").view(Mapped)
    array = np.lib.format.open_memmap(path, mode="r")
    # np.save can append arrays to an open file, but NumPy reads only the first.
    if rest := size - array.offset - array.nbytes:
      raise ValueError(
        f"{rest:,} bytes follow its array; save only one array in a file"
      )
    return array.view(Mapped)


def read(path: pathlib.Path) -> bytes:
  """Returns the `parts` of a file, concatenated."""
  return b"".join(parts(path))


def parts(path: pathlib.Path) -> list[bytes]:
  """Returns the decompressed contents of a file, as a list of one item.

  For a .zip file, the list has an item for each file in it, sorted by name.
  Raises ValueError if the file is not a regular file, is damaged or is too
  large.
  """
  size = atomic.size(path)
  if size > LARGEST:
    raise ValueError(
      f"{path} has {size:,} bytes, more than the limit of {LARGEST:,}; save the"
      " data as a .npy file of uint8, and set data.name=tokens, which maps the"
      " file into memory"
    )

  suffix = path.suffix.lower()
  with path.open("rb") as raw, blame(path):
    if suffix == ".zip":
      return _read_zip(path, zipfile.ZipFile(raw))
    if suffix not in DECOMPRESS:
      return [raw.read()]
    if not size:
      # For an empty file, some libraries return b"" and others raise an error.
      raise ValueError("it is empty")
    return [DECOMPRESS[suffix](raw.read())]


def _read_zip(path, archive):
  """Returns the contents of the files in an archive, without hidden files."""
  # Sort by name, because the order in an archive depends on how it was created.
  names: list[str] = []
  for name in sorted(archive.namelist()):
    if any(map(is_hidden, name.split("/"))):
      continue
    # One may be a copy or a later version of the other.
    if name in names[-1:]:
      raise ValueError(f"two of its members are named {name}")
    names.append(name)

  check_names(path, names)
  return [archive.read(name) for name in names if not name.endswith("/")]


def _members(decompressor, data):
  """Returns the concatenated contents of all members of a bz2 or xz file."""
  contents = []
  while data:
    # A file may consist of several members, as after `cat a.xz b.xz`.
    member = decompressor()
    contents.append(member.decompress(data))
    if not member.eof:
      raise EOFError("its last member is cut off")
    data = member.unused_data
    if not data.strip(b"\0"):  # .xz files may be padded with zeros
      break
  return b"".join(contents)


def kind(data: bytes) -> str:
  """Names the format of binary data, such as "gzip data"; "" for text."""
  if match := KINDS.match(data):
    return f"{match.lastgroup} data"
  return "zero bytes" if b"\0" in data else ""


def crc32(*paths: pathlib.Path) -> int:
  """Returns the CRC-32 of the concatenated contents of files, as stored."""
  crc = 0
  for path in paths:
    with path.open("rb") as file:
      # Update the CRC-32 block by block, because a file may not fit in memory.
      while block := file.read(BLOCK):
        crc = zlib.crc32(block, crc)
  return crc
