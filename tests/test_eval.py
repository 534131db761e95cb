"""Tests of eval.py, the command, on runs of a tiny network."""

import json
import math
import os
import pathlib
import signal

import jax
import numpy as np
import pytest
import runs

from sparse_transformer.data import tfds as prepared
from sparse_transformer.training import checkpoint, evaluate, loop as train
from sparse_transformer.training.experiment import Experiment

SHARED = pathlib.Path(__file__).parents[2] / "shared" / "data"
needs_cifar10 = pytest.mark.skipif(
  not (SHARED / "tensorflow_datasets" / "cifar10").is_dir(),
  reason="needs a prepared CIFAR-10",
)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run on a text, with checkpoints of steps 2 and 4."""
  folder = tmp_path_factory.mktemp("runs")
  (folder / "text").write_bytes(b"to be or not to be, that is " * 30)
  config = runs.text(folder / "text", **{"checkpoint.keep": 5})
  train.train(config, folder / "run")
  return folder / "run"


def lines(capfd, workdir, *words):
  """The JSON objects that eval.py prints."""
  capfd.readouterr()
  assert runs.command("eval.py", f"--workdir={workdir}", *words) == 0
  return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_contexts_and_steps_are_scored_one_by_one(workdir, capfd):
  found = lines(capfd, workdir, "--min_context=0,7,31", "--step=all")
  asked = [(line["step"], line["min_context"]) for line in found]
  assert asked == [(step, m) for step in (2, 4) for m in (0, 7, 31)]
  assert len({line["tokens"] for line in found}) == 1
  assert len({line["bits_per_dim"] for line in found}) == 6
  for line in found:
    alone = lines(
      capfd,
      workdir,
      f"--min_context={line['min_context']}",
      f"--step={line['step']}",
    )
    assert alone == [line]
  assert lines(capfd, workdir, "--step=2,4", "--min_context=7") == [
    line for line in found if line["min_context"] == 7
  ]


def test_context_is_what_a_direct_computation_gives(workdir, capfd):
  """Each position from a window of its own, written out."""
  (found,) = lines(capfd, workdir, "--min_context=20")
  experiment = Experiment(checkpoint.read_config(workdir))
  with checkpoint.Checkpoints(workdir) as checkpoints:
    params = experiment.restore(checkpoints).ema
  text = experiment.source.load()["test"]
  bits, length, start = [], 32, 0
  apply = jax.jit(experiment.apply)
  for i, symbol in enumerate(text):
    while i >= start + length:
      start += length - 20
    window = np.zeros((1, length), np.uint8)
    window[0, : i - start] = text[start:i]
    logits = np.asarray(apply(params, window)[0, i - start], np.float64)
    p = np.exp(logits - logits.max())
    bits.append(-math.log2(p[symbol] / p.sum()))
  assert found["tokens"] == len(text)
  assert found["bits_per_dim"] == pytest.approx(np.mean(bits), abs=1e-6)


def test_weights_are_averaged_or_raw(workdir, capfd):
  (averaged,) = lines(capfd, workdir)
  (raw,) = lines(capfd, workdir, "--weights=params")
  assert (averaged["weights"], raw["weights"]) == ("ema", "params")
  assert averaged["bits_per_dim"] != raw["bits_per_dim"]


def test_positions_are_written_and_drawn(workdir, capfd):
  (result,) = lines(capfd, workdir, "--split=validation", "--min_context=9")
  stem = workdir / "evaluations" / "validation-step4-context9-ema"
  saved = json.loads(stem.with_suffix(".json").read_text())
  bits = saved.pop("by_position")
  assert saved == result and len(bits) == 32
  # Windows at 0, 23, ...: how often each place counts.
  size = result["tokens"]
  counts = [
    sum(1 for i in range(0, size, 23) if i + p < size and (i == 0 or p >= 9))
    for p in range(32)
  ]
  total = np.dot(bits, counts) / size
  assert total == pytest.approx(result["bits_per_dim"], abs=1e-5)
  assert stem.with_suffix(".png").stat().st_size > 1000


def test_images_are_scored_by_channel(tmp_path, capfd):
  config = runs.tiny(**{"train.steps": 0})
  train.train(config, tmp_path)
  (result,) = lines(capfd, tmp_path)
  assert "by_channel" not in result  # digits are grey
  tally = evaluate.Tally(12)
  tally.add(np.tile([1.0, 2.0, 3.0], (1, 4)), np.ones((1, 12), bool))
  np.testing.assert_allclose(
    tally.by_channel(3), np.array([1, 2, 3]) / math.log(2)
  )


def test_stopped_evaluation_says_what_it_had(workdir, capfd, monkeypatch):
  add = evaluate.Tally.add

  def interrupted(tally, *arrays):
    add(tally, *arrays)
    os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(evaluate.Tally, "add", interrupted)
  word = "--config.eval.batch_size=1"
  assert runs.command("eval.py", f"--workdir={workdir}", word) == 130
  output = capfd.readouterr()
  result = json.loads(output.out.splitlines()[-1])
  assert result["complete"] is False
  assert (result["examples"], result["tokens"]) == (1, 32)
  assert output.err == "eval.py: stopped: SIGTERM\n"


@pytest.mark.parametrize(
  "words, message",
  [
    ("--min_context=0,32", "min_context=32 must be at least 0 and less"),
    ("--min_context=-1", "min_context=-1"),
    ("--min_context=x", "--min_context=x must be numbers"),
    ("--step=2,x", "--step=2,x must be numbers"),
    ("--step=3", "no checkpoint of step 3"),
    ("--weights=mean", "weights"),
  ],
)
def test_mistakes_are_one_line(words, message, workdir, capfd):
  before = runs.files(workdir)
  assert runs.command("eval.py", f"--workdir={workdir}", words) == 1
  error = capfd.readouterr().err
  assert message in error and error.count("\n") == 1
  assert runs.files(workdir) == before


def test_memory_does_not_grow_with_the_split():
  """A split of millions of windows is not held: windows come and go."""
  alive = [0]

  class Window(np.ndarray):
    def __del__(self):
      alive[0] -= 1

  def window(i):
    alive[0] += 1
    return np.zeros(16, np.uint8).view(Window), np.ones(16, bool)

  windows = prepared.Lazy(500, window)
  evaluate.bits_per_dim(
    lambda params, tokens: np.ones(tokens.shape),
    None,
    windows,
    batch_size=5,
    sharding=None,
  )
  assert alive[0] <= 12


@needs_cifar10
def test_batch_size_changes_nothing_on_real_images(tmp_path, capfd):
  config = runs.tiny(
    **{
      "data.name": "cifar10",
      "data.path": str(SHARED / "tensorflow_datasets"),
      "model.num_layers": 1,
      "model.num_heads": 1,
      "attention.stride": 96,
      "attention.window": 96,
      "train.steps": 3,
      "optimizer.learning_rate": 0.03,
    }
  )
  state = train.train(config, tmp_path)
  experiment = Experiment(config)
  images = experiment.source.windows("test")
  untrained = jax.jit(experiment.init)().params
  for params, exact in ((untrained, True), (state.ema, False)):
    found = []
    for batch_size in (1, 7, 64):
      num = 20 if not exact else batch_size + 2
      result = evaluate.bits_per_dim(
        experiment.losses,
        params,
        prepared.Lazy(num, images.__getitem__),
        batch_size=batch_size,
        sharding=experiment.batch_sharding,
      )
      assert result["tokens"] == num * 3072
      found.append(result["bits_per_dim"])
    if exact:
      np.testing.assert_allclose(found, 8, atol=1e-6)
    else:
      np.testing.assert_allclose(found, found[0], atol=1e-5)
      assert abs(found[0] - 8) > 0.05
