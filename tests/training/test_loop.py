"""Tests of train.py and eval.py: whole runs of a tiny network."""

import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from sparse_transformer.training import checkpoint, loop as train, metrics
from sparse_transformer.training.experiment import Experiment

SHARED = runs.REPO.parent / "shared" / "data" / "tensorflow_datasets"


def equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


def make_step(config):
  """(experiment, initial state, jitted step, a batch)."""
  experiment = Experiment(config)
  step = jax.jit(experiment.step)
  n = config.train.batch_size
  batch = jnp.stack([experiment.source.examples("train")[i] for i in range(n)])
  return experiment, jax.jit(experiment.init)(), step, batch


def test_workdir_holds_what_a_run_promises(tmp_path):
  train.train(runs.tiny(), tmp_path)
  found = {path.name for path in tmp_path.iterdir()}
  assert {"config.json", "checkpoints", "metrics.jsonl", "patterns.png"} < found
  assert any(name.startswith("events.out.tfevents") for name in found)
  steps = {path.name for path in (tmp_path / "checkpoints").iterdir()}
  assert steps == {"2", "4"}
  lines = metrics.read(tmp_path)
  training_lines = [line for line in lines if line["split"] == "train"]
  assert [line["step"] for line in training_lines] == [1, 2, 3, 4]
  names = {"step", "split", "nats", "bits_per_dim"}
  names |= {"learning_rate", "gradient_norm"}
  for line in training_lines:
    assert names <= set(line) <= names | {"tokens_per_second"}
    assert line["bits_per_dim"] == pytest.approx(line["nats"] / math.log(2))
    assert line.get("tokens_per_second", 1) > 0
  assert "tokens_per_second" in training_lines[-1]
  (validation,) = [line for line in lines if line["split"] == "validation"]
  assert set(validation) == {"step", "split", "bits_per_dim"}
  assert validation["step"] == 4


def without_speed(workdir):
  lines = metrics.read(workdir)
  return [
    {k: v for k, v in line.items() if k != "tokens_per_second"}
    for line in lines
  ]


def test_run_that_was_cut_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
  config = runs.tiny(
    **{
      "model.dropout": 0.3,
      "train.accumulation": 2,
      "train.steps": 5,
      "checkpoint.every": 2,
    }
  )
  whole = train.train(config, tmp_path / "whole")

  def cut(log, step, *rest):
    write(log, step, *rest)
    if step == 3:  # after the checkpoint of step 2 and the line of step 3
      raise KeyboardInterrupt

  write = train.Log.training
  with monkeypatch.context() as patch:
    patch.setattr(train.Log, "training", cut)
    with pytest.raises(KeyboardInterrupt):
      train.train(config, tmp_path / "cut")
  assert without_speed(tmp_path / "cut")[-1]["step"] == 3
  again = train.train(config, tmp_path / "cut")
  equal(again, whole)
  assert jax.tree.structure(again) == jax.tree.structure(whole)
  assert without_speed(tmp_path / "cut") == without_speed(tmp_path / "whole")
  # Once more changes nothing: the run is over.
  before = runs.files(tmp_path / "cut" / "checkpoints")
  equal(train.train(config, tmp_path / "cut"), whole)
  assert runs.files(tmp_path / "cut" / "checkpoints") == before


def score(workdir, capfd, *words):
  capfd.readouterr()
  assert runs.command("eval.py", f"--workdir={workdir}", *words) == 0
  return json.loads(capfd.readouterr().out.strip().split("\n")[-1])


def test_untrained_network_scores_the_size_of_its_alphabet(tmp_path, capfd):
  train.train(runs.tiny(**{"train.steps": 0}), tmp_path / "digits")
  result = score(tmp_path / "digits", capfd)
  assert result["bits_per_dim"] == pytest.approx(math.log2(17), abs=1e-6)
  assert (result["step"], result["examples"]) == (0, 200)
  path = tmp_path / "text"
  path.write_bytes(np.random.RandomState(0).bytes(500))
  config = runs.text(path, **{"train.steps": 0})
  train.train(config, tmp_path / "run")
  for words in ((), ("--min_context=20",)):
    result = score(tmp_path / "run", capfd, *words)
    assert result["bits_per_dim"] == pytest.approx(8, abs=1e-6)
    assert (result["tokens"], result["unit"]) == (125, "bits/byte")


@pytest.mark.skipif(
  not (SHARED / "cifar10").is_dir(), reason="needs a prepared CIFAR-10"
)
def test_untrained_network_scores_8_bits_on_images(tmp_path):
  from sparse_transformer.training import evaluate

  config = runs.tiny(
    **{
      "data.name": "cifar10",
      "data.path": str(SHARED),
      "model.num_layers": 1,
      "model.num_heads": 1,
      "attention.stride": 96,
      "attention.window": 96,
    }
  )
  experiment = Experiment(config)
  windows = experiment.source.windows("test")
  result = evaluate.bits_per_dim(
    experiment.losses,
    experiment.init().ema,
    [windows[i] for i in (0, 5_000, 9_999)],
    batch_size=2,
    sharding=experiment.batch_sharding,
  )
  assert result["bits_per_dim"] == pytest.approx(8, abs=1e-6)
  assert result["tokens"] == 3 * 3072


# Dense and local attention have one factor: their modes are alike.
VARIANTS = [
  ("dense", "merged"),
  ("local", "heads"),
  *itertools.product(("strided", "fixed"), ("interleaved", "merged", "heads")),
]


@pytest.mark.parametrize("pattern, mode", VARIANTS)
def test_every_pattern_and_mode_learns(pattern, mode):
  config = runs.tiny(
    **{
      "attention.pattern": pattern,
      "attention.mode": mode,
      "attention.width": 2,
      "attention.num_summaries": 2,
      "optimizer.warmup_steps": 0,
    }
  )
  _, state, step, batch = make_step(config)
  losses = []
  for _ in range(3):
    state, measured = step(state, batch)
    losses.append(float(measured["nats"]))
  assert losses[2] < losses[1] < losses[0]


def test_loss_that_is_no_number_stops_the_run_before_it_is_kept(tmp_path):
  config = runs.tiny(
    **{"optimizer.learning_rate": 1e30, "optimizer.warmup_steps": 0}
  )
  with pytest.raises(FloatingPointError, match=r"\w+ is (nan|inf) at step 2"):
    train.train(config, tmp_path)
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.steps() == []


def test_batch_that_devices_do_not_divide_is_an_error(monkeypatch):
  monkeypatch.setattr(jax, "local_device_count", lambda: 3)
  for changes, message in (
    ({}, "train.batch_size=8 must be a multiple of 3 devices"),
    ({"train.batch_size": 9}, "eval.batch_size=8 must be a multiple of 3"),
  ):
    with pytest.raises(ValueError, match=re.escape(message)):
      train.check_settings(runs.tiny(**changes))
