"""Tests of strand.py: where the arms are, and which windows come from them."""

import numpy as np
import pytest
from small_data import SHARED, config

from sparse_transformer import data
from sparse_transformer.data import codecs, strand

ECOLI = SHARED / "genome" / "ecoli-k12-mg1655.fasta.gz"


def chromosome(origin=700, terminus=200, n=1000):
  """Bases with an excess of G from origin to terminus, of C after it."""
  is_leading = (np.arange(n) - origin) % n < (terminus - origin) % n
  random = np.random.RandomState(0)
  bases = random.choice(4, n, p=(0.2, 0.1, 0.5, 0.2))  # A, C, G, T
  bases[~is_leading] = 3 - bases[~is_leading]
  for point, signs in (origin, (1, 2)), (terminus, (2, 1)):  # C and G
    bases[point - 9 : point], bases[point : point + 9] = signs
  return bases.astype(np.uint8)


@pytest.mark.parametrize("origin, terminus", [(700, 200), (100, 620)])
def test_extremes_of_the_skew_are_found(origin, terminus):
  assert strand.locate(chromosome(origin, terminus)) == (origin, terminus)


@pytest.mark.parametrize("origin, terminus", [(700, 200), (100, 620)])
def test_windows_are_of_their_strand_and_of_disjoint_regions(origin, terminus):
  length, n = 20, 1000
  bases = chromosome(origin, terminus)
  around = np.concatenate([bases, bases])
  places = {around[i : i + length].tobytes(): i for i in range(n)}
  assert len(places) == n
  covered, flips, labels = {}, [], []
  for split, examples in strand.splits(bases, length, (0.6, 0.2, 0.2)).items():
    found = []
    for window, label in examples:
      flip = window.tobytes() not in places
      forward = 3 - window[::-1] if flip else window
      start = places[forward.tobytes()]
      i = (start + np.arange(length)) % n
      is_leading = (i - origin) % n < (terminus - origin) % n
      assert (is_leading == (label == flip)).all()
      for point in origin, terminus:  # a window away from both
        away = min((start - point) % n, (point - start - length) % n)
        assert away >= length
      found.append(i)
      flips.append(flip)
      labels.append(label)
    covered[split] = np.bincount(np.concatenate(found), minlength=n)
    assert split == "train" or covered[split].max() == 1
  assert sum(x > 0 for x in covered.values()).max() == 1
  assert np.sum([x > 0 for x in covered.values()]) > n - 10 * length
  assert 0.4 < np.mean(flips) < 0.6 and 0.4 < np.mean(labels) < 0.6


def test_seed_decides_which_windows_are_reversed():
  one, same, other = (
    [bytes(x) for x, _ in strand.splits(chromosome(), 10, seed=s)["train"]]
    for s in (0, 0, 1)
  )
  assert one == same
  assert 0.3 < np.mean(np.array(one) == np.array(other)) < 0.7


@pytest.mark.parametrize(
  "bases, settings, message",
  [
    (chromosome(), dict(length=200), "length=200 is too long: .* arm of 500"),
    (
      chromosome(),
      dict(length=20, fractions=(0.98, 0.01, 0.01)),
      r"data.fractions=\(0.98, 0.01, 0.01\); use smaller",
    ),
    (
      np.random.RandomState(0).randint(4, size=10_000),
      dict(length=9),
      "no origin is found: G minus C varies by .* in 10,000 bases",
    ),
    (np.zeros(99, np.uint8), dict(length=9), "and by 0 in random ones"),
  ],
  ids=str,
)
def test_error_about_a_chromosome_is_one_line(bases, settings, message):
  with pytest.raises(ValueError, match=message) as error:
    strand.splits(bases, **settings)
  assert "\n" not in str(error.value)


def test_source_reads_a_file(tmp_path):
  path = tmp_path / "x.fa"
  letters = "".join(codecs.BASES[x] for x in chromosome())
  path.write_text(f">x\n{letters}\n")
  source = data.source(config("strand", path))
  expected = strand.splits(chromosome(), 16, (0.5, 0.25, 0.25))
  for split, examples in expected.items():
    rows = [[*window, label, 16] for window, label in examples]
    np.testing.assert_array_equal(source.examples(split), rows)
  assert source.digest()["examples"] == len(expected["train"])


def test_file_must_have_one_record(tmp_path):
  path = tmp_path / "x.fasta"
  path.write_text(">a\nACGT\nacg\n")
  np.testing.assert_array_equal(strand.read(path), [0, 1, 2, 3, 0, 1, 2])
  path.write_text(">a\nACGT\n>b\nACGT\n")
  with pytest.raises(ValueError, match="has 2 records, but must have one"):
    strand.read(path)
  path.write_text(">a\nMKVLAAGI\n")
  with pytest.raises(ValueError, match="may contain only"):
    strand.read(path)


@pytest.mark.skipif(not ECOLI.exists(), reason="the genome is absent")
def test_sign_of_the_skew_tells_the_strand_of_long_windows():
  bases = strand.read(ECOLI)
  assert strand.locate(bases) == (3_923_620, 1_550_413)
  examples = strand.splits(bases, 4096)["train"]
  chosen = [examples[i] for i in range(0, len(examples), 4096)]
  right = [(strand.skew(x)[-1] <= 0) == label for x, label in chosen]
  assert len(right) > 1000 and 0.76 < np.mean(right) < 0.82
