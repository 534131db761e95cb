"""Codecs of text: bytes, records of JSON Lines, and the letters of text8."""

import dataclasses
import io
import json
import pathlib
import re
import reprlib

import numpy as np

from sparse_transformer.data import codecs, files

# The line that separates samples of text.
RULE = b"\n\n" + b"-" * 72 + b"\n\n"
LETTERS = " abcdefghijklmnopqrstuvwxyz"
# A surrogate: half of a character in UTF-16, which UTF-8 cannot encode.
HALF = re.compile("[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Text(codecs.Codec):
  """The bytes of files, regardless of their encoding.

  Attributes:
    separator: the byte 0 if each file is a document; each document then ends
      with this byte, and no file may contain it. None if files are concatenated
      without a separator.
  """

  separator: int | None = None
  vocab_size = 256
  unit = "bits/byte"
  symbols = "bytes"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """See `Codec.decode`. Warns if the data do not look like text."""
    document = self.document(data, place=path)
    # Only warn, because someone may want to model other kinds of files.
    if kind := files.kind(data):
      codecs.warn_of_file(
        path,
        oddity=f"{kind}, unlike text",
        result="unpack or convert archives and pictures, or remove them",
      )
    return np.frombuffer(document, np.uint8)

  def document(self, data: bytes, place: object) -> bytes:
    """Returns a document followed by the separator, if there is one.

    Args:
      data: the bytes of the document.
      place: how error messages refer to the document, such as its file name.

    Raises:
      ValueError: the document contains the separator.
    """
    if self.separator is None:
      return data

    end = bytes([self.separator])
    # A separator inside a document would split it in two.
    at = data.find(end)
    if at >= 0:
      raise ValueError(
        f"{place} contains byte {self.separator} at index {at:,}, which"
        " data.documents=True uses as the separator after each file or record;"
        " remove the byte, or set data.documents=False"
      )
    return data + end

  def encode(self, sequences: codecs.Rows) -> bytes:
    """Converts rows to bytes, separated by `RULE`."""
    return RULE.join(map(bytes, sequences))


class JsonLines(Text):
  """The field `text` of each record, in UTF-8.

  Each line is a JSON object, whose other fields are ignored. Each record is
  followed by the separator or, if there is none, by a newline.
  """

  def read(self, path: pathlib.Path) -> list[np.ndarray]:
    """Returns the texts of all records of a file, as one array.

    Raises ValueError if a line is not a record with text.
    """
    symbols = bytearray()
    end = b"\n" if self.separator is None else b""
    num_halves = 0
    # Iterate over a file, because `splitlines` would also split at carriage
    # returns.
    lines = io.BytesIO(b"\n".join(files.parts(path)))
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      place = f"{path}, line {number}"
      text, halves = _text_of(line, place)
      num_halves += halves
      symbols += self.document(text.encode(), place) + end

    if num_halves:
      files.warn(
        f"{path}: {num_halves:,} surrogates (halves of characters) were"
        " replaced by U+FFFD"
      )
    return [np.frombuffer(symbols, np.uint8)]


def _text_of(line, place):
  """Returns the field `text` of a record, and its number of surrogates.

  Surrogates are replaced by U+FFFD. Raises ValueError if the line is not a JSON
  object with a string in this field.
  """
  try:
    # Unpack the value, which raises an error unless it is an object.
    record = {**json.loads(line)}
    if "text" not in record:
      raise ValueError(f"its fields are {reprlib.repr(list(record))}")
    return HALF.subn("\ufffd", record["text"])
  except Exception as error:
    raise ValueError(
      f"{place} is not JSON with text in its field 'text', as each line must"
      f" be: {files.kind(line) or error}"
    ) from None


class Letters(Text):
  """The 27 symbols of text8: the space, and a to z.

  Prompts may contain only these characters, but may end with a newline.
  """

  vocab_size = 27
  unit = "bits/character"
  symbols = "space, a to z"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """See `Codec.decode`. Raises ValueError for other characters."""
    data = data.removesuffix(b"\n")  # editors append a newline
    codecs.check_letters(data, LETTERS, path, known="a to z and the space")
    return np.frombuffer(data.translate(codecs.letter_table(LETTERS)), np.uint8)

  def encode(self, sequences: codecs.Rows) -> bytes:
    """Converts rows to letters, separated by `RULE`."""
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    return super().encode(letters[row] for row in sequences)
