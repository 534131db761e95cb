"""Tokens: integers from a tokenizer, in .npy and .bin files.

A .bin file does not describe its contents. Files in other formats may have the
same suffix. They are detected and rejected, because they would otherwise be
read as tokens.
"""

import dataclasses
import pathlib
import struct

import numpy as np

from sparse_transformer.data import codecs, files

# {kind of file: its first bytes} for .bin files that are not just tokens.
NO_TOKENS = {
  "a NumPy array": b"\x93NUMPY",
  "Megatron's index": b"MMIDIDX",
  "llm.c's header of 1,024 bytes": struct.pack("<i", 20240520),
  "llm.c's header, and tokens of uint32": struct.pack("<i", 20240801),
}
# The number of bytes examined at the start of a file.
HEADER = 1024
# If the vocabulary has at most 2^20 tokens, the upper halves of 32-bit tokens
# are below `UPPER`, and some lower halves are at least `LOWER`.
UPPER = 16
LOWER = 4096
DTYPES = (np.uint8, np.uint16, np.uint32)


@dataclasses.dataclass(frozen=True)
class Tokens(codecs.Codec):
  """Integers from a tokenizer. Prompts and samples write them in decimal.

  Attributes:
    vocab_size: the size of the tokenizer's vocabulary. All tokens must be less
      than this size.
    folder: the folder of the data. The folder may contain token_bytes.npy, an
      array of integers [vocab_size] with the number of bytes of text that each
      token represents.
  """

  vocab_size: int
  folder: pathlib.Path
  unit = "bits/token"
  symbols = "tokens"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """Parses integers separated by spaces, see `Codec.decode`."""
    try:
      # Convert to uint64 first, so that a number that is too large is reported
      # and does not overflow.
      tokens = np.array([int(word) for word in data.split()], np.uint64)
    except (ValueError, OverflowError):
      raise ValueError(
        f"{path} must contain tokens as integers separated by spaces"
      ) from None
    self._check(tokens, path)
    return tokens.astype(np.min_scalar_type(self.vocab_size - 1))

  def read(self, path: pathlib.Path) -> list[np.ndarray]:
    """Maps a file of tokens into memory.

    Args:
      path: a .npy file of uint8, uint16 or uint32 [n]; or a .bin file of
        little-endian uint16, as written by nanoGPT.

    Returns:
      A list of one item, the tokens [n].

    Raises:
      ValueError: the file contains something else, or a token that is not below
        `vocab_size`.
    """
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".bin"):
      raise ValueError(
        f"{path} must end in .npy or, for uint16 tokens, in .bin; for text, set"
        " data.name=bytes"
      )

    # A .bin file of tokens has no header, so check that it is not something
    # else.
    if suffix == ".bin":
      other = _beginning(path) or _are_halves(files.map_array(path))
      if other:
        raise ValueError(
          f"{path} contains {other}, but .bin files are read as uint16 tokens;"
          " save the tokens as a .npy file of uint16 or uint32"
        )

    tokens = files.map_array(path)
    dtype = tokens.dtype
    if dtype not in DTYPES or tokens.ndim != 1 or not len(tokens):
      raise ValueError(
        f"{path} contains {dtype} {tokens.shape}; tokens must be uint8, uint16"
        " or uint32 with one axis, and not empty"
      )
    if np.iinfo(dtype).max < self.vocab_size - 1:
      raise ValueError(
        f"{path} contains {dtype}, which cannot represent all tokens of"
        f" data.vocab_size={self.vocab_size}; set data.vocab_size to the"
        " tokenizer's vocabulary size, or save the tokens as a .npy file of"
        " uint32"
      )

    self._check(tokens, path)
    self.num_bytes(tokens[:0])  # raises ValueError if the table is wrong
    return [tokens]

  def _check(self, tokens, path):
    """Raises ValueError if a token is not below `vocab_size`."""
    largest = tokens.max(initial=0)
    if largest >= self.vocab_size:
      raise ValueError(
        f"{path}: token {largest} ({tokens.dtype}) at index {tokens.argmax()}"
        f" is not below data.vocab_size={self.vocab_size}; set data.vocab_size"
        " to the tokenizer's vocabulary size"
      )

  def encode(self, sequences: codecs.Rows) -> bytes:
    """Converts rows to lines of integers."""
    lines = (" ".join(map(str, tokens)) for tokens in sequences)
    return "".join(f"{line}\n" for line in lines).encode()

  def num_bytes(self, symbols: np.ndarray) -> int | None:
    """Returns the number of bytes of text that tokens represent.

    Returns None if there is no token_bytes.npy. Raises ValueError if the table
    does not fit the vocabulary.
    """
    path = self.folder / "token_bytes.npy"
    if not path.exists():
      return None

    # The table is mapped again for each block, which takes little time compared
    # with the sum.
    table = files.map_array(path)
    is_table = table.dtype.kind in "iu" and table.shape == (self.vocab_size,)
    if not is_table or table.min() < 0:
      raise ValueError(
        f"{path} contains {table.dtype} {table.shape}; it must contain an"
        " integer of at least 0 for each token,"
        f" data.vocab_size={self.vocab_size}"
      )
    return int(table[symbols].sum(dtype=np.int64))


def _beginning(path):
  """Names the contents of a .bin file that are not tokens; otherwise ""."""
  with path.open("rb") as file:
    start = file.read(HEADER)
  for kind, magic in NO_TOKENS.items():
    if start.startswith(magic):
      return kind

  # Check whether this is UTF-8 text, whose last character may be cut. Tokens
  # are not: small uint16 tokens contain zero bytes, and large ones are rarely
  # valid UTF-8.
  text = start.decode(errors="ignore")
  is_text = len(text.encode()) > len(start) - 4 and len(start) >= 16
  if is_text and "".join(text.split()).isprintable():
    return "text"
  kind = files.kind(start)
  return "" if kind == "zero bytes" else kind


def _are_halves(words):
  """Detects uint16 words that are the halves of larger integers.

  Args:
    words: the contents of a file, uint16 [n].

  Returns:
    A phrase that describes the integers, or "".
  """
  even = words[0::2]
  odd = words[1::2]
  # The upper halves are second in little-endian files, and first in others.
  for lower, upper in (even, odd), (odd, even):
    # If too few words differ from 0, nothing can be concluded.
    if np.count_nonzero(lower) < 8:
      continue
    largest = upper.max(initial=0)
    if not largest or (largest < UPPER and lower.max() >= LOWER):
      return "32- or 64-bit tokens (of each two uint16, one is 0 or small)"
  return ""
