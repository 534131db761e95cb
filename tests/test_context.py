"""Paired scores of the same symbols with more and less context."""

import functools
import json
import math

import numpy as np
import pytest
import runs

from benchmarks import context
from sparse_transformer.training import loop
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.experiment import Experiment


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  """Two runs on the same text, and one on another."""
  root = tmp_path_factory.mktemp("texts")
  rng = np.random.default_rng(0)
  for name in "text", "other":
    (root / name).write_bytes(rng.integers(97, 105, size=1_000).astype("u1"))
  changes = {"train.steps": 2, "optimizer.learning_rate": 0.05}
  loop.train(runs.text(root / "text", **changes), root / "strided")
  for name, text in (("initial", "text"), ("apart", "other")):
    runs.untrained(root / name, runs.text(root / text))
  return root


@pytest.mark.parametrize("min_context, places", [(0, (40, 73)), (20, (20, 90))])
def test_bits_are_those_of_the_window_that_scores_the_symbol(
  texts, min_context, places
):
  experiment = Experiment(runs.text(texts / "text"))
  with store.Checkpoints(texts / "strided") as checkpoints:
    params = checkpoints.restore(experiment.like).ema
  found = context.bits_of(
    experiment, params, "test", min_context, range(*places)
  )
  data, length = experiment.source.load()["test"], experiment.source.length
  step = length - min_context

  @functools.cache
  def losses(start):
    tokens = data[start : start + length]
    tokens = np.tile(np.pad(tokens, (0, length - len(tokens))), (8, 1))
    return np.asarray(experiment.losses(params, tokens))[0]

  for place, bits in zip(range(*places), found, strict=True):
    start = (place - min_context) // step * step
    nats = losses(start)[place - start]
    assert bits == pytest.approx(nats / math.log(2), abs=1e-5)


def command(texts, *words):
  names = ",".join(str(texts / name) for name in words[0].split(","))
  return runs.command(
    "benchmarks/context.py", f"--workdirs={names}", *words[1:]
  )


def test_record_has_differences_to_the_first_context(texts, tmp_path, capsys):
  out = tmp_path / "record.json"
  words = "--min_context=0,8,16", "--symbols=100", f"--out={out}"
  assert command(texts, "strided,initial", *words) == 0
  found = json.loads(out.read_text())
  assert str(texts) not in out.read_text()
  names = [f"{texts.name}/{name}" for name in ("strided", "initial")]
  assert [run["run"] for run in found["runs"]] == names
  assert len({row["bits"] for row in found["runs"][0]["contexts"]}) == 3
  for run in found["runs"]:
    first, *others = run["contexts"]
    assert first["difference"] == 0
    for row in others:
      expected = row["bits"] - first["bits"]
      assert row["difference"] == pytest.approx(expected, abs=1e-6)


def test_runs_on_other_data_are_rejected(texts, tmp_path, capsys):
  out = tmp_path / "record.json"
  words = "--min_context=0,16", "--symbols=50", f"--out={out}"
  assert command(texts, "strided,apart", *words) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert "different data" in line and not out.exists()
