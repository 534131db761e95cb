"""Sound: WAV files as mu-law levels.

WAV files may contain PCM of 8 to 32 bits, or floats, at any sampling rate. They
are read by SciPy.
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
# Maximum number of samples per second. It is limited because the filter for
# resampling has up to 20 times as many coefficients.
MAX_RATE = 1_000_000
# Float samples may slightly exceed 1. If they exceed this, their scale must be
# wrong.
MAX_PEAK = 4
# If the length of the sound is unknown, a header states at least this many
# bytes.
STREAM = 0x7FFFF000
# The name and the size at the start of a chunk.
CHUNK = re.compile(b"(?s)[ -~]{4}.{4}")


@dataclasses.dataclass(frozen=True)
class Audio(codecs.Codec):
  """Mono sound as 8-bit mu-law.

  Attributes:
    rate: samples per second. Files with a different rate are resampled.
  """

  rate: int
  vocab_size = 256
  unit = "bits/sample"
  symbols = "mu-law levels"

  def decode(self, data: bytes, path: pathlib.Path) -> np.ndarray:
    """See `Codec.decode`. Raises ValueError if there are several channels."""
    rate, samples = _read_wav(data, path)
    # Interleaved channels would halve the duration of a sequence.
    if samples.ndim > 1:
      raise ValueError(
        f"{path} has {samples.shape[1]} channels; mix them down to one"
      )
    if not self.rate / 1_000 <= rate <= MAX_RATE:
      raise ValueError(
        f"{path} has {rate:,} samples per second; it must have at least"
        f" {self.rate / 1_000:,} and at most {MAX_RATE:,}"
      )

    wave = _to_wave(samples, path)
    if np.abs(wave).max(initial=0) > 1:
      codecs.warn_of_file(path, "samples outside -1..1", "they are clipped")
    if rate != self.rate:
      import scipy.signal

      # This filters out frequencies that the lower of the two rates cannot
      # represent.
      wave = scipy.signal.resample_poly(wave, self.rate, rate)
    return compress(wave)

  def save(
    self, stem: pathlib.Path, sequences: codecs.Rows
  ) -> list[pathlib.Path]:
    """Writes each row as a 16-bit WAV file: STEM_0.wav, STEM_1.wav and so on.

    Existing files with such names are deleted first. Otherwise, some of them
    would remain if an earlier call wrote more samples.
    """
    import scipy.io.wavfile

    for path in stem.parent.glob(f"{stem.name}_[0-9]*.wav"):
      path.unlink()
    paths = []
    for i, symbols in enumerate(sequences):
      path = stem.with_name(f"{stem.name}_{i}.wav")
      # Scale by 32,767, the largest int16, so that 1 does not overflow.
      wave = np.round(expand(symbols) * 32767).astype(np.int16)
      with atomic.writing(path) as new:
        scipy.io.wavfile.write(new, self.rate, wave)
      paths.append(path)
    return paths


def compress(wave: np.ndarray) -> np.ndarray:
  """Converts samples to mu-law levels.

  Levels are denser for quiet samples, to which hearing is more sensitive. A
  level is `sign(x) log(1 + μ|x|) / log(1 + μ)` with μ = 255, rounded to 8 bits.
  Source: ITU-T G.711; van den Oord et al. 2016, arXiv 1609.03499, section 2.2.

  Args:
    wave: samples, floats of any shape; they are clipped to [-1, 1].

  Returns:
    uint8 of the same shape; silence is 128.
  """
  wave = np.clip(wave, -1, 1)

  level = np.sign(wave) * np.log1p(MU * np.abs(wave)) / np.log1p(MU)
  return np.round((level + 1) / 2 * MU).astype(np.uint8)


def expand(symbols: np.ndarray) -> np.ndarray:
  """Converts mu-law levels to samples, the inverse of `compress`.

  Args:
    symbols: levels, integers from 0 to 255, of any shape.

  Returns:
    Floats in [-1, 1] of the same shape.
  """
  level = symbols / MU * 2 - 1
  return np.sign(level) * np.expm1(np.abs(level) * np.log1p(MU)) / MU


def _read_wav(data, path):
  """Returns the rate of a WAV file, and its samples [n] or [n, channels]."""
  import scipy.io.wavfile

  with files.blame(path), warnings.catch_warnings():
    oddity, result = _check_chunks(data)
    if oddity:
      codecs.warn_of_file(path, oddity, result)

    # SciPy needs the size of the whole file in the header, which may be wrong.
    if data.startswith(b"RIFF"):
      size = min(len(data), 2**32) - 8
      data = b"RIFF" + struct.pack("<I", size) + data[8:]
    # Hide SciPy's warnings about other chunks, and about a length that was
    # already reported.
    warnings.simplefilter("ignore", scipy.io.wavfile.WavFileWarning)
    return scipy.io.wavfile.read(io.BytesIO(data))


def _check_chunks(data):
  """Compares the sizes in the header of a WAV file with its contents.

  This is necessary because SciPy reads only as much as the header states, and
  silently ignores the rest.

  Returns:
    (oddity, result): what is unusual about the file, and what happens to it; or
    two empty strings.

  Raises ValueError if sound is missing.
  """
  # A RIFF file begins with 12 bytes: RIFF, its size, and WAVE. Chunks follow.
  sounds = []
  long_size = None  # size of the sound, in a file larger than 4 GiB
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
        return "the header of a stream", "the rest of the file is read as sound"

    if size > left:
      raise ValueError(
        f"its chunk {name!r} has only {left:,} of {size:,} bytes"
      )
    start += size + size % 2  # chunks are padded to an even size

  # Some programs write a size of 0 if they do not know the size yet.
  rest = len(data) - start
  if rest > 0 and not any(sounds):
    raise ValueError(
      f"{rest:,} bytes follow the end that its header gives; correct the header"
    )
  if len(sounds) != 1:
    raise ValueError(f"it has {len(sounds)} chunks b'data'; it must have one")
  if rest > 0:
    return "bytes after the end stated in its header", "they are not read"
  return "", ""


def _to_wave(samples, path):
  """Converts samples of any dtype to floats in [-1, 1].

  In WAV files, 8-bit samples are unsigned, and longer integers are signed.
  Float samples are not scaled, so they may slightly exceed [-1, 1]. Raises
  ValueError if float samples are not finite, or if they are too large to be
  samples in this range.
  """
  if samples.dtype == np.uint8:
    return samples / 128 - 1
  if samples.dtype.kind == "i":
    # The smallest value becomes -1, and the largest slightly less than 1.
    return samples / -float(np.iinfo(samples.dtype).min)

  bad = np.flatnonzero(~np.isfinite(samples))
  if len(bad):
    raise ValueError(
      f"{path}: sample {bad[0]} is {samples[bad[0]]}; samples must be finite"
    )

  peak = np.abs(samples).max(initial=0)
  if peak > MAX_PEAK:
    raise ValueError(
      f"{path}: its samples reach {peak:,.6g}; scale them to -1..1"
    )
  return samples.astype(np.float64)
