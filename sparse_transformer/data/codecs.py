"""The base class of codecs, which convert files to symbols and back."""

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
    vocab_size: the number of distinct symbols.
    unit: the unit of losses, bits per symbol, such as bits/byte.
    symbols: describes what the symbols 0, 1, ... mean.
    separator: the symbol after each document, or None.
    suffix: the suffix of files of samples.
  """

  vocab_size: int
  unit: str
  symbols: str = "symbols"
  separator: int | None = None
  suffix: str = ".txt"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """Converts the contents of a file, or a prompt, to symbols.

    Args:
      data: the decompressed contents.
      path: the file, for error messages.

    Returns:
      Symbols [n] with an unsigned integer dtype.

    Raises:
      ValueError: the data have a different format.
    """
    raise NotImplementedError

  def read(self, path: pathlib.Path) -> list[np.ndarray]:
    """Returns the symbols of a data file, as a list of one array.

    For a .zip file, the list contains an array for each file in it. Raises
    ValueError if the file is damaged or has a different format.
    """
    return [self.decode(data, path) for data in files.parts(path)]

  def encode(self, sequences: Rows) -> bytes:
    """Converts rows of symbols to the contents of a file."""
    raise NotImplementedError

  def save(self, stem: pathlib.Path, sequences: Rows) -> list[pathlib.Path]:
    """Writes rows of symbols to files whose names begin with `stem`.

    Returns the paths of the files.
    """
    # The file is replaced atomically, so if the command is stopped, the samples
    # of the last command remain.
    path = stem.with_suffix(self.suffix)
    atomic.write_bytes(path, self.encode(sequences))
    return [path]

  def num_bytes(self, symbols: np.ndarray) -> int | None:
    """Returns the number of bytes of text that tokens represent.

    This number converts losses to bits per byte of text, which can be compared
    between tokenizers.

    Args:
      symbols: the tokens, integers [n].

    Returns:
      The number of bytes, or None if it is unknown or if symbols are not
      tokens.
    """
    return None


def warn_of_file(path: pathlib.Path, oddity: str, result: str) -> None:
  """Warns about something unusual in a file.

  For each oddity, only the first file is reported, because a folder may contain
  thousands of such files.

  Args:
    path: the file.
    oddity: a noun phrase that completes the warning "PATH has ...", for example
      "samples outside -1..1".
    result: what happens as a result, or what the user should do.
  """
  message = f"{path} has {oddity}, and other files may, too; {result}"
  files.warn(message, topic=oddity)


def letter_table(letters: str) -> bytes:
  """Returns a table for `bytes.translate` that maps letters to their indices.

  >>> list(b"cab".translate(letter_table("abc")))
  [2, 0, 1]
  """
  return bytes.maketrans(letters.encode(), bytes(range(len(letters))))


def check_letters(
  text: bytes | bytearray, letters: str, path: pathlib.Path, known: str
) -> None:
  """Raises ValueError if text contains characters that are not in `letters`.

  Args:
    text: the contents of a file.
    letters: the allowed letters, ASCII.
    path: the file, for the error message.
    known: how the error message refers to the letters.
  """
  # Deleting known letters is much faster than searching for unknown ones.
  unknown = text.translate(None, letters.encode())
  if unknown:
    raise ValueError(
      f"{path} may contain only {known}, but contains {len(unknown):,} other"
      f" characters; the first is {chr(unknown[0])!r} at index"
      f" {text.find(unknown[0]):,}"
    )
