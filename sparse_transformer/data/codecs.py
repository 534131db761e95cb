"""What a codec is: it converts files to the symbols of a stream, and back."""

import pathlib
from collections.abc import Iterable

import numpy as np

from sparse_transformer import atomic
from sparse_transformer.data import files

# Rows of symbols.
Rows = Iterable[np.ndarray]


class Codec:
  """Converts files to symbols, and sampled symbols to files.

  Attributes:
    vocab_size: the number of symbols.
    unit: of losses: bits per symbol.
    symbols: what they stand for, in order.
    separator: the symbol after each document, if any.
    suffix: of files of samples.
  """

  vocab_size: int
  unit: str
  symbols: str = "symbols"
  separator: int | None = None
  suffix: str = ".txt"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """Converts the contents of a file, or a prompt, to symbols.

    Args:
      data: the contents, decompressed.
      path: the file, for messages.

    Returns:
      Symbols, [n], of an unsigned dtype.

    Raises:
      ValueError: the data are of another kind.
    """
    raise NotImplementedError

  def read(self, path: pathlib.Path) -> list[np.ndarray]:
    """The symbols of a file of data; of an archive, one array for each file.

    Raises ValueError if the file is damaged, or of another kind.
    """
    return [self.decode(data, path) for data in files.parts(path)]

  def encode(self, sequences: Rows) -> bytes:
    """The contents of a file with rows of symbols."""
    raise NotImplementedError

  def save(self, stem: pathlib.Path, sequences: Rows) -> list[pathlib.Path]:
    """Writes rows of symbols to files whose names begin with `stem`'s."""
    # Replaced as a whole: a stopped command leaves the samples of the last one.
    path = stem.with_suffix(self.suffix)
    atomic.write_bytes(path, self.encode(sequences))
    return [path]

  def num_bytes(self, symbols: np.ndarray) -> int | None:
    """The bytes that tokens stand for, by which tokenizers can be compared.

    Args:
      symbols: [n].

    Returns:
      None if it is unknown, or if symbols are no tokens.
    """
    return None


def warn_of_file(path: pathlib.Path, oddity: str, result: str) -> None:
  """Warns of what is odd in a file, once: a folder may have thousands.

  Args:
    path: the first such file.
    oddity: what the file has.
    result: what becomes of it, or what to do.
  """
  message = f"{path} has {oddity}, and so may others: {result}"
  files.warn(message, topic=oddity)


def letter_table(letters: str) -> bytes:
  """Translates letters to their indices, for `bytes.translate`.

  >>> list(b"cab".translate(letter_table("abc")))
  [2, 0, 1]
  """
  return bytes.maketrans(letters.encode(), bytes(range(len(letters))))


def check_letters(
  text: bytes | bytearray, letters: str, path: pathlib.Path, known: str
) -> None:
  """Raises ValueError if a text has characters other than some letters.

  Args:
    text: what a file holds.
    letters: those that it may have, in ASCII.
    path: the file.
    known: what the error calls the letters.
  """
  # Deleting what is known is much faster than searching for the rest.
  unknown = text.translate(None, letters.encode())
  if unknown:
    raise ValueError(
      f"{path} may contain only {known}, but has {len(unknown):,} other"
      f" characters; the first is {chr(unknown[0])!r} at index"
      f" {text.find(unknown[0]):,}"
    )
