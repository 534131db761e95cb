"""Tests of codecs.py: files to symbols and back, and what they refuse."""

import io

import numpy as np
import pytest
import scipy.io.wavfile

from sparse_transformer.data import codecs


def wav(samples, rate=12_000):
  file = io.BytesIO()
  scipy.io.wavfile.write(file, rate, np.asarray(samples))
  return file.getvalue()


def tone(rate, seconds=0.5, hertz=440):
  return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


def test_letters_of_text8():
  symbols = codecs.Letters().decode(b"a z b", "text8")
  np.testing.assert_array_equal(symbols, [1, 0, 26, 0, 2])
  assert codecs.Letters().encode(symbols) == b"a z b"


@pytest.mark.parametrize("text", [b"ab!", b"a{", b"aB", b"a`", b"\x1f"])
def test_other_letters_are_named(text):
  with pytest.raises(ValueError, match="a to z and the space") as error:
    codecs.Letters().decode(text, "text8")
  assert repr(chr(text[-1])) in str(error.value)


def test_bases_of_all_records():
  text = b">one first\nACGT\nacgu\r\n\n>two\n;comment\nTT\n"
  found = codecs.Fasta().decode(text, "x.fasta")
  np.testing.assert_array_equal(found, [0, 1, 2, 3, 0, 1, 2, 3, 3, 3])


def test_ambiguous_bases_are_drawn_and_told(capsys):
  text = b">x\n" + b"N" * 4000 + b"R" * 100 + b"A"
  found = codecs.Fasta().decode(text, "x.fasta")
  counts = np.bincount(found[:4000], minlength=4)
  assert counts.min() > 900 and counts.sum() == 4000
  assert set(found[4000:4100]) == {0, 2} and found[4100] == 0
  np.testing.assert_array_equal(found, codecs.Fasta().decode(text, "x.fasta"))
  assert "4,000 N, 100 R" in capsys.readouterr().err


@pytest.mark.parametrize(
  "text, words",
  [
    (b"ACGT\n", ["no line starts with >"]),
    (b"", ["no line starts with >"]),
    (b">x\nACX!\n", ["2 symbols", "'X'", "number 2"]),
    (b">x\nAC-GT\n", ["'-'"]),
    (b">x\nAC\xffGT\n", ["number 2"]),
  ],
)
def test_other_letters_of_a_fasta_file_are_named(text, words):
  with pytest.raises(ValueError) as error:
    codecs.Fasta().decode(text, "x.fasta")
  for word in ["x.fasta", *words]:
    assert word in str(error.value)


def test_fasta_is_written_as_it_is_read(tmp_path):
  sequences = np.random.RandomState(0).randint(0, 4, (3, 150)).astype(np.uint8)
  (path,) = codecs.Fasta().save(tmp_path / "samples", sequences)
  assert max(map(len, path.read_text().splitlines())) <= 70
  found = codecs.Fasta().decode(path.read_bytes(), path)
  np.testing.assert_array_equal(found, sequences.ravel())


def test_mu_law_is_monotone_and_undone():
  levels = np.arange(256, dtype=np.uint8)
  np.testing.assert_array_equal(codecs.compress(codecs.expand(levels)), levels)
  wave = codecs.expand(levels)
  assert (np.diff(wave) > 0).all()
  np.testing.assert_allclose(wave[[0, -1]], [-1, 1])
  # ln(1 + 255 x) / ln 256, rounded to 255 steps of [-1, 1].
  x = 0.1
  expected = round((np.log(1 + 255 * x) / np.log(256) + 1) / 2 * 255)
  assert codecs.compress(np.array([x, 7.0, -7.0])).tolist() == [
    expected,
    255,
    0,
  ]


@pytest.mark.parametrize(
  "dtype, scale",
  [(np.int16, 2**15), (np.int32, 2**31), (np.float32, 1), (np.float64, 1)],
)
def test_sound_of_every_width_is_the_same(dtype, scale):
  wave = tone(12_000)
  data = wav((wave * (scale - (scale > 1))).astype(dtype))
  found = codecs.Audio(12_000).decode(data, "x.wav").astype(int)
  assert np.abs(found - codecs.compress(wave)).max() <= 1


def test_sound_of_8_bits_is_around_its_middle():
  wave = tone(12_000)
  data = wav(np.round((wave + 1) * 127.5).astype(np.uint8))
  found = codecs.Audio(12_000).decode(data, "x.wav")
  np.testing.assert_allclose(codecs.expand(found), wave, atol=0.02)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_sound_of_another_rate_is_resampled(rate):
  data = wav((tone(rate) * 32767).astype(np.int16), rate)
  found = codecs.expand(codecs.Audio(12_000).decode(data, "x.wav"))
  assert abs(len(found) - 6000) <= 1
  # The same tone, but for the ends and the steps of mu-law.
  middle = slice(500, 5500)
  np.testing.assert_allclose(found[middle], tone(12_000)[middle], atol=0.03)


@pytest.mark.parametrize(
  "data, words",
  [
    (wav(np.zeros((50, 2), np.int16)), ["2 channels"]),
    (wav(np.array([0, 0.5, np.nan], np.float32)), ["sample 2", "nan"]),
    (wav(np.array([0, np.inf], np.float32)), ["sample 1", "inf"]),
    (wav(np.zeros(50, np.int16))[:60], ["damaged or truncated"]),
    (wav(np.zeros(50, np.int16))[:20], ["damaged or truncated"]),
    (b"", ["damaged or truncated"]),
    (b"RIFX not a wav at all", ["damaged or truncated"]),
  ],
)
@pytest.mark.filterwarnings("ignore::scipy.io.wavfile.WavFileWarning")
def test_sound_that_cannot_be_used_is_named(data, words):
  with pytest.raises(ValueError) as error:
    codecs.Audio(12_000).decode(data, "x.wav")
  for word in ["x.wav", *words]:
    assert word in str(error.value)


def test_sound_is_written_as_it_is_read(tmp_path):
  sequences = np.random.RandomState(0).randint(0, 256, (2, 99)).astype(np.uint8)
  codec = codecs.Audio(12_000)
  paths = codec.save(tmp_path / "samples", sequences)
  assert [path.name for path in paths] == ["samples_0.wav", "samples_1.wav"]
  for path, symbols in zip(paths, sequences, strict=True):
    found = codec.decode(path.read_bytes(), path)
    np.testing.assert_array_equal(found, symbols)
