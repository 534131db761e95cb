"""Tokens: integers of a tokenizer, in .npy and .bin files.

A file of integers does not say what they mean. What other programs write with
these suffixes is recognized, so that it is not read as tokens.
"""

import dataclasses
import pathlib
import struct

import numpy as np

from sparse_transformer.data import codecs, files

# The first bytes of .bin files that are not rows of integers, by their kind.
NO_TOKENS = {
  "a NumPy array": b"\x93NUMPY",
  "Megatron's index": b"MMIDIDX",
  "llm.c's header of 1,024 bytes": struct.pack("<i", 20240520),
  "llm.c's header, and tokens of uint32": struct.pack("<i", 20240801),
}
# The number of bytes examined at the start of a file.
HEADER = 1024
# Upper halves of 32-bit tokens are below `UPPER` if the vocabulary is at most
# 2^20, and some lower halves are then at least `LOWER`.
UPPER = 16
LOWER = 4096
DTYPES = (np.uint8, np.uint16, np.uint32)


@dataclasses.dataclass(frozen=True)
class Tokens(codecs.Codec):
  """Integers of a tokenizer; in prompts and samples, as text on one line.

  Attributes:
    vocab_size: the number of tokens of the tokenizer; all are below.
    folder: that of the data. A token_bytes.npy in it, integers [vocab_size],
      has the number of bytes that each token stands for.
  """

  vocab_size: int
  folder: pathlib.Path
  unit = "bits/token"
  symbols = "tokens"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """Parses integers with spaces between them, see `Codec.decode`."""
    try:
      # uint64 first, so that a number that is too large is named,
      # not wrapped around.
      tokens = np.array([int(word) for word in data.split()], np.uint64)
    except (ValueError, OverflowError):
      raise ValueError(
        f"{path} must hold tokens as integers with spaces between them"
      ) from None
    self._check(tokens, path)
    return tokens.astype(np.min_scalar_type(self.vocab_size - 1))

  def read(self, path: pathlib.Path) -> list[np.ndarray]:
    """Maps a file of tokens into memory.

    Args:
      path: a .npy file, a row of uint8, uint16 or uint32; or a .bin file of
        uint16, little-endian, as nanoGPT writes them.

    Returns:
      The tokens, [n], as the only part.

    Raises:
      ValueError: the file holds something else, or a token that is not below
        `vocab_size`.
    """
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".bin"):
      raise ValueError(
        f"{path} must end in .npy or, for tokens of uint16, in .bin; for text,"
        " set data.name to bytes"
      )

    # A .bin file has no header that says what it is.
    if suffix == ".bin":
      other = _beginning(path) or _are_halves(files.map_array(path))
      if other:
        raise ValueError(
          f"{path} holds {other}, but .bin is read as tokens of uint16; save"
          " the tokens as .npy of uint16 or uint32"
        )

    tokens = files.map_array(path)
    dtype = tokens.dtype
    if dtype not in DTYPES or tokens.ndim != 1 or not len(tokens):
      raise ValueError(
        f"{path} holds {dtype} {tokens.shape}; tokens must be a row of uint8,"
        " uint16 or uint32"
      )
    if np.iinfo(dtype).max < self.vocab_size - 1:
      raise ValueError(
        f"{path} holds {dtype}, which cannot hold"
        f" data.vocab_size={self.vocab_size}; set that to the tokenizer's, or"
        " save the tokens as .npy of uint32"
      )

    self._check(tokens, path)
    self.num_bytes(tokens[:0])  # a wrong table is found now
    return [tokens]

  def _check(self, tokens, path):
    """Raises ValueError if a token is not below `vocab_size`."""
    largest = tokens.max(initial=0)
    if largest >= self.vocab_size:
      raise ValueError(
        f"{path}: token {largest} of {tokens.dtype} at index {tokens.argmax()}"
        f" is not below data.vocab_size={self.vocab_size}; set that to the"
        " tokenizer's"
      )

  def encode(self, sequences: codecs.Rows) -> bytes:
    """The rows as lines of integers."""
    lines = (" ".join(map(str, tokens)) for tokens in sequences)
    return "".join(f"{line}\n" for line in lines).encode()

  def num_bytes(self, symbols: np.ndarray) -> int | None:
    """The bytes that tokens stand for; None without a token_bytes.npy.

    Raises ValueError if the table does not fit the vocabulary.
    """
    path = self.folder / "token_bytes.npy"
    if not path.exists():
      return None

    # It is mapped again for each block, which costs little beside the sum.
    table = files.map_array(path)
    is_table = table.dtype.kind in "iu" and table.shape == (self.vocab_size,)
    if not is_table or table.min() < 0:
      raise ValueError(
        f"{path} holds {table.dtype} {table.shape}; it must have an integer at"
        f" least 0 for each token, data.vocab_size={self.vocab_size}"
      )
    return int(table[symbols].sum(dtype=np.int64))


def _beginning(path):
  """What a .bin file begins with if it does not hold tokens, or ""."""
  with path.open("rb") as file:
    start = file.read(HEADER)
  for kind, magic in NO_TOKENS.items():
    if start.startswith(magic):
      return kind

  # A character may be cut at the end. Tokens of uint16 have bytes that no text
  # has: small ones have bytes of 0, and few large ones are UTF-8.
  text = start.decode(errors="ignore")
  is_text = len(text.encode()) > len(start) - 4 and len(start) >= 16
  if is_text and "".join(text.split()).isprintable():
    return "text"
  kind = files.kind(start)
  return "" if kind == "zero bytes" else kind


def _are_halves(words):
  """A phrase that words are halves of larger integers, or "" if not.

  Args:
    words: the contents of a file, uint16 [n].
  """
  even = words[0::2]
  odd = words[1::2]
  # The upper halves come second, or in others first.
  for lower, upper in (even, odd), (odd, even):
    # Too few words differ from 0 to tell.
    if np.count_nonzero(lower) < 8:
      continue
    largest = upper.max(initial=0)
    if not largest or (largest < UPPER and lower.max() >= LOWER):
      return "32- or 64-bit tokens (of each two uint16, one is 0 or small)"
  return ""
