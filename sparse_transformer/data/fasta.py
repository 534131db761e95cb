"""DNA: the bases of FASTA files."""

import dataclasses
import pathlib
import re

import numpy as np

from sparse_transformer.data import codecs, files

# The number of letters converted at once: their indices need memory.
BLOCK = 2**22
BASES = "ACGT"
# The bases that an ambiguous letter may stand for: IUPAC, Cornish-Bowden 1985,
# Nucleic Acids Research 13(9). Their order determines what is drawn.
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
# Stands for the end of a record among letters: U itself has become T.
END = "U"
# A header follows comments and empty lines.
IS_FASTA = re.compile(rb"(?:\s*;[^\r\n]*+)*+\s*+>")
# Lines that hold no bases: headers and comments.
NO_BASES = re.compile(rb"[>;](?<![^\r\n].)[^\r\n]*")
UPPERCASE = bytes(range(256)).upper().replace(b"U", b"T")


@dataclasses.dataclass(frozen=True)
class Fasta(codecs.Codec):
  """DNA as four bases: the concatenated records of a FASTA file.

  An ambiguous letter becomes one of the bases it may stand for, drawn with a
  fixed seed, and reported. Lowercase counts as uppercase, and U as T.

  Attributes:
    separator: 4 if each record is a document; a symbol of its own then follows
      each. None if records follow each other.
  """

  separator: int | None = None
  unit = "bits/base"
  symbols = ", ".join(BASES)
  suffix = ".fasta"

  # An attribute of other codecs; here it depends on the separator.
  @property
  def vocab_size(self) -> int:  # type: ignore[override]
    return len(BASES) + (self.separator is not None)

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """The symbols of a file: uint8, one for each base or end of a record.

    See `Codec.decode`; letters are converted in place, in blocks.
    """
    # Editors on Windows begin a file with this mark of UTF-8.
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not IS_FASTA.match(data):
      other = files.kind(data) or ("other text" if data else "empty")
      raise ValueError(
        f"{path} is not a FASTA file, but {other}; its first line must start"
        " with >: add one or choose another data.name"
      )

    text = self._letters(data)
    ambiguous = "".join(AMBIGUOUS)
    codecs.check_letters(
      text,
      letters=BASES + END + ambiguous,
      path=path,
      known=f"{BASES} and the ambiguous {ambiguous}",
    )

    # A view of `text`: letters are replaced in place, without a copy
    # of a genome.
    symbols = np.frombuffer(text, np.uint8)
    blocks = np.array_split(symbols, 1 + len(symbols) // BLOCK)
    _draw_ambiguous(text, blocks, path)

    # All letters are now bases or END: each becomes its index.
    table = codecs.letter_table(BASES + END)
    for block in blocks:
      block[:] = np.frombuffer(block.tobytes().translate(table), np.uint8)
    return symbols

  def _letters(self, data):
    """The letters of all records; with documents, END after each."""
    end = b"" if self.separator is None else END.encode()
    mark = lambda line: end if line[0].startswith(b">") else b""
    # Headers become END, and comments nothing, before line breaks are dropped.
    lines = NO_BASES.sub(mark, data.translate(UPPERCASE, b" \t\v\f"))
    text = bytearray(lines.translate(None, b"\r\n"))
    # Headers come before records, and the separator after them.
    del text[: len(end)]
    text += end
    return text

  def encode(self, sequences: codecs.Rows) -> bytes:
    """The rows as records of 70 bases a line; a separator begins a new one."""
    lines = []
    letters = f"{BASES}\n"  # a line break for the separator
    for i, symbols in enumerate(sequences):
      text = "".join(letters[symbol] for symbol in symbols)
      records = text.rstrip("\n").split("\n")
      for number, record in enumerate(records):
        lines.append(f">sample_{i}_{number}" if number else f">sample_{i}")

        for start in range(0, len(record), 70):
          lines.append(record[start : start + 70])
    return "".join(f"{line}\n" for line in lines).encode()


def _draw_ambiguous(text, blocks, path):
  """Replaces ambiguous letters in the blocks of a text by bases."""
  # Letters in the order of AMBIGUOUS, and blocks in theirs: the same draws for
  # the same file, whatever else is read.
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
