"""Codecs between files and the symbols of a stream."""

import dataclasses
import io
import json
import pathlib
import re
import reprlib
import struct
import warnings
from collections.abc import Iterable

import numpy as np

from sparse_transformer import atomic
from sparse_transformer.data import files

Rows = Iterable[np.ndarray]  # of symbols
BLOCK = 2**22  # letters of FASTA files converted at once
RULE = b"\n\n" + b"-" * 72 + b"\n\n"  # between sampled texts


class Codec:
  """Converts files to symbols, and sampled symbols to files."""

  vocab_size: int
  unit: str  # of losses: bits per symbol
  symbols: str = "symbols"  # what they stand for, in order
  separator: int | None = None  # the symbol after each document, if any
  suffix: str = ".txt"  # of files of samples
  told: set[str]  # by `doubt`

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """The symbols of decompressed data; ValueError if it is of another kind."""
    raise NotImplementedError

  def read(self, path: pathlib.Path) -> list[np.ndarray]:
    """The symbols of a file of data, in parts, see `decode`."""
    return [self.decode(data, path) for data in files.parts(path)]

  def doubt(self, path: pathlib.Path, odd: str, result: str) -> None:
    """Tells what is odd in a file, once: a folder may have thousands."""
    if odd not in self.told:
      self.told.add(odd)
      files.tell(f"warning: {path} has {odd}, and so may others: {result}")

  def encode(self, sequences: Rows) -> bytes:
    """The contents of a file of rows of symbols."""
    raise NotImplementedError

  def save(self, stem: pathlib.Path, sequences: Rows) -> list[pathlib.Path]:
    """Writes rows of symbols to files whose names begin with `stem`'s."""
    path = stem.with_suffix(self.suffix)
    atomic.write_bytes(path, self.encode(sequences))
    return [path]

  def num_bytes(self, symbols: np.ndarray) -> int | None:
    """The bytes that tokens stand for; None if unknown, or no tokens."""
    return None


@dataclasses.dataclass(frozen=True)
class Text(Codec):
  """Bytes; with a separator of 0, each file is a document."""

  separator: int | None = None
  told: set[str] = dataclasses.field(default_factory=set, compare=False)
  vocab_size = 256
  unit = "bits/byte"
  symbols = "bytes"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    kind = files.kind(data)
    if kind:
      self.doubt(
        path,
        f"{kind}, unlike text",
        "unpack or convert archives and pictures, or leave them out",
      )
    return np.frombuffer(self.document(data, path), np.uint8)

  def document(self, data: bytes, place: object) -> bytes:
    """The data, and the separator; ValueError if that is among them."""
    if self.separator is None:
      return data
    end = bytes([self.separator])
    if (at := data.find(end)) >= 0:
      raise ValueError(
        f"{place} has byte {self.separator} at {at:,}, which"
        " data.documents=True puts after each file or record; leave it False,"
        " or the byte out"
      )
    return data + end

  def encode(self, sequences: Rows) -> bytes:
    return RULE.join(map(bytes, sequences))


class JsonLines(Text):
  """The field `text` of records, a newline or the separator after each."""

  def read(self, path: pathlib.Path) -> list[np.ndarray]:
    texts, halves = bytearray(), 0
    end = b"\n" if self.separator is None else b""
    data = b"\n".join(files.parts(path))
    for number, line in enumerate(io.BytesIO(data), start=1):
      place = f"{path}, line {number}"
      try:
        if not line.strip():
          continue
        record = {**json.loads(line)}
        if "text" not in record:
          raise ValueError(f"its fields are {reprlib.repr([*record])}")
        text, found = re.subn("[\ud800-\udfff]", "\ufffd", record["text"])
      except Exception as error:
        raise ValueError(
          f"{place} is not JSON with a text in its field 'text', as each line"
          f" must be: {files.kind(data) or error}"
        ) from None
      texts += self.document(text.encode(), place) + end
      halves += found
    if halves:
      files.tell(f"{path}: {halves:,} halves of characters became U+FFFD")
    return [np.frombuffer(texts, np.uint8)]


LETTERS = " abcdefghijklmnopqrstuvwxyz"


class Letters(Text):
  """The 27 symbols of text8: space, a to z."""

  vocab_size = 27
  unit = "bits/character"
  symbols = "space, a to z"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    data = data.removesuffix(b"\n")
    _check_letters(data, LETTERS, path, "a to z and the space")
    return np.frombuffer(data.translate(_table(LETTERS)), np.uint8)

  def encode(self, sequences: Rows) -> bytes:
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    return super().encode(letters[row] for row in sequences)


BASES = "ACGT"
# The bases that an ambiguous letter may stand for: IUPAC, Cornish-Bowden 1985,
# Nucleic Acids Research 13(9). Their order determines what is drawn.
AMBIGUOUS = dict(N="ACGT", R="AG", Y="CT", S="CG", W="AT", K="GT", M="AC")
AMBIGUOUS |= dict(B="CGT", D="AGT", H="ACT", V="ACG")
# A header follows comments and empty lines.
IS_FASTA = re.compile(rb"(?:\s*;[^\r\n]*+)*+\s*+>")
NO_BASES = re.compile(rb"[>;](?<![^\r\n].)[^\r\n]*")  # headers and comments
UPPERCASE = bytes(range(256)).upper().replace(b"U", b"T")


@dataclasses.dataclass(frozen=True)
class Fasta(Codec):
  """DNA as four bases: the concatenated records of a FASTA file.

  With a separator of 4, each record is a document. An ambiguous letter becomes
  one of the bases it may stand for, drawn with a fixed seed, and reported.
  Lowercase counts as uppercase, and U as T.
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
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not IS_FASTA.match(data):
      other = "other text" if data else "empty"
      raise ValueError(
        f"{path} is not a FASTA file, but {files.kind(data) or other};"
        " its first line must start with >: add one or choose another data.name"
      )
    # A genome has many lines: there is an object for each block of them only.
    text, start = bytearray(), 0
    while start < len(data):
      end = data.rfind(b"\n", start, start + BLOCK) + 1
      end = end or data.find(b"\n", start + BLOCK) + 1 or len(data)
      text += self._bases(data[start:end])
      start = end
    if self.separator is not None:
      del text[:1]
      text += b"U"  # after each record, not before it
    known = f"{BASES} and the ambiguous {''.join(AMBIGUOUS)}"
    _check_letters(text, f"{BASES}U{''.join(AMBIGUOUS)}", path, known)
    letters = np.frombuffer(text, np.uint8)
    rng, drawn = np.random.RandomState(0), []
    blocks = np.array_split(letters, 1 + len(letters) // BLOCK)
    for letter, bases in AMBIGUOUS.items():
      choices = np.frombuffer(bases.encode(), np.uint8)
      if number := text.count(letter.encode()):
        drawn.append(f"{number:,} {letter}")
        for block in blocks:
          here = np.flatnonzero(block == ord(letter))
          block[here] = choices[rng.randint(len(bases), size=len(here))]
    if drawn:
      files.tell(f"{path}: ambiguous bases drawn at random: {', '.join(drawn)}")
    for block in blocks:
      symbols = block.tobytes().translate(_table(f"{BASES}U"))
      block[:] = np.frombuffer(symbols, np.uint8)
    return letters

  def _bases(self, lines: bytes) -> bytes:
    """The letters of whole lines; U is for each header, if there are documents.

    Spaces are left out, also between letters.
    """
    header = b"" if self.separator is None else b"U"
    mark = lambda line: header if line[0].startswith(b">") else b""
    text = NO_BASES.sub(mark, lines.translate(UPPERCASE, b" \t\v\f"))
    return text.translate(None, b"\r\n")

  def encode(self, sequences: Rows) -> bytes:
    lines = []
    for i, symbols in enumerate(sequences):
      bases = "".join(f"{BASES}\n"[symbol] for symbol in symbols)
      for number, record in enumerate(bases.rstrip("\n").split("\n")):
        lines.append(f">sample_{i}" + (f"_{number}" if number else ""))
        lines += (record[j : j + 70] for j in range(0, len(record), 70))
    return "\n".join([*lines, ""]).encode()


def _table(symbols):
  """Translates letters to their indices in `symbols`."""
  return bytes.maketrans(symbols.encode(), bytes(range(len(symbols))))


def _check_letters(text, letters, path, known):
  """Raises ValueError if a text has others than these letters."""
  if others := text.translate(None, letters.encode()):
    first = chr(others[0])
    raise ValueError(
      f"{path} may contain only {known}, but has {len(others):,} other"
      f" characters; the first is {first!r} at index {text.find(others[0]):,}"
    )


# What .bin files begin with that are no rows of integers, by what they are.
NO_TOKENS = {
  "a NumPy array": b"\x93NUMPY",
  "Megatron's index": b"MMIDIDX",
  "llm.c's header of 1,024 bytes": struct.pack("<i", 20240520),
  "llm.c's header, and tokens of uint32": struct.pack("<i", 20240801),
}
HEADER = 1024  # bytes
# Of tokens in 32 bits, the upper halves are below, up to a vocabulary of 2^20.
UPPER, LOWER = 16, 4096


@dataclasses.dataclass(frozen=True)
class Tokens(Codec):
  """Integers of a tokenizer; in prompts and samples, as text on one line.

  A token_bytes.npy in the folder has the number of bytes of each.
  """

  vocab_size: int
  folder: pathlib.Path
  unit = "bits/token"
  symbols = "tokens"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    try:
      tokens = np.array([int(word) for word in data.split()], np.uint64)
    except (ValueError, OverflowError):
      raise ValueError(
        f"{path} must hold tokens as integers with spaces between them"
      ) from None
    self._check(tokens, path)
    return tokens.astype(np.min_scalar_type(self.vocab_size - 1))

  def read(self, path: pathlib.Path) -> list[np.ndarray]:
    """Maps a .npy file of uint8, uint16 or uint32, or uint16 in .bin."""
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".bin"):
      raise ValueError(
        f"{path} must end in .npy or, for tokens of uint16, in .bin; for text,"
        " set data.name to bytes"
      )
    if suffix == ".bin" and (other := _other_than_uint16(path)):
      raise ValueError(
        f"{path} holds {other}, but .bin is read as tokens of uint16; save the"
        " tokens as .npy of uint16 or uint32"
      )
    tokens = files.map_array(path)
    kinds = (np.uint8, np.uint16, np.uint32)
    if tokens.dtype not in kinds or tokens.ndim != 1 or not len(tokens):
      raise ValueError(
        f"{path} holds {tokens.dtype} {tokens.shape}; tokens must be a row of"
        " uint8, uint16 or uint32"
      )
    if np.iinfo(tokens.dtype).max < self.vocab_size - 1:
      raise ValueError(
        f"{path} holds {tokens.dtype}, which cannot hold"
        f" data.vocab_size={self.vocab_size}; set that to the tokenizer's, or"
        " save the tokens as .npy of uint32"
      )
    self._check(tokens, path)
    self.num_bytes(tokens[:0])  # a wrong table is found now
    return [tokens]

  def _check(self, tokens, path):
    if len(tokens) and (largest := tokens.max()) >= self.vocab_size:
      raise ValueError(
        f"{path}: token {largest} of {tokens.dtype} at index {tokens.argmax()}"
        f" is not below data.vocab_size={self.vocab_size}; set that to the"
        " tokenizer's"
      )

  def encode(self, sequences: Rows) -> bytes:
    return "".join(f"{' '.join(map(str, x))}\n" for x in sequences).encode()

  def num_bytes(self, symbols: np.ndarray) -> int | None:
    path = self.folder / "token_bytes.npy"
    if not path.exists():
      return None
    table, size = files.map_array(path), self.vocab_size
    is_table = table.dtype.kind in "iu" and table.shape == (size,)
    if not is_table or table.min() < 0:
      raise ValueError(
        f"{path} holds {table.dtype} {table.shape}; it must have an integer at"
        f" least 0 for each token, data.vocab_size={size}"
      )
    return int(table[symbols].sum(dtype=np.int64))


def _other_than_uint16(path: pathlib.Path) -> str:
  """What a .bin file holds if these are no tokens of uint16, or ""."""
  return _beginning(path) or _are_halves(files.map_array(path))


def _beginning(path: pathlib.Path) -> str:
  """What a .bin file begins with if these are no tokens, or ""."""
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


def _are_halves(words: np.ndarray) -> str:
  """A phrase that words are halves of larger integers, or "" if not."""
  for first in (0, 1):  # the upper halves come second, or in others first
    lower, upper = words[first::2], words[1 - first :: 2]
    if np.count_nonzero(lower) < 8:
      continue
    largest = upper.max(initial=0)
    if not largest or (largest < UPPER and lower.max() >= LOWER):
      return "32- or 64-bit tokens (of each two uint16, one is 0 or small)"
  return ""


MU = 255  # as in ITU-T G.711
MAX_RATE = 1_000_000  # the filter that converts it is up to 20 times as long
MAX_PEAK = 4  # of floats, which may be a little louder than 1
STREAM = 0x7FFFF000  # bytes or more: claimed for sound of unknown length


@dataclasses.dataclass(frozen=True)
class Audio(Codec):
  """Mono sound as 8-bit mu-law, at `rate` samples per second."""

  rate: int
  told: set[str] = dataclasses.field(default_factory=set, compare=False)
  vocab_size = 256
  unit = "bits/sample"
  symbols = "mu-law levels"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    import scipy.io.wavfile

    with files.blame(path), warnings.catch_warnings():
      if odd := _check_chunks(data):
        self.doubt(path, *odd)
      # The size of the whole, which that check does not need and SciPy does.
      size = struct.pack(_order(data) + "I", min(len(data), 2**32) - 8)
      data = data[:4] + size + data[8:] if data[:4] != b"RF64" else data
      # Of chunks that are not sound, and of a length that the check has told.
      warnings.simplefilter("ignore", scipy.io.wavfile.WavFileWarning)
      rate, samples = scipy.io.wavfile.read(io.BytesIO(data))
    if samples.ndim > 1:
      raise ValueError(
        f"{path} has {samples.shape[1]} channels; mix it down to one"
      )
    if not self.rate / 1_000 <= rate <= MAX_RATE:
      raise ValueError(f"{path} has {rate:,} samples per second")
    wave = _to_wave(samples, path)
    if np.abs(wave).max(initial=0) > 1:
      self.doubt(path, "samples beyond -1..1", "they are clipped")
    if rate != self.rate:
      import scipy.signal

      wave = scipy.signal.resample_poly(wave, self.rate, rate)
    return compress(wave)

  def save(self, stem: pathlib.Path, sequences: Rows) -> list[pathlib.Path]:
    import scipy.io.wavfile

    paths = []
    for path in stem.parent.glob(f"{stem.name}_[0-9]*.wav"):
      path.unlink()  # there may have been more samples before
    for i, symbols in enumerate(sequences):
      path = stem.with_name(f"{stem.name}_{i}.wav")
      wave = np.round(expand(symbols) * 32767).astype(np.int16)
      with atomic.writing(path) as new:
        scipy.io.wavfile.write(new, self.rate, wave)
      paths.append(path)
    return paths


def compress(wave: np.ndarray) -> np.ndarray:
  """Converts samples, clipped to [-1, 1], to their mu-law levels: uint8."""
  wave = np.clip(wave, -1, 1)
  level = np.sign(wave) * np.log1p(MU * np.abs(wave)) / np.log1p(MU)
  return np.round((level + 1) / 2 * MU).astype(np.uint8)


def expand(symbols: np.ndarray) -> np.ndarray:
  """Converts mu-law levels to samples in [-1, 1]: inverts `compress`."""
  level = symbols / MU * 2 - 1
  return np.sign(level) * np.expm1(np.abs(level) * np.log1p(MU)) / MU


def _order(data):
  """The byte order of the numbers in a WAV file, as `struct` has it."""
  return ">" if data[:4] == b"RIFX" else "<"


def _check_chunks(data):
  """Compares the sizes in the header of a WAV file with the file.

  SciPy reads as much as the header says, and leaves the rest out silently.
  Returns what is odd and what becomes of it, if anything is.
  """
  sounds, long_size, start = [], None, 12
  while re.fullmatch(b"(?s)[ -~]{4}.{4}", data[start : start + 8]):
    name, size = struct.unpack_from(f"{_order(data)}4sI", data, start)
    start += 8
    left = len(data) - start
    if name == b"ds64":  # the sizes of a file of over 4 GiB
      (long_size,) = struct.unpack_from("<Q", data, start + 8)
    if name == b"data":
      size = size if long_size is None else long_size
      sounds.append(size)
      if long_size is None and left < size >= STREAM:
        return "the header of a stream", "all that follows is read"
    if size > left:
      raise ValueError(f"its chunk {name!r} has {left:,} of {size:,} bytes")
    start += size + size % 2
  rest = len(data) - start
  if rest > 0 and not any(sounds):
    raise ValueError(f"its header does not count its last {rest:,} bytes")
  if len(sounds) != 1:
    raise ValueError(f"it has {len(sounds)} chunks b'data', not one")
  if rest > 0:
    return "last bytes that its header does not count", "they are not read"
  return ()


def _to_wave(samples, path):
  """Converts samples of any dtype to numbers in [-1, 1]."""
  if samples.dtype == np.uint8:
    return samples / 128 - 1
  if samples.dtype.kind == "i":
    return samples / -float(np.iinfo(samples.dtype).min)
  if len(bad := np.flatnonzero(~np.isfinite(samples))):
    raise ValueError(
      f"{path}: sample {bad[0]} is {samples[bad[0]]}, not finite"
    )
  peak = np.abs(samples).max(initial=0)
  if peak > MAX_PEAK:
    raise ValueError(
      f"{path}: its samples reach {peak:,.6g}; scale them to -1..1"
    )
  return samples.astype(np.float64)
