"""Baselines for the README: compressors, Markov models, errors over blocks."""

import bz2
import json
import math

import numpy as np
import pytest
import runs

from benchmarks import blocks, compressors, independent, markov


def dna(length, seed=0):
  """Random bases, in which A is followed by C more often than not."""
  rng = np.random.default_rng(seed)
  bases, after_a = rng.integers(4, size=length), rng.random(length) < 0.7
  for i in range(1, length):
    if bases[i - 1] == 0 and after_a[i]:
      bases[i] = 1
  return bases.astype(np.uint8)


def test_error_over_blocks_is_that_of_their_means():
  values = np.random.default_rng(0).normal(size=500)
  means = values.reshape(5, 100).mean(1)
  mean, error = blocks.mean_and_error(values, 100)
  assert mean == pytest.approx(values.mean())
  assert error == pytest.approx(means.std(ddof=1) / math.sqrt(5))
  assert blocks.mean_and_error(values, 500)[1] is None


def test_predictions_of_all_symbols_sum_to_one():
  train, context, order = dna(500), [0, 2, 1], 3
  strings = {symbol: np.array([*context, symbol]) for symbol in range(4)}
  total = 0
  for string in strings.values():
    lower = {split: np.full(4, 0.25) for split in markov.SCORED}
    for k in range(order + 1):
      counts = markov.Counts([train], k, size=4)
      found = {"validation": counts(dna(60, seed=1)), "test": counts(string)}
      lower["validation"] = np.full(60, 0.25)
      _, lower = markov.best(found, lower)
    total += lower["test"][-1]
  assert total == pytest.approx(1)


def test_independent_positions_score_the_entropy_of_their_values():
  rng = np.random.default_rng(0)
  p_LV = np.array([[0.5, 0.25, 0.25], [0.9, 0.1, 0.0]])
  draw = lambda n: np.stack([rng.choice(3, n, p=p) for p in p_LV], axis=1)
  entropy = -sum(p * np.log2(p) for p in p_LV.ravel() if p) / 2
  bits = independent.bits_per_dim(draw(20_000), draw(20_000), size=3)
  assert bits == pytest.approx(entropy, abs=0.02)


def score(baseline, config, data, out):
  """The exit status of a command."""
  return runs.command(
    f"benchmarks/{baseline}.py",
    f"--config={runs.REPO}/configs/{config}.py",
    f"--config.data.path={data}",
    f"--out={out}",
  )


def test_markov_models_find_the_chain_that_made_the_bases(tmp_path, capsys):
  data, out = tmp_path / "a.fasta", tmp_path / "out" / "markov.json"
  bases = dna(40_000)
  data.write_text(">a\n" + "".join("ACGT"[base] for base in bases) + "\n")
  assert score("markov", "genome", data, out) == 0
  record = json.loads(out.read_text())
  assert str(tmp_path) not in out.read_text()
  rows = {
    (row["strands"], row["order"], row["smoothing"]): row
    for row in record["rows"]
  }
  assert len(rows) == 2 * 2 * len(markov.ORDERS)
  # The chain's own probabilities: those of the bases after the one before.
  chain = np.full((4, 4), 0.25)
  chain[0] = 0.3 / 4
  chain[0, 1] += 0.7
  test = bases[-2000:]
  entropy = -np.log2(chain[test[:-1], test[1:]]).mean()
  for smoothing in "add", "interpolated":
    row = rows[1, 2, smoothing]
    assert row["test"] == pytest.approx(entropy, abs=0.01)
  # Of order 12, most contexts are new: what is lower must help.
  assert rows[1, 12, "interpolated"]["test"] < entropy + 0.05
  assert rows[1, 12, "add"]["test"] > rows[1, 12, "interpolated"]["test"]


def test_compressors_are_scored_alone_and_given_the_rest(tmp_path):
  data, out = tmp_path / "text.txt", tmp_path / "compressors.json"
  text = np.random.default_rng(0).integers(32, size=5_000).astype(np.uint8)
  data.write_bytes(text.tobytes() * 4)  # the test split repeats the rest
  assert score("compressors", "text_small", data, out) == 0
  record = json.loads(out.read_text())
  assert record["symbols"] == 20_000 and record["test_symbols"] == 1_000
  rows = {row["compressor"]: row for row in record["rows"]}
  tail = (text.tobytes() * 4)[-1_000:]
  alone = 8 * len(bz2.compress(tail, 9)) / 1_000
  assert rows["bzip2 -9"]["test_alone"] == pytest.approx(alone)
  for name in compressors.COMPRESSORS:
    row = rows[name]
    assert row["test_given_rest"] < row["test_alone"], name
  assert rows["xz -9e"]["test_given_rest"] < 0.5
