"""Sound: WAV files as mu-law levels.

Files have PCM of 8 to 32 bits, or floats, at any rate. SciPy reads them.
"""

import dataclasses
import io
import pathlib
import re
import struct
import warnings

import numpy as np

from sparse_transformer import atomic
from sparse_transformer.data import codecs, files

# The mu of ITU-T G.711.
MU = 255
# Samples per second at most: the filter that converts them to another rate has
# up to 20 times as many coefficients.
MAX_RATE = 1_000_000
# Floats may be a little louder than 1; beyond this, they have another scale.
MAX_PEAK = 4
# A header claims this many bytes, or more, for sound of unknown length.
STREAM = 0x7FFFF000
# The name and the size of a chunk.
CHUNK = re.compile(b"(?s)[ -~]{4}.{4}")


@dataclasses.dataclass(frozen=True)
class Audio(codecs.Codec):
  """Mono sound as 8-bit mu-law.

  Attributes:
    rate: samples per second. Files of another rate are resampled.
  """

  rate: int
  vocab_size = 256
  unit = "bits/sample"
  symbols = "mu-law levels"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """See `Codec.decode`; raises ValueError if there are several channels."""
    rate, samples = _read_wav(data, path)
    # Channels in turn would double the length of a sequence and halve its rate.
    if samples.ndim > 1:
      raise ValueError(
        f"{path} has {samples.shape[1]} channels; mix it down to one"
      )
    if not self.rate / 1_000 <= rate <= MAX_RATE:
      raise ValueError(f"{path} has {rate:,} samples per second")

    wave = _to_wave(samples, path)
    if np.abs(wave).max(initial=0) > 1:
      codecs.warn_of_file(path, "samples beyond -1..1", "they are clipped")
    if rate != self.rate:
      import scipy.signal

      # Its filter removes the frequencies that the lower of both
      # rates cannot hold.
      wave = scipy.signal.resample_poly(wave, self.rate, rate)
    return compress(wave)

  def save(
    self, stem: pathlib.Path, sequences: codecs.Rows
  ) -> list[pathlib.Path]:
    """Writes each row as a WAV file of 16 bits: STEM_0.wav, STEM_1.wav, ...

    Earlier files with such names are deleted.
    """
    import scipy.io.wavfile

    for path in stem.parent.glob(f"{stem.name}_[0-9]*.wav"):
      path.unlink()  # there may have been more samples before
    paths = []
    for i, symbols in enumerate(sequences):
      path = stem.with_name(f"{stem.name}_{i}.wav")
      # 32,767 is the largest int16, so that a level of 1 does not wrap around.
      wave = np.round(expand(symbols) * 32767).astype(np.int16)
      with atomic.writing(path) as new:
        scipy.io.wavfile.write(new, self.rate, wave)
      paths.append(path)
    return paths


def compress(wave: np.ndarray) -> np.ndarray:
  """Converts samples to their mu-law levels.

  Levels are dense where the wave is quiet, as hearing is: with μ = 255,
  `sign(x) log(1 + μ|x|) / log(1 + μ)`, rounded to 8 bits (ITU-T G.711; van den
  Oord et al. 2016, arXiv 1609.03499, section 2.2).

  Args:
    wave: samples, floats of any shape; they are clipped to [-1, 1].

  Returns:
    uint8 of the same shape; silence is 128.
  """
  wave = np.clip(wave, -1, 1)

  level = np.sign(wave) * np.log1p(MU * np.abs(wave)) / np.log1p(MU)
  return np.round((level + 1) / 2 * MU).astype(np.uint8)


def expand(symbols: np.ndarray) -> np.ndarray:
  """Converts mu-law levels to samples: inverts `compress`.

  Args:
    symbols: levels, integers from 0 to 255, of any shape.

  Returns:
    Floats in [-1, 1] of the same shape.
  """
  level = symbols / MU * 2 - 1
  return np.sign(level) * np.expm1(np.abs(level) * np.log1p(MU)) / MU


def _read_wav(data, path):
  """The rate of a WAV file, and its samples [n] or [n, channels]."""
  import scipy.io.wavfile

  with files.blame(path), warnings.catch_warnings():
    oddity, result = _check_chunks(data)
    if oddity:
      codecs.warn_of_file(path, oddity, result)

    # SciPy needs the size of the whole, which that check does not.
    if data.startswith(b"RIFF"):
      size = min(len(data), 2**32) - 8
      data = b"RIFF" + struct.pack("<I", size) + data[8:]
    # Of chunks that are not sound, and of a length that the check has told.
    warnings.simplefilter("ignore", scipy.io.wavfile.WavFileWarning)
    return scipy.io.wavfile.read(io.BytesIO(data))


def _check_chunks(data):
  """Compares the sizes in the header of a WAV file with the file.

  SciPy reads as much as the header says, and leaves the rest out silently.
  Returns what is odd, and what becomes of it, or two empty texts; raises
  ValueError if sound is missing.
  """
  # A RIFF file begins with 12 bytes: RIFF, its size, WAVE. Chunks follow.
  sounds = []
  long_size = None  # of the sound, in a file of over 4 GiB
  start = 12
  while CHUNK.fullmatch(data[start : start + 8]):
    name, size = struct.unpack_from("<4sI", data, start)
    start += 8
    left = len(data) - start
    if name == b"ds64":
      (long_size,) = struct.unpack_from("<Q", data, start + 8)
    if name == b"data":
      is_stream = long_size is None and size >= STREAM
      size = size if long_size is None else long_size
      sounds.append(size)
      if is_stream and size > left:
        return "the header of a stream", "all that follows is read"

    if size > left:
      raise ValueError(f"its chunk {name!r} has {left:,} of {size:,} bytes")
    start += size + size % 2  # padded to whole words

  # Some programs write 0 for the size of sound that they do not know yet.
  rest = len(data) - start
  if rest > 0 and not any(sounds):
    raise ValueError(f"its header does not count its last {rest:,} bytes")
  if len(sounds) != 1:
    raise ValueError(f"it has {len(sounds)} chunks b'data', not one")
  if rest > 0:
    return "last bytes that its header does not count", "they are not read"
  return "", ""


def _to_wave(samples, path):
  """Converts samples of any dtype to numbers in [-1, 1].

  WAV files have unsigned samples of 8 bits, and signed ones of more. Floats are
  kept, and may be slightly louder. Raises ValueError if they are not finite, or
  have another scale.
  """
  if samples.dtype == np.uint8:
    return samples / 128 - 1
  if samples.dtype.kind == "i":
    # The least value becomes -1, and the largest is a little below 1.
    return samples / -float(np.iinfo(samples.dtype).min)

  bad = np.flatnonzero(~np.isfinite(samples))
  if len(bad):
    raise ValueError(
      f"{path}: sample {bad[0]} is {samples[bad[0]]}, not finite"
    )

  peak = np.abs(samples).max(initial=0)
  if peak > MAX_PEAK:
    raise ValueError(
      f"{path}: its samples reach {peak:,.6g}; scale them to -1..1"
    )
  return samples.astype(np.float64)
