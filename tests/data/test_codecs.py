"""Tests of codecs: files to symbols and back."""

import io
import itertools
import pathlib
import re
import struct
import tracemalloc

import hypothesis
import numpy as np
import pytest
import scipy.io.wavfile
from helpers import small_data
from helpers.errors import refused
from hypothesis import strategies

from sparse_transformer.data.audio import Audio, compress, expand
from sparse_transformer.data.fasta import AMBIGUOUS, Fasta
from sparse_transformer.data.text import RULE, JsonLines, Letters, Text
from sparse_transformer.data.tokens import Tokens

CODECS = {
  "text": Text(),
  "text8": Letters(),
  "x.fasta": Fasta(),
  "x.wav": Audio(12_000),
  "tokens": Tokens(50_304, pathlib.Path()),
}


def wav(samples, rate=12_000):
  file = io.BytesIO()
  scipy.io.wavfile.write(file, rate, samples)
  return file.getvalue()


def riff(*chunks, form=(1, 1, 12_000, 24_000, 2, 16), more=b"", name=b"RIFF"):
  """A WAV file of chunks (name, content[, claimed size]) after its format."""
  first = [chunk for chunk in chunks if chunk[0] == b"ds64"]
  format_chunk = b"fmt ", struct.pack("<HHIIHH", *form) + more
  rest = chunks[len(first) :]

  content = b"WAVE"
  for chunk_name, part, *size in (*first, format_chunk, *rest):
    claimed = size[0] if size else len(part)
    padding = bytes(len(part) % 2)
    content += chunk_name + struct.pack("<I", claimed) + part + padding

  return name + struct.pack("<I", len(content)) + content


LEVELS = np.array([0, 200, -9000, 32767, -32768], "<i2")
SOUND = (b"data", LEVELS.tobytes())
EXTENSIBLE = struct.pack("<HHIH", 22, 16, 4, 1)  # its format is 1, of PCM
EXTENSIBLE += bytes.fromhex("000000001000800000aa00389b71")


def claiming(size):
  """50 samples, whose header claims a number of bytes."""
  return riff((b"data", bytes(100), size))


def silence(number=9, dtype="i2", rate=12_000):
  return wav(np.zeros(number, dtype), rate)


def tone(rate, seconds=0.5, hertz=440):
  times = np.arange(int(rate * seconds)) / rate
  return 0.5 * np.sin(2 * np.pi * hertz * times)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_saved_symbols_decode_to_the_same_symbols(codec, tmp_path):
  random = np.random.RandomState(0)
  dtype = np.min_scalar_type(codec.vocab_size - 1)
  symbols = random.randint(0, codec.vocab_size, 150).astype(dtype)
  (path,) = codec.save(tmp_path / "samples", [symbols])
  assert path.stem.startswith("samples")
  np.testing.assert_array_equal(codec.decode(path.read_bytes(), path), symbols)


def of_format(tag, block, bits):
  """A WAV file without samples, of one channel with 9,000 of them a second."""
  form = (tag, 1, 9000, 9000 * block, block, bits)
  return riff((b"data", b""), form=form)


def test_several_sequences_are_saved(tmp_path):
  sequences = np.random.RandomState(0).randint(0, 4, (3, 150)).astype(np.uint8)

  def save(codec, rows=sequences):
    return codec.save(tmp_path / "samples", rows)

  (text,) = save(Text())
  parts = text.read_bytes().split(RULE)
  assert parts == [row.tobytes() for row in sequences]

  (fasta,) = save(Fasta())
  found = Fasta().decode(fasta.read_bytes(), fasta)
  np.testing.assert_array_equal(found, sequences.ravel())
  assert max(map(len, fasta.read_text().splitlines())) == 70

  sounds = save(Audio(12_000))
  assert [x.name for x in sounds] == [f"samples_{i}.wav" for i in range(3)]
  save(Audio(12_000), sequences[:2])  # those of before are removed
  assert sorted(tmp_path.glob("*.wav")) == sounds[:2]


NO_FASTA = "not a FASTA file, but other text"


NO_KIND = "x.wav is damaged or truncated, or its format is not supported"


@pytest.mark.parametrize(
  "name, content, words",
  [
    ("text8", b"ab!", ["a to z and the space", "'!'", "index 2"]),
    ("text8", b"a{{", ["2 other characters", "'{'"]),
    ("x.fasta", b">x\nACX!\n", ["2 other characters", "'X'", "index 2"]),
    ("x.fasta", b">x\nAC-GT*\n", ["2 other characters", "'-'", "index 2"]),
    ("x.fasta", b">x\nMKLVE\n", ["2 other characters", "'L'", "index 2"]),
    ("x.fasta", b">x\n 1 AC\n11 GT\n", ["3 other", "'1'", "index 0"]),
    ("x.fasta", b">x\nAC>GT\n", ["1 other", "'>'", "index 2"]),
    ("x.fasta", b"@x\nACGT\n+\nIIII\n", [NO_FASTA]),
    ("x.fasta", b"ACGT\n>x\nACGT\n", [NO_FASTA]),
    ("x.fasta", b";only > a comment", [NO_FASTA]),
    ("x.fasta", b"", ["is not a FASTA file, but empty"]),
    ("x.wav", claiming(101), ["damaged", "'data' has only 100 of 101 bytes"]),
    ("x.wav", claiming(2**30), ["'data' has only 100 of 1,073,741,824 bytes"]),
    ("x.wav", silence()[:-1], ["damaged or truncated"]),
    ("x.wav", claiming(0), ["100 bytes follow the end that its header"]),
    ("x.wav", riff(), ["has 0 chunks b'data'; it must have one"]),
    ("x.wav", riff(SOUND, SOUND), ["has 2 chunks b'data'"]),
    ("x.wav", riff((b"data", bytes(3))), ["multiple of element size"]),
    ("x.wav", b"FORM" + riff(SOUND)[4:], ["damaged", "FORM"]),
    # A-law, mu-law, ADPCM; frames of no bytes; floats of 16 bits.
    ("x.wav", of_format(tag=6, block=1, bits=8), [NO_KIND, "ALAW"]),
    ("x.wav", of_format(tag=7, block=1, bits=8), [NO_KIND, "MULAW"]),
    ("x.wav", of_format(tag=17, block=256, bits=4), [NO_KIND, "DVI_ADPCM"]),
    ("x.wav", of_format(tag=1, block=0, bits=16), [NO_KIND, "modulo by zero"]),
    ("x.wav", of_format(tag=3, block=2, bits=16), [NO_KIND, "16-bit floating"]),
    ("x.wav", silence((9, 2)), ["x.wav has 2 channels; mix them"]),
    ("x.wav", wav(np.array([0, 32768.0])), ["samples reach 32,768; scale"]),
    ("x.wav", wav(np.array([0, -4.5], "f4")), ["samples reach 4.5; scale"]),
    (
      "x.wav",
      wav(np.array([0, np.nan])),
      ["sample 1 is nan; samples must be finite"],
    ),
    ("x.wav", silence(rate=0), ["has 0 samples per second"]),
    ("x.wav", silence(rate=2**31 - 1), ["samples per second"]),
    ("x.wav", silence(rate=1), ["has 1 samples per second"]),
    ("x.wav", b"RIFX not a wav at all", ["its format is not supported"]),
  ],
)
def test_file_without_symbols_is_an_error_that_says_why(name, content, words):
  with refused(name, *map(re.escape, words)):
    CODECS[name].decode(content, name)


def bases_by_line(data, separator):
  """What `Fasta` reads, line by line and letter by letter."""
  end = b"" if separator is None else b"\n"
  text = b""
  lines = data.removeprefix(b"\xef\xbb\xbf").splitlines()
  for line in lines:
    line = line.strip()
    if line.startswith(b">"):
      text += end
    elif not line.startswith(b";"):
      text += line.upper().replace(b"U", b"T").replace(b" ", b"")

  # The first record begins, and the last one ends.
  letters = np.array([*text.removeprefix(end), *end], np.uint8)

  random = np.random.RandomState(0)
  for letter, bases in AMBIGUOUS.items():
    here = np.flatnonzero(letters == ord(letter))
    drawn = random.randint(len(bases), size=len(here))
    letters[here] = [ord(bases[i]) for i in drawn]

  return [b"ACGT\n".index(letter) for letter in letters]


LINES = (
  b">",
  b">chr1 N;x",
  b" >a\t",
  b";>note",
  b"",
  b" ",
  b"acgtuACGTU",
  b"NNN",
  b"RYSWKMBDHVN",
  b"\tGA\x0b",
  b"AC GT",
  b"acgtnryACGT" * 9,
)


@hypothesis.given(
  lines=strategies.lists(
    strategies.tuples(
      strategies.sampled_from(LINES),
      strategies.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"]),
    )
  ),
  begin=strategies.sampled_from([b"", b"\xef\xbb\xbf", b"\n;x\r\n \n"]),
  is_cut=strategies.booleans(),
  block=strategies.sampled_from([1, 7, 64, 2**22]),
  separator=strategies.sampled_from([None, 4]),
)
@hypothesis.settings(deadline=None)
def test_bases_are_those_of_the_lines(lines, begin, is_cut, block, separator):
  data = begin + b">x\n" + b"".join(itertools.chain(*lines))
  data = data.rstrip(b"\r\n") if is_cut else data
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("sparse_transformer.data.fasta.BLOCK", block)
    found = Fasta(separator).decode(data, "x.fasta")
  assert found.tolist() == bases_by_line(data, separator)


def test_long_genome_needs_little_more_memory_than_its_letters():
  data = b">x\n" + b"".join(b"ACGTNacgtn" * 6 + b"\n" for _ in range(200_000))
  tracemalloc.start()
  try:
    found = Fasta(4).decode(data, "x.fasta")
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()

  assert len(found) == 12_000_001
  assert found[-1] == 4
  assert peak < 4 * len(found)  # with an object for each line, 7 times


def test_letters_may_end_in_a_newline_of_an_editor():
  codec = Letters()
  assert codec.encode([codec.decode(b"the end\n", "prompt")]) == b"the end"


def test_separator_follows_each_document(tmp_path):
  codec = Fasta(4)
  text = b">one\nACG\nT\n>two\n;comment\nTT\n"
  found = codec.decode(text, "x.fasta")
  np.testing.assert_array_equal(found, [0, 1, 2, 3, 4, 3, 3, 4])
  assert codec.vocab_size == 5
  assert Fasta().vocab_size == 4

  (path,) = codec.save(tmp_path / "samples", found[None, :-1])
  np.testing.assert_array_equal(codec.decode(path.read_bytes(), path), found)

  found = Text(0).decode(b"ab", "x")
  np.testing.assert_array_equal(found, [97, 98, 0])
  with refused("x contains byte 0 at index 1, .*documents=True"):
    Text(0).decode(b"a\0b", "x")


@pytest.mark.parametrize(
  "codec, content",
  [
    (Text(0), b"ab"),
    (JsonLines(), b'{"text": "ab"}'),
    (Fasta(), b">x\nAC"),
    (Audio(12_000), wav(np.arange(9, dtype=np.int16))),
  ],
)
def test_files_of_an_archive_are_read_one_by_one(tmp_path, codec, content):
  file = tmp_path / "a"
  archive = tmp_path / "x.zip"
  file.write_bytes(content)
  small_data.write_zip(
    archive,
    dict(
      a=content,
      b=content,
    ),
  )
  expected = np.concatenate(codec.read(file) * 2)
  found = np.concatenate(codec.read(archive))
  np.testing.assert_array_equal(found, expected)


def test_ambiguous_bases_are_drawn_and_reported(capsys):
  text = b">x\n" + b"N" * 4000 + b"R" * 100 + b"A"
  found = Fasta().decode(text, "x.fasta")
  of_n, of_r, last = np.split(found, [4000, 4100])
  counts = np.bincount(of_n, minlength=4)

  assert counts.min() > 900
  assert counts.sum() == 4000
  assert set(of_r) == {0, 2}
  assert last == [0]
  np.testing.assert_array_equal(found, Fasta().decode(text, "x.fasta"))
  assert "4,000 N, 100 R" in capsys.readouterr().err


WITH_CHUNKS = riff((b"LIST", b"odd"), SOUND, (b"id3 ", b"x"))


WITHOUT_SIZE = b"RIFF\0\0\0\0" + riff(SOUND)[8:]


RF64 = riff(
  (b"ds64", struct.pack("<QQQ", 90, 10, 5)),
  (*SOUND, 2**32 - 1),
  (b"LIST", b"info"),
  name=b"RF64",
)


STREAM = "x.wav has the header of a stream, and other files may, too"


MORE_BYTES = "x.wav has bytes after the end stated in its header"


@pytest.mark.parametrize(
  "data, line",
  [
    (riff(SOUND), ""),
    (WITHOUT_SIZE, ""),
    (WITH_CHUNKS, ""),
    (WITH_CHUNKS[:-1], ""),
    (riff(SOUND, form=(0xFFFE, 1, 12_000, 24_000, 2, 16), more=EXTENSIBLE), ""),
    (RF64, ""),
    # Of streams: by ffmpeg, by sox, by arecord.
    (riff((*SOUND, 2**32 - 1)), STREAM),
    (riff((*SOUND, 0x7FFFF000)), STREAM),
    (riff((*SOUND, 2**31)), STREAM),
    (riff(SOUND) + b"TAG\0" * 32, MORE_BYTES),
    (riff((b"data", SOUND[1] + bytes(90), 10)), MORE_BYTES),
  ],
)
def test_header_tells_where_the_sound_is(data, line, capfd):
  found = Audio(12_000).decode(data, "x.wav")
  np.testing.assert_array_equal(found, compress(LEVELS / 32768))
  lines = capfd.readouterr().err
  assert line in lines
  assert bool(line) == bool(lines)


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_sound_has_the_same_levels_in_every_format(bits):
  sound = np.random.RandomState(0).randint(-128, 128, 400)
  width = bits // 8
  samples = sound << bits - 8
  samples += 128 * (bits == 8)
  content = samples.astype("<i8").view("u1").reshape(-1, 8)[:, :width]
  form = (1, 1, 12_000, 12_000 * width, width, bits)
  data = riff((b"data", content.tobytes()), form=form)
  found = Audio(12_000).decode(data, "x.wav")
  np.testing.assert_array_equal(found, compress(sound / 128))


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
def test_sound_of_floats_has_its_levels(dtype):
  sound = np.random.RandomState(0).randint(-128, 128, 400) / 128
  found = Audio(12_000).decode(wav(sound.astype(dtype)), "x")
  np.testing.assert_array_equal(found, compress(sound))


def test_sound_a_little_too_loud_is_clipped_and_told_once(tmp_path, capfd):
  data = wav(np.array([0.5, 1.2, -1]))
  clipped = compress(np.array([0.5, 1, -1]))
  for i in range(3):
    found = Audio(12_000).decode(data, tmp_path / f"{i}.wav")
    np.testing.assert_array_equal(found, clipped)

  assert capfd.readouterr().err == (
    f"warning: {tmp_path}/0.wav has samples outside -1..1, and other files"
    " may, too; they are clipped\n"
  )


@pytest.mark.parametrize("rate", [8_000, 12_000])
def test_sound_of_no_samples_is_none(rate):
  data = silence(0, rate=rate)
  assert not len(Audio(12_000).decode(data, "x.wav"))


def test_mu_law_is_monotonic_and_invertible():
  levels = np.arange(256, dtype=np.uint8)
  wave = expand(levels)
  np.testing.assert_array_equal(compress(wave), levels)
  np.testing.assert_allclose(wave[[0, -1]], [-1, 1])
  assert (np.diff(wave) > 0).all()
  assert compress(np.zeros(1)) == 128  # silence


def test_mu_law_is_that_of_its_formula():
  # Rounded to 255 steps of [-1, 1]; what is louder is cut.
  loudness = np.log(1 + 255 * 0.1) / np.log(256)
  level = round((loudness + 1) / 2 * 255)
  found = compress(np.array([0.1, 7.0, -7.0]))
  np.testing.assert_array_equal(found, [level, 255, 0])


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_sound_of_another_rate_is_resampled(rate):
  data = wav((tone(rate) * 32767).astype(np.int16), rate)
  found = expand(Audio(12_000).decode(data, "x.wav"))
  assert abs(len(found) - 6000) <= 1
  # The same tone, except at the ends and for the steps of mu-law.
  middle = slice(500, 5500)
  np.testing.assert_allclose(found[middle], tone(12_000)[middle], atol=0.03)
