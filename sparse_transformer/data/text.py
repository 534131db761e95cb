"""Text: bytes, the records of JSON Lines, and the letters of text8."""

import dataclasses
import io
import json
import pathlib
import re
import reprlib

import numpy as np

from sparse_transformer.data import codecs, files

# Separates sampled texts.
RULE = b"\n\n" + b"-" * 72 + b"\n\n"
LETTERS = " abcdefghijklmnopqrstuvwxyz"
# Half of a character, which UTF-8 cannot hold.
HALF = re.compile("[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Text(codecs.Codec):
  """The bytes of files as they are, whatever their encoding.

  Attributes:
    separator: 0 if each file is a document; it ends in this byte, which no file
      may have. None if files simply follow each other.
  """

  separator: int | None = None
  vocab_size = 256
  unit = "bits/byte"
  symbols = "bytes"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """See `Codec.decode`; warns if the data look like another kind of file."""
    document = self.document(data, place=path)
    # A warning only: bytes are bytes, and someone may want to model archives.
    if kind := files.kind(data):
      codecs.warn_of_file(
        path,
        oddity=f"{kind}, unlike text",
        result="unpack or convert archives and pictures, or leave them out",
      )
    return np.frombuffer(document, np.uint8)

  def document(self, data: bytes, place: object) -> bytes:
    """The data, and the separator.

    Args:
      data: the bytes of a document.
      place: what an error calls them.

    Raises:
      ValueError: the separator is among them.
    """
    if self.separator is None:
      return data

    end = bytes([self.separator])
    # Inside of a document, the separator would cut it in two.
    at = data.find(end)
    if at >= 0:
      raise ValueError(
        f"{place} has byte {self.separator} at {at:,}, which"
        " data.documents=True puts after each file or record; leave it False,"
        " or the byte out"
      )
    return data + end

  def encode(self, sequences: codecs.Rows) -> bytes:
    """The rows as bytes, with a rule between them."""
    return RULE.join(map(bytes, sequences))


class JsonLines(Text):
  """The field `text` of records in UTF-8.

  A line holds a record, a JSON object; other fields are ignored. The separator
  is after each record, or, without one, a newline.
  """

  def read(self, path: pathlib.Path) -> list[np.ndarray]:
    """The texts of all records of a file, joined into one array.

    Raises ValueError if a line is not a record with a text.
    """
    symbols = bytearray()
    end = b"\n" if self.separator is None else b""
    num_halves = 0
    # Unlike `splitlines`, iteration does not split at a carriage return.
    lines = io.BytesIO(b"\n".join(files.parts(path)))
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      place = f"{path}, line {number}"
      text, halves = _text_of(line, place)
      num_halves += halves
      symbols += self.document(text.encode(), place) + end

    if num_halves:
      files.warn(f"{path}: {num_halves:,} halves of characters became U+FFFD")
    return [np.frombuffer(symbols, np.uint8)]


def _text_of(line, place):
  """The field `text` of a record, and how many halves it had.

  Raises ValueError if the line is not a JSON object with a text in this field.
  """
  try:
    # Only objects can be unpacked: lists and numbers raise here.
    record = {**json.loads(line)}
    if "text" not in record:
      raise ValueError(f"its fields are {reprlib.repr(list(record))}")
    return HALF.subn("\ufffd", record["text"])
  except Exception as error:
    raise ValueError(
      f"{place} is not JSON with a text in its field 'text', as each line must"
      f" be: {files.kind(line) or error}"
    ) from None


class Letters(Text):
  """The 27 symbols of text8: space, a to z.

  Prompts may have no other characters, but may end in a newline.
  """

  vocab_size = 27
  unit = "bits/character"
  symbols = "space, a to z"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """See `Codec.decode`; raises ValueError for other characters."""
    data = data.removesuffix(b"\n")  # of an editor
    codecs.check_letters(data, LETTERS, path, known="a to z and the space")
    return np.frombuffer(data.translate(codecs.letter_table(LETTERS)), np.uint8)

  def encode(self, sequences: codecs.Rows) -> bytes:
    """The rows as letters, with a rule between them."""
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    return super().encode(letters[row] for row in sequences)
