"""Baselines: counts, compressors, codecs, linear prediction, Markov models."""

import importlib.util
import json
import lzma
import math

import numpy as np
import pytest
import runs

from benchmarks import baselines, linear, markov
from sparse_transformer import data as data_lib


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
  mean, error = markov.mean_and_error(values, 100)
  assert mean == pytest.approx(values.mean())
  assert error == pytest.approx(means.std(ddof=1) / math.sqrt(5))
  assert markov.mean_and_error(values, 500)[1] is None


def test_predictions_of_all_symbols_sum_to_one():
  train, context, order = dna(500), [0, 2, 1], 3
  strings = {symbol: np.array([*context, symbol]) for symbol in range(4)}
  total = 0
  for string in strings.values():
    scored = {"validation": dna(60, seed=1), "test": string}
    lower = {split: np.full(len(x), 0.25) for split, x in scored.items()}
    for k in range(order + 1):
      found = markov.count([train], scored, k, size=4)
      _, lower = markov.best(found, lower)
    total += lower["test"][-1]
  assert total == pytest.approx(1)


def test_a_mixture_weighs_models_by_the_context_that_is_known():
  # The first model is right where the highest order is 0, the other where 1.
  highest = {split: np.arange(100) % 2 for split in markov.SCORED}
  p = np.where(highest["test"], [[0.1], [0.9]], [[0.9], [0.1]])
  mixed = markov.mixture({split: p for split in markov.SCORED}, highest)
  assert mixed["test"] == pytest.approx(0.9)


def test_independent_positions_score_the_entropy_of_their_values():
  rng = np.random.default_rng(0)
  p_LV = np.array([[0.5, 0.25, 0.25], [0.9, 0.1, 0.0]])
  draw = lambda: np.stack([rng.choice(3, 20_000, p=p) for p in p_LV], axis=1)
  entropy = -sum(p * np.log2(p) for p in p_LV.ravel() if p) / 2
  splits = {split: draw() for split in ("train", "validation", "test")}
  row = baselines.independent(splits, size=3)
  assert row["test"] == pytest.approx(entropy, abs=0.02)
  assert row["validation"] == pytest.approx(entropy, abs=0.02)


def score(config, data, folder):
  """The record that the command writes."""
  out = folder / "out" / "baselines.json"
  status = runs.command(
    "benchmarks/baselines.py",
    f"--config={runs.REPO}/configs/{config}.py",
    f"--config.data.path={data}",
    f"--out={out}",
  )
  assert status == 0
  assert str(folder) not in out.read_text()
  record = json.loads(out.read_text())
  return record, {row["model"]: row for row in record["rows"]}


def test_markov_models_find_the_chain_that_made_the_bases(tmp_path):
  data, bases = tmp_path / "a.fasta", dna(40_000)
  data.write_text(">a\n" + "".join("ACGT"[base] for base in bases) + "\n")
  record, rows = score("genome", data, tmp_path)
  assert record["data"]["path"] == "a.fasta"
  assert record["symbols"]["test"] == 2_000
  assert len(rows) == len(markov.ORDERS_DNA) + 1
  # The chain's own probabilities: those of the bases after the one before. The
  # reverse complement is another chain, so counts of both strands are mixed.
  entropy = chain_bits(bases[-2000:])
  assert entropy < rows["order 2"]["test"] < 2
  # Of order 12, most contexts are new: what is lower must help.
  assert rows["order 12"]["test"] < rows["order 2"]["test"] + 0.05
  mixed = rows["mixture of orders 0 to 24"]
  assert mixed["test"] < min(row["test"] for row in rows.values()) + 0.01


def chain_bits(bases):
  chain = np.full((4, 4), 0.25)
  chain[0] = 0.3 / 4
  chain[0, 1] += 0.7
  return -np.log2(chain[bases[:-1], bases[1:]]).mean()


def test_compressors_are_given_the_training_split(tmp_path, capsys):
  data = tmp_path / "text.txt"
  text = np.random.default_rng(0).integers(32, size=5_000).astype(np.uint8)
  data.write_bytes(text.tobytes() * 4)  # the test split repeats the rest
  lacks = importlib.util.find_spec("pyppmd") is None
  record, rows = score("text_small", data, tmp_path)
  assert record["symbols"] == dict(train=18_000, validation=1_000, test=1_000)
  assert ("pip install pyppmd" in capsys.readouterr().out) == lacks
  for name in baselines.COMPRESSORS:
    if lacks and "PPMd" in name:
      assert f"`{name}`" not in rows
    else:
      assert rows[f"`{name}`"]["test"] < 2.5, name
  # Whose symbols are uniform: 5 bits without what is before.
  assert rows["order 0"]["test"] == pytest.approx(5, abs=0.05)
  assert rows["order 6"]["test"] < 1
  whole = (text.tobytes() * 4)[:18_000]
  assert rows["`xz -9e`"]["test"] < 8 * len(lzma.compress(whole)) / 18_000


def colors(number, seed=0):
  """Smooth images of 6 x 5 pixels with three channels of 16 levels."""
  rng = np.random.default_rng(seed)
  images = rng.normal(size=(number, 6, 5, 3)).cumsum(1).cumsum(2)
  return (images + 8).clip(0, 15).astype(np.uint8).reshape(number, -1)


@pytest.mark.parametrize("near", linear.NEIGHBORS, ids=len)
def test_linear_prediction_is_a_distribution_given_what_is_before(near):
  bits_of = linear.fit(colors(200), near, (6, 5, 3), 16)
  image, position = colors(1, seed=1)[0], 49  # G, and not at an edge
  others = np.repeat(image[None], 16, axis=0)
  others[:, position] = range(16)
  bits = bits_of(others)
  assert np.exp2(-bits[:, position]).sum() == pytest.approx(1)
  assert (bits[:, :position] == bits[0, :position]).all()
  assert (bits[1:, position + 3] != bits[0, position + 3]).any()


def test_linear_prediction_of_images_beats_independent_positions():
  splits = {x: colors(300, i) for i, x in enumerate(data_lib.SPLITS)}
  independent = baselines.independent(splits, 16)["test"]
  for row in linear.score(splits, (6, 5, 3), 16):
    assert 0 < row["test"] < independent - 0.3
    assert row["test"] == pytest.approx(row["validation"], abs=0.1)
    assert row["standard_error"] < 0.05


def test_codecs_code_a_mosaic_without_loss():
  imagecodecs = pytest.importorskip("imagecodecs")
  images = colors(7).reshape(-1, 6, 5, 3)
  mosaic = baselines.mosaic(images)
  assert mosaic.shape == (18, 15, 3)
  assert (mosaic[6:12, 5:10] == images[4]).all()
  assert not mosaic[12:, 5:].any()
  splits = {x: images for x in data_lib.SPLITS}
  rows = baselines.codecs(splits, images.shape[1:])
  for row, (codec, options) in zip(
    rows, baselines.CODECS.values(), strict=True
  ):
    content = getattr(imagecodecs, f"{codec}_encode")(mosaic, **options)
    assert row["test"] == 8 * len(content) / images.size
    decoded = getattr(imagecodecs, f"{codec}_decode")(content)
    assert (decoded == mosaic).all(), codec
