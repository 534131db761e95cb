"""DNA: FASTA files as bases."""

import dataclasses
import pathlib
import re

import numpy as np

from sparse_transformer.data import codecs, files

# The number of letters converted at once, which bounds the memory for indices.
BLOCK = 2**22
BASES = "ACGT"
# The bases that an ambiguous letter may represent (IUPAC; Cornish-Bowden 1985,
# Nucleic Acids Research 13(9)). Random draws depend on the order here.
AMBIGUOUS = {
  "N": "ACGT",
  "R": "AG",
  "Y": "CT",
  "S": "CG",
  "W": "AT",
  "K": "GT",
  "M": "AC",
  "B": "CGT",
  "D": "AGT",
  "H": "ACT",
  "V": "ACG",
}
# Marks the end of a record among letters. This is unambiguous, because each U
# in the file is replaced by T.
END = "U"
# The first header may follow comments and empty lines.
IS_FASTA = re.compile(rb"(?:\s*;[^\r\n]*+)*+\s*+>")
# Lines that contain no bases: headers and comments.
NO_BASES = re.compile(rb"[>;](?<![^\r\n].)[^\r\n]*")
UPPERCASE = bytes(range(256)).upper().replace(b"U", b"T")


@dataclasses.dataclass(frozen=True)
class Fasta(codecs.Codec):
  """The concatenated records of a FASTA file, with one symbol per base.

  An ambiguous letter is replaced by one of the bases that it may represent. The
  base is drawn with a fixed seed, and a warning reports the replacement.
  Lowercase letters are read as uppercase, and U is read as T.

  Attributes:
    separator: the symbol 4 if each record is a document; each document then
      ends with this symbol. None if records are concatenated without a
      separator.
  """

  separator: int | None = None
  unit = "bits/base"
  symbols = ", ".join(BASES)
  suffix = ".fasta"

  # In other codecs, this is an attribute; here, it depends on the separator.
  @property
  def vocab_size(self) -> int:  # type: ignore[override]
    return len(BASES) + (self.separator is not None)

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """Returns the symbols of a file, uint8 [n].

    There is one symbol for each base and each end of a record. See
    `Codec.decode`.
    """
    # Editors on Windows may begin a file with the byte-order mark of UTF-8.
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not IS_FASTA.match(data):
      other = files.kind(data) or ("other text" if data else "empty")
      raise ValueError(
        f"{path} is not a FASTA file, but {other}; add a first line that starts"
        " with >, or set another data.name"
      )

    text = self._letters(data)
    ambiguous = "".join(AMBIGUOUS)
    codecs.check_letters(
      text,
      letters=BASES + END + ambiguous,
      path=path,
      known=f"{BASES} and the ambiguous {ambiguous}",
    )

    # Replace letters in place through a view of `text`, because a copy of a
    # genome would need much memory.
    symbols = np.frombuffer(text, np.uint8)
    blocks = np.array_split(symbols, 1 + len(symbols) // BLOCK)
    _draw_ambiguous(text, blocks, path)

    # All letters are now bases or END. Replace each by its index.
    table = codecs.letter_table(BASES + END)
    for block in blocks:
      block[:] = np.frombuffer(block.tobytes().translate(table), np.uint8)
    return symbols

  def _letters(self, data):
    """Returns the letters of all records, with END after each document."""
    end = b"" if self.separator is None else END.encode()
    mark = lambda line: end if line[0].startswith(b">") else b""
    # Replace headers by END and remove comments, before line breaks are
    # removed.
    lines = NO_BASES.sub(mark, data.translate(UPPERCASE, b" \t\v\f"))
    text = bytearray(lines.translate(None, b"\r\n"))
    # Headers precede records, but the separator must follow them. So move the
    # first END to the end.
    del text[: len(end)]
    text += end
    return text

  def encode(self, sequences: codecs.Rows) -> bytes:
    """Converts rows to records, with 70 bases per line.

    A separator in a row begins a new record.
    """
    lines = []
    letters = f"{BASES}\n"  # the separator becomes a line break
    for i, symbols in enumerate(sequences):
      text = "".join(letters[symbol] for symbol in symbols)
      records = text.rstrip("\n").split("\n")
      for number, record in enumerate(records):
        lines.append(f">sample_{i}_{number}" if number else f">sample_{i}")

        for start in range(0, len(record), 70):
          lines.append(record[start : start + 70])
    return "".join(f"{line}\n" for line in lines).encode()


def _draw_ambiguous(text, blocks, path):
  """Replaces ambiguous letters in the blocks of a text by random bases."""
  # Process letters in the order of AMBIGUOUS, and blocks in their order, so
  # that draws depend only on the contents of the file.
  rng = np.random.RandomState(0)
  drawn = []
  for letter, bases in AMBIGUOUS.items():
    number = text.count(letter.encode())
    if not number:
      continue
    drawn.append(f"{number:,} {letter}")
    choices = np.frombuffer(bases.encode(), np.uint8)
    for block in blocks:
      here = np.flatnonzero(block == ord(letter))
      block[here] = choices[rng.randint(len(bases), size=len(here))]

  if drawn:
    files.warn(f"{path}: ambiguous bases drawn at random: {', '.join(drawn)}")
