"""Tests of networks that classify, and of commands on their runs."""

import functools
import json
import math
import re
import shutil
import types

import jax
import numpy as np
import pytest
from helpers import networks, runs
from helpers.errors import refused

from configs import lra_image
from sparse_transformer import model, patterns
from sparse_transformer.training import metrics
from sparse_transformer.training.evaluation import evaluations
from sparse_transformer.training.experiment import Experiment, open_run
from sparse_transformer.training.loop import train
from sparse_transformer.training.reports import head_statistics
from sparse_transformer.training.step import position_losses

SOURCE = types.SimpleNamespace(
  vocab_size=5,
  length=12,
  shape=(3, 4),
  separator=None,
  classes=("a", "b", "c"),
)
SOURCE.arrangement = ()
SMALL = {
  "model.num_layers": 2,
  "model.num_heads": 2,
  "model.width": 16,
  "attention.stride": 4,
  "attention.window": 4,
  "attention.width": 1,
}


def configured(pattern="dense", **changes):
  """(config, network) of LRA's Image, made small."""
  config = lra_image.get_config()
  changes = {"attention.pattern": pattern} | SMALL | changes
  config.update_from_flattened_dict(changes)
  return config, model.configure(config, SOURCE)


def rows(sizes=(12, 7, 1), padding=0):
  """Labelled rows of random symbols."""
  tokens = np.random.RandomState(0).randint(5, size=(len(sizes), 12))
  for row, size in zip(tokens, sizes, strict=True):
    row[size:] = padding
  labels = np.arange(len(sizes)) % 3
  return np.concatenate([tokens, labels[:, None], np.c_[list(sizes)]], axis=1)


def test_untrained_network_scores_log2_of_the_classes():
  _, network = configured()
  params = jax.jit(lambda: model.init_params(network, 0))()
  logits_BC = networks.apply(network)(params, rows())
  assert logits_BC.shape == (3, 3)
  assert not logits_BC.any()
  bits = np.asarray(position_losses(logits_BC, rows())) / math.log(2)
  np.testing.assert_allclose(bits, np.full((3, 1), math.log2(3)), rtol=1e-7)


def test_named_patterns_are_bidirectional_and_expressions_as_given():
  for name in ("dense", "strided", "fixed_lra", "gemma3"):
    _, network = configured(name)
    for pattern in {*sum(network.patterns, ())}:
      assert not patterns.analysis.is_causal(pattern, network.length), name
  _, network = configured("Causal()")
  assert network.patterns[0][0] == patterns.Causal()


# Runs: which of two letters occurs more often.


def write_texts(folder):
  """Writes files with more letters of one kind; returns the config of a run."""
  random = np.random.RandomState(0)
  for name, share in (
    ("a", 0.8),
    ("b", 0.2),
  ):
    (folder / name).mkdir(parents=True)
    for i in range(100):
      number = random.randint(6, 17)
      size = 1 + int(share * number)
      letters = np.array([*b"a" * size, *b"b" * (number - size)], np.uint8)
      text = random.permutation(letters).tobytes()
      (folder / name / f"{i:03}.txt").write_bytes(text)

  changes = {
    "data.name": "labelled",
    "data.path": str(folder),
    "data.length": 16,
    "data.columns": 4,
    "data.fractions": (0.6, 0.2, 0.2),
    "attention.pattern": "dense",
    "model.task": "classify",
    "optimizer.learning_rate": 0.01,
    "optimizer.ema_decay": 0.5,
    "train.steps": 40,
    "train.batch_size": 16,
    "train.log_every": 10,
    "eval.sequences": 0,
    "checkpoint.every": 30,
  }
  return runs.tiny(**changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """(workdir of a trained classifier, its config)."""
  folder = tmp_path_factory.mktemp("classify")
  config = write_texts(folder / "texts")
  train(config, folder / "run")
  return folder / "run", config


def test_separable_classes_are_learned(run, capsys):
  first, *lines = metrics.read(workdir := run[0])
  assert first["bits_per_dim"] < 1.5
  assert 0 <= first["accuracy"] <= 1
  *_, last = (line for line in lines if line["split"] == "validation")
  assert last["accuracy"] > 0.9
  assert runs.command("eval.py", f"--workdir={workdir}") == 0
  out, err = capsys.readouterr()
  result = json.loads(out)

  assert result["classes"] == ["a", "b"]
  assert "bits/label, accuracy " in err
  assert err.endswith(", 40 examples\n")
  assert result["accuracy"] > 0.9
  assert result["bits_per_dim"] < 0.5
  assert result["unit"] == "bits/label"
  assert result["tokens"] == 40
  p = result["accuracy"]
  assert result["accuracy_error"] == pytest.approx(math.sqrt(p * (1 - p) / 39))
  page = runs.report(workdir)
  assert f"accuracy {p:.4f}" in page
  assert "bits/label" in page


def test_accuracy_is_the_share_of_labels_predicted(run):
  workdir, config = run
  source = Experiment(config).source
  opened = open_run(workdir)
  state, request = opened.restore(), evaluations.ScoreRequest("validation")
  score, params = evaluations.evaluate(opened, state, request), state.ema
  examples = np.stack(list(source.examples("validation")))
  logits_BC = np.asarray(Experiment(config).apply(params, examples))
  assert score.accuracy == (logits_BC.argmax(1) == examples[:, -2]).mean()


def test_resumed_run_is_the_same(run, tmp_path):
  workdir, config = run
  resumed = shutil.copytree(workdir, tmp_path / "run")
  shutil.rmtree(resumed / "checkpoints" / "40")
  train(config, resumed)

  assert runs.without_speed(resumed) == runs.without_speed(workdir)
  states = (open_run(folder).restore() for folder in (workdir, resumed))
  jax.tree.map(np.testing.assert_array_equal, *states)


def test_explain_names_what_is_read(run, capsys, tmp_path, monkeypatch):
  script = "sparse_transformer/explain.py"
  out = f"--out={tmp_path}"
  explain = functools.partial(runs.command, script, f"--workdir={run[0]}", out)
  meshes = []
  collect = head_statistics.collect

  def spy(*x):
    return meshes.append(jax.sharding.get_mesh()) or collect(*x)

  monkeypatch.setattr(head_statistics, "collect", spy)

  assert explain() == 0
  found = capsys.readouterr()
  assert re.search("sees +everything after 1 layer ", found.out)
  assert not found.err
  assert explain("--example=0") == 0

  report = json.loads((tmp_path / "attention.json").read_text())
  example = Experiment(run[1]).source.examples("test")[0]

  assert report["positions"] == example[-1] < 16
  assert not meshes[0].empty  # kernels need it


# Pretraining: the bytes of the same files.


@pytest.mark.soak
def test_classifier_starts_from_a_generator_of_its_data(tmp_path):
  config = write_texts(tmp_path / "texts")
  changes = {
    "data.name": "bytes",
    "model.task": "generate",
    "train.steps": 20,
  }
  config.update_from_flattened_dict(changes)
  train(config, tmp_path / "generator")
  lines = metrics.read(tmp_path / "generator")
  *_, last = (line for line in lines if line["split"] == "validation")

  assert last["bits_per_dim"] < 5
  assert "accuracy" not in last

  changes = {
    "data.name": "labelled",
    "model.task": "classify",
    "train.init_from": str(tmp_path / "generator"),
  }
  config.update_from_flattened_dict(changes)

  with refused(r"logits.kernel is \[16, 256\] there"):
    train(config, tmp_path / "classifier")

  config.train.init_partial = True
  train(config, tmp_path / "classifier")
  start, first, *_ = metrics.read(tmp_path / "classifier")

  assert start["split"] == "start"
  assert 0 <= first["accuracy"] <= 1
