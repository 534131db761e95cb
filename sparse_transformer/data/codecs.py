"""What symbols stand for: files to symbols, and drawn symbols to files.

Each codec has `vocab_size`, `unit` (what one symbol is), `suffix` of the files
it writes, `decode` (the bytes of a file, named `path`, to symbols: uint8) and
`save` (drawn sequences to files: the paths).
"""

import collections
import dataclasses
import io
import sys

import numpy as np

from sparse_transformer.data import files

UNKNOWN = 255  # of a letter that stands for nothing


class Text:
  """Bytes as they are."""

  vocab_size, unit, suffix = 256, "bits/byte", ".txt"

  def decode(self, data, path):
    del path
    return np.frombuffer(data, np.uint8)

  def save(self, stem, sequences):
    path = stem.with_suffix(self.suffix)
    path.write_bytes(b"\n\n".join(map(self.encode, sequences)))
    return [path]

  def encode(self, symbols):
    return bytes(symbols)


class Letters(Text):
  """The 27 symbols of text8: space, a to z."""

  vocab_size, unit = 27, "bits/character"

  def decode(self, data, path):
    letters = np.frombuffer(data, np.uint8)
    found = _table(" abcdefghijklmnopqrstuvwxyz")[letters]
    _refuse(found == UNKNOWN, letters, path, "a to z and the space")
    return found

  def encode(self, symbols):
    return bytes(np.where(symbols == 0, ord(" "), symbols + ord("a") - 1))


# What ambiguous letters may be: IUPAC, Cornish-Bowden 1985, Nucleic Acids
# Research 13(9).
AMBIGUOUS = dict(
  N="ACGT", R="AG", Y="CT", S="CG", W="AT", K="GT", M="AC", B="CGT", D="AGT"
) | dict(H="ACT", V="ACG")
BASES = "ACGT"


class Fasta(Text):
  """DNA: four bases, the records of a FASTA file one after the other.

  An ambiguous letter is read as one of the bases it may be, drawn with a fixed
  seed; how many there are is told on standard error. Small letters are read as
  large ones, U as T.
  """

  vocab_size, unit, suffix = 4, "bits/base", ".fasta"

  def decode(self, data, path):
    lines = data.split(b"\n")
    if not any(line.startswith(b">") for line in lines):
      raise ValueError(f"{path} is no FASTA file: no line starts with >")
    bases = b"".join(
      line.strip() for line in lines if not line.startswith((b">", b";"))
    )
    letters = np.frombuffer(bases.upper().replace(b"U", b"T"), np.uint8)
    found = _table(BASES)[letters]
    counts = collections.Counter()
    draw = np.random.RandomState(0)
    for letter, bases in AMBIGUOUS.items():
      here = np.flatnonzero(letters == ord(letter))
      choices = [BASES.index(base) for base in bases]
      found[here] = np.array(choices)[draw.randint(len(bases), size=len(here))]
      counts[letter] = len(here)
    known = f"{BASES} and the ambiguous {''.join(AMBIGUOUS)}"
    _refuse(found == UNKNOWN, letters, path, known)
    if some := ", ".join(
      f"{n:,} {letter}" for letter, n in counts.items() if n
    ):
      print(f"{path}: ambiguous bases drawn at random: {some}", file=sys.stderr)
    return found

  def save(self, stem, sequences):
    path = stem.with_suffix(self.suffix)
    with path.open("w") as file:
      for i, symbols in enumerate(sequences):
        bases = "".join(BASES[symbol] for symbol in symbols)
        lines = (bases[j : j + 70] for j in range(0, len(bases), 70))
        print(f">sample_{i}", *lines, sep="\n", file=file)
    return [path]


MU = 255  # of ITU-T G.711


@dataclasses.dataclass(frozen=True)
class Audio:
  """One channel of sound as 8-bit mu-law, at `rate` samples per second."""

  rate: int
  vocab_size, unit, suffix = 256, "bits/sample", ".wav"

  def __post_init__(self):
    if self.rate < 1:
      raise ValueError(f"data.rate={self.rate} must be at least 1")

  def decode(self, data, path):
    import scipy.io.wavfile
    import scipy.signal

    # SciPy reads what there is of a file that was cut.
    size = int.from_bytes(data[4:8], "little") + 8
    try:
      if len(data) < size < 2**32:  # which stands for an unknown size
        raise ValueError(f"{len(data):,} bytes of {size:,}")
      rate, samples = scipy.io.wavfile.read(io.BytesIO(data))
    except Exception as error:  # of many types, each for another broken file
      raise files.damaged(path, error) from error
    if samples.ndim != 1:
      raise ValueError(
        f"{path} has {samples.shape[1]} channels; mix it down to one"
      )
    wave = _to_wave(samples, path)
    if rate != self.rate:
      divisor = np.gcd(rate, self.rate)
      wave = scipy.signal.resample_poly(
        wave, self.rate // divisor, rate // divisor
      )
    return compress(wave)

  def save(self, stem, sequences):
    import scipy.io.wavfile

    paths = []
    for i, symbols in enumerate(sequences):
      path = stem.with_name(f"{stem.name}_{i}{self.suffix}")
      wave = np.round(expand(symbols) * 32767).astype(np.int16)
      scipy.io.wavfile.write(path, self.rate, wave)
      paths.append(path)
    return paths


def _to_wave(samples, path):
  """Samples of any type as numbers between -1 and 1."""
  if samples.dtype == np.uint8:
    return samples / 127.5 - 1
  if np.issubdtype(samples.dtype, np.integer):
    return samples / -float(np.iinfo(samples.dtype).min)
  bad = np.flatnonzero(~np.isfinite(samples))
  if len(bad):
    raise ValueError(
      f"{path}: sample {bad[0]} is {samples[bad[0]]}; a wave has finite samples"
    )
  return samples.astype(np.float64)


def compress(wave):
  """Numbers in [-1, 1], others cut off, as 256 levels: uint8."""
  wave = np.clip(wave, -1, 1)
  level = np.sign(wave) * np.log1p(MU * np.abs(wave)) / np.log1p(MU)
  return np.round((level + 1) / 2 * MU).astype(np.uint8)


def expand(symbols):
  """Undoes `compress` up to its rounding."""
  level = symbols / MU * 2 - 1
  return np.sign(level) * np.expm1(np.abs(level) * np.log1p(MU)) / MU


def _table(letters):
  """The symbol of each byte: the place among the letters, or UNKNOWN."""
  table = np.full(256, UNKNOWN, np.uint8)
  table[list(letters.encode())] = range(len(letters))
  return table


def _refuse(wrong, symbols, path, known):
  """Raises an error that names the first symbol that is wrong."""
  places = np.flatnonzero(wrong)
  if len(places):
    first = places[0]
    raise ValueError(
      f"{path}: {len(places):,} symbols are none of {known}; the first is"
      f" {chr(symbols[first])!r}, number {first:,}"
    )
