"""Files of data: which there are, and their contents, compressed or not."""

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

# Decompress all members of a file. Python's own functions for bz2 and xz
# silently drop data after a member that do not begin another one.
DECOMPRESS: Any = {
  ".gz": gzip.decompress,
  ".bz2": lambda data: _members(bz2.BZ2Decompressor, data),
  ".xz": lambda data: _members(lzma.LZMADecompressor, data),
}
# The number of bytes read at once.
BLOCK = 2**24
# The largest file read as a whole, in bytes; arrays can be mapped.
LARGEST = 2**36
# What other kinds of files begin with.
KINDS = re.compile(
  rb"(?s)(?P<Zstandard>\x28\xb5\x2f\xfd)|(?P<tar>.{257}ustar)|(?P<Parquet>PAR1)"
  rb"|(?P<gzip>\x1f\x8b)|(?P<zip>PK\x03\x04)|(?P<UTF16>\xff\xfe|\xfe\xff)"
)
# Ends of the names that backups, downloads and other systems leave beside data,
# and a table that `tokens.Tokens` reads.
NO_DATA = ("~", ".bak", ".part", "__MACOSX", "Thumbs.db", "token_bytes.npy")
# The splits, by the names that files and folders give them.
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
# A split's name as a word of its own: "my-train.txt", but not "constrain.txt".
WORD = re.compile(rf"(?<![a-zA-Z0-9]){NAME}(?![a-zA-Z])")
# The topics that `warn` has shown.
WARNED: set[str] = set()


def warn(message: str, topic: str = "") -> None:
  """Prints a warning on standard error, once in a process.

  Args:
    message: what is odd, and what follows from it.
    topic: what the message is about, if only the first one about it is shown,
      because thousands of files may be odd in the same way.
  """
  topic = topic or message
  if topic not in WARNED:
    WARNED.add(topic)
    print(f"warning: {message}", file=sys.stderr)


@contextlib.contextmanager
def blame(culprit: pathlib.Path | str) -> Iterator[None]:
  """Raises an error of a library as a ValueError about a file.

  Errors of the system pass, but EINVAL comes from a position in the file.

  Args:
    culprit: what the error blames: the file or the folder that is read.
  """
  try:
    yield
  except Exception as error:
    # Errors of the system, such as of a full disk, say by themselves
    # what is wrong.
    code = getattr(error, "errno", None)
    if code not in (None, errno.EINVAL) or isinstance(error, MemoryError):
      raise

    reason = " ".join(str(error).split()) or type(error).__name__
    call = "its header has a call, such as np.int64(9): write a plain number"
    reason = re.sub("malformed node or string.*", call, reason)  # of a .npy
    raise ValueError(
      f"{culprit} is damaged or truncated, or of a kind that is not read; get"
      f" it again, or convert it: {reason}"
    ) from error


def from_config(path: str) -> pathlib.Path:
  """The path in a field of a config, where ~ is the home folder."""
  return pathlib.Path(os.path.expanduser(path))


def check_path(path: str) -> pathlib.Path:
  """The path in `data.path`; raises FileNotFoundError if it does not exist."""
  if not path:
    raise FileNotFoundError("data.path is not set: name a file or a folder")
  existing = from_config(path)
  if not existing.exists():
    raise FileNotFoundError(
      f"no file or folder {existing}; set data.path to one that"
      f" exists{atomic.nearest(existing)}"
    )
  return existing


def check_names(place: pathlib.Path, names: Iterable[str]) -> None:
  """Warns if the files that a place joins have names of several splits."""
  # Names of one split are fine: shards of a train split are cut by fractions.
  example_of = {}
  for name in names:
    for word in WORD.findall(name):
      example_of[SPLIT_OF[word.lower()]] = name
  if len(example_of) > 1:
    warn(
      f"{place} has {', '.join(example_of.values())}, but is split by"
      " data.fractions; in a folder, give them the names train, val and test"
    )


def is_hidden(name: str) -> bool:
  """Whether the name of a file or folder is not of data: .git, a.txt~."""
  return name.startswith(".") or name.endswith(NO_DATA)


def has_suffix(path: pathlib.Path, *suffixes: str) -> bool:
  """Whether a file has one of these suffixes; "" is any.

  So has a compressed file, but not one that is there unpacked.
  """
  suffix = path.suffix.lower()
  if suffix in (*DECOMPRESS, ".zip"):
    # With a.txt and a.txt.gz in a folder, each text would count twice.
    inner = path.with_suffix("")
    return not inner.exists() and has_suffix(inner, *suffixes)
  return "" in suffixes or suffix in suffixes


def find(path: pathlib.Path, *suffixes: str) -> list[pathlib.Path]:
  """Lists the file, or all files below a folder, in the order of paths.

  Args:
    path: a file, of any suffix, or a folder.
    *suffixes: see `has_suffix`.

  Raises:
    FileNotFoundError: there are none.
  """
  if not path.is_dir():
    return [path]
  # The order in which a system lists files differs between machines.
  paths = sorted(x for x in below(path) if has_suffix(x, *suffixes))
  if not paths:
    ending = "" if "" in suffixes else f" that ends in {', '.join(suffixes)}"
    raise FileNotFoundError(
      f"{path} has no file{ending}; set data.path to another file or folder"
    )
  return paths


def below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """The files below a folder; links are followed, to each folder once."""

  def fail(error):
    raise error

  visited = set()
  for parent, folders, names in os.walk(folder, True, fail, followlinks=True):
    # A link to a folder above would never end.
    real = os.path.realpath(parent)
    if real in visited:
      folders.clear()
      continue
    visited.add(real)
    # os.walk descends into what is left in this list.
    folders[:] = sorted(x for x in folders if not is_hidden(x))
    for name in names:
      if not is_hidden(name):
        yield pathlib.Path(parent, name)


class Mapped(np.memmap):
  """The array of a file, which must not become shorter than it was."""

  def __getitem__(self, key: Any) -> Any:
    file: Any = self._mmap  # type: ignore[attr-defined]
    if file and file.size() < len(file):  # reading on would end the process
      raise OSError(f"{self.filename} has become shorter since it was opened")
    return super().__getitem__(key)


def map_array(path: pathlib.Path) -> np.ndarray:
  """Maps the array in a .npy file, or the uint16 in any other, into memory.

  Raises ValueError if the file is not regular, is damaged, or has more than one
  array; and OSError whenever it is found to have become shorter.
  """
  size = atomic.size(path)
  with blame(path):
    if path.suffix.lower() != ".npy":
      # The format of nanoGPT: nothing but tokens, little-endian
      # on every machine.
      return np.memmap(path, "<u2", mode="r").view(Mapped)
    array = np.lib.format.open_memmap(path, mode="r")
    # np.save may append to an open file, and NumPy reads the first array only.
    if rest := size - array.offset - array.nbytes:
      raise ValueError(
        f"{rest:,} bytes follow its array; save one array in a file"
      )
    return array.view(Mapped)


def read(path: pathlib.Path) -> bytes:
  """The `parts` of a file, joined."""
  return b"".join(parts(path))


def parts(path: pathlib.Path) -> list[bytes]:
  """The contents of a file, decompressed; of the files in a .zip, by name.

  Raises ValueError if the file is not regular, is damaged or is too large.
  """
  size = atomic.size(path)
  if size > LARGEST:
    raise ValueError(
      f"{path} has {size:,} bytes, more than {LARGEST:,}; set data.name to"
      " tokens, which maps a .npy file of uint8 into memory"
    )

  suffix = path.suffix.lower()
  with path.open("rb") as raw, blame(path):
    if suffix == ".zip":
      return _read_zip(path, zipfile.ZipFile(raw))
    if suffix not in DECOMPRESS:
      return [raw.read()]
    if not size:
      raise ValueError("it is empty")  # libraries differ in this
    return [DECOMPRESS[suffix](raw.read())]


def _read_zip(path, archive):
  """The files in an archive, without hidden ones, in the order of names."""
  # The order in an archive is that of its making.
  names: list[str] = []
  for name in sorted(archive.namelist()):
    if any(map(is_hidden, name.split("/"))):
      continue
    if name in names[-1:]:  # a copy, or a later version
      raise ValueError(f"two of its members are named {name}")
    names.append(name)

  check_names(path, names)
  return [archive.read(name) for name in names if not name.endswith("/")]


def _members(decompressor, data):
  """The contents of all members of a bz2 or xz file, joined."""
  contents = []
  while data:
    # A file may consist of several members, as `cat a.xz b.xz` makes them.
    member = decompressor()
    contents.append(member.decompress(data))
    if not member.eof:
      raise EOFError("its last member is cut off")
    data = member.unused_data
    if not data.strip(b"\0"):  # padding of .xz
      break
  return b"".join(contents)


def kind(data: bytes) -> str:
  """What the contents of a file have that text does not have, or ""."""
  if match := KINDS.match(data):
    return f"{match.lastgroup} data"
  return "zero bytes" if b"\0" in data else ""


def crc32(*paths: pathlib.Path) -> int:
  """CRC-32 of the concatenated contents of files, as they are on the disk."""
  crc = 0
  for path in paths:
    with path.open("rb") as file:
      # CRC-32 of parts in turn is that of the whole, which may
      # exceed the memory.
      while block := file.read(BLOCK):
        crc = zlib.crc32(block, crc)
  return crc
