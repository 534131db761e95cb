"""Tests of the training loop: complete runs of a tiny network."""

import json
import math
import os
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from helpers import runs
from helpers.errors import refused

from sparse_transformer import machine, signals, version
from sparse_transformer.training import costs, loop, metrics, optimizer
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.stopwatch import Stopwatch

pytestmark = pytest.mark.usefixtures("shared_experiments")


def lines_of(workdir, split):
  """The metrics of a split."""
  return [line for line in metrics.read(workdir) if line["split"] == split]


def test_run_writes_everything_it_promises(tmp_path):
  config = runs.tiny()
  loop.train(config, tmp_path)

  def names(folder):
    return {path.name for path in folder.iterdir()}

  promised = {"config.json", "checkpoints", "metrics.jsonl", "patterns.png"}
  assert promised < names(tmp_path)
  assert names(tmp_path / "events") == {"train", "validation"}
  assert names(tmp_path / "checkpoints") == {"2", "4"}

  *training, validation, end = metrics.read(tmp_path)
  assert [line["step"] for line in training] == [1, 2, 3, 4]
  times = {"seconds", "processor_seconds"}
  fields = times | {
    "step",
    "split",
    "nats",
    "bits_per_dim",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    "model_flops_per_second",
  }
  flops = costs.flops_per_token(Experiment(config).model)["total"]
  for line in training:
    assert set(line) == fields
    assert line["split"] == "train"
    assert line["bits_per_dim"] == pytest.approx(line["nats"] / math.log(2))
  rate = line["tokens_per_second"] * flops
  assert line["model_flops_per_second"] == pytest.approx(rate)
  assert 0 < training[1]["seconds"] <= training[3]["seconds"]

  assert set(validation) == {"step", "split", "bits_per_dim"} | times
  assert validation["step"] == 4
  assert validation["split"] == "validation"
  for name in times:
    assert validation[name] == training[3][name]
  assert end["step"] == 4
  assert end["split"] == "end"
  assert end["peak_bytes"] > 2**20


def test_run_says_what_it_does_and_writes_a_trace(tmp_path, capsys):
  config = runs.tiny(**{"eval.every": 2})
  folder = tmp_path / "a run"
  loop.train(config, folder, profile=range(3, 5))  # without validations
  out, err = capsys.readouterr()
  lines = [line for line in out.splitlines() if line[:5] != "step "]
  data, steps, attention, compiling, remat, compiled, *rest = lines
  traced, opened, best = rest

  assert data.endswith(
    " parameters, 1 layer of width 16, strided; digits: 1,397 examples, 64 in"
    " a sequence, bits/dim"
  )
  about = "4 steps, 8 sequences or 512 tokens in a step; 1 x cpu; commit"
  assert steps == f"{about} {version.commit()}; {folder}"
  assert attention.startswith("attention by")
  assert compiling == "compiling"
  assert remat.startswith("model.remat=none: none needs ")
  assert remat.endswith("iB is free")
  assert compiled.startswith("compiled")
  assert compiled.endswith(" s")
  assert traced == f"profiled steps 3 to 4 into {folder / 'profile'}"
  assert "perfetto_trace.json.gz" in opened
  assert "xprof" in opened
  assert list((folder / "profile").rglob("perfetto_trace.json.gz"))

  validations = lines_of(folder, "validation")
  least = min(validations, key=lambda line: line["bits_per_dim"])

  assert best == (
    f"best validation {least['bits_per_dim']:.4f} bits/dim, at step"
    f" {least['step']}; to evaluate the best saved: python eval.py"
    f" '--workdir={folder}' --step=best"
  )
  assert not err

  loop.train(config, folder, profile=[4])  # as the same command, to resume
  words = "not profiled, because the run resumes from step 4"

  assert words in capsys.readouterr().out


def test_profile_that_cannot_be_written_ends_a_run_before_its_steps(tmp_path):
  (tmp_path / "profile").touch()
  with pytest.raises(OSError, match="profile"):
    loop.train(runs.tiny(), tmp_path, profile=[2])
  assert not list((tmp_path / "checkpoints").iterdir())


def test_profile_and_pictures_that_fail_end_no_run(
  tmp_path, monkeypatch, capsys
):
  def fail(*_, **__):
    raise OSError("disk\nfull")

  monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
  monkeypatch.setattr(jax.profiler, "stop_trace", fail)
  monkeypatch.setattr(loop, "save_patterns", fail)

  assert int(loop.train(runs.tiny(), tmp_path, profile=[2]).step) == 4
  out, err = capsys.readouterr()
  failed = "the picture of the patterns", "the profile"
  lines = [f"{what} failed: OSError: disk full" for what in failed]

  assert err.splitlines() == lines
  assert "profiled" not in out


def test_checkpoint_has_the_validation_of_its_own_step_or_none(tmp_path):
  every = {
    "eval.every": 2,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
  }
  loop.train(runs.tiny(**every), tmp_path)
  bits = {
    line["step"]: line["bits_per_dim"]
    for line in metrics.read(tmp_path)
    if line["split"] == "validation"
  }

  assert set(bits) == {2, 4}
  for step, expected in (
    (3, None),
    (4, bits[4]),
  ):
    path = tmp_path / "checkpoints" / str(step) / "about" / "metadata"
    assert json.loads(path.read_text())["validation"] == expected


def test_checkpoint_gets_the_validation_that_a_signal_interrupted(
  tmp_path, monkeypatch
):
  validate = loop._validate

  def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return validate(*arguments)

  with monkeypatch.context() as patch:
    patch.setattr(loop, "_validate", interrupted)
    patch.setattr(machine, "peak_memory", lambda: 10**15)
    with pytest.raises(signals.Stopped, match="SIGTERM at step 4"):
      loop.train(runs.tiny(), tmp_path)
  saved = store.Saved(tmp_path)
  assert saved.describe(4)["validation"] is None
  changed = shutil.copytree(tmp_path, tmp_path.with_suffix(".changed"))
  more = {
    "attention.pattern": "dense",
    "train.steps": 6,
    "eval.every": 4,
  }
  loop.train(runs.tiny(**more), changed, allow_changes=True)
  assert store.Saved(changed).describe(4)["validation"] is None
  loop.train(runs.tiny(), tmp_path)
  *_, validation, end = metrics.read(tmp_path)
  loop.train(runs.tiny(), tmp_path)  # and again

  assert metrics.read(tmp_path)[-1]["peak_bytes"] == end["peak_bytes"]
  assert saved.describe(4)["validation"] == validation["bits_per_dim"]
  assert saved.find("best") == 4
  assert end["peak_bytes"] == 10**15  # of the process that trained
  (tmp_path / "checkpoints" / "4" / store.VALIDATION).write_text("{")
  assert saved.describe(4)["validation"] is None  # and all else stays known


def test_run_that_does_not_fit_is_refused(tmp_path, monkeypatch):
  needed = r"a training step needs 0.0 GiB .* but only 0.0 GiB is free"
  monkeypatch.setattr(machine, "free_memory", lambda: 2**17)
  monkeypatch.setattr(loop, "Experiment", lambda config: Experiment(config))
  with refused(needed):
    loop.train(runs.tiny(), tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_time_of_steps_that_were_not_logged_outlasts_a_stop(
  tmp_path, monkeypatch
):
  config = runs.tiny(**{"train.log_every": 4})
  count = Stopwatch.count
  counted = []

  def stop_after_two(watch, tokens):
    time.sleep(0.01)  # more than times are rounded
    count(watch, tokens)
    counted.append(tokens)
    if len(counted) == 2:
      os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(Stopwatch, "count", stop_after_two)

  with pytest.raises(signals.Stopped, match="SIGTERM at step 2"):
    loop.train(config, tmp_path)
  (stopped,) = metrics.read(tmp_path)
  assert stopped["step"] == 2
  assert stopped["split"] == "stopped"
  assert stopped["seconds"] > 0
  loop.train(config, tmp_path)
  assert metrics.read(tmp_path)[0] == stopped
  times = [line["seconds"] for line in metrics.read(tmp_path)[:-1]]
  assert times == sorted(times)
  assert times[-1] > times[0]


def test_time_ends_a_run_and_its_learning_rate_follows_the_clock(
  tmp_path, monkeypatch
):
  changes = {
    "train.steps": 1000,
    "optimizer.warmup_steps": 2,
    "optimizer.name": "muon",  # has two counts
  }
  config = runs.tiny(**changes)
  seconds = iter([0, 0, 0, 0, 1, 1, 3, 3, 6, 6, 8, 8, 8])
  monkeypatch.setattr(Stopwatch, "share", lambda watch: next(seconds) / 8)
  for _ in range(2):  # and is not continued when its time is over
    state = loop.train(config, tmp_path, limit=("processor_seconds", 8))
    assert int(state.step) == 5

  def rate(step):
    due = optimizer.schedule(config)._replace(step=step)
    return float(optimizer.rate(config.optimizer.schedule, due))

  found = [line["learning_rate"] for line in lines_of(tmp_path, "train")]
  expected = [rate(step) for step in (0, 1, 125, 375, 750)]
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  splits = [line["split"] for line in metrics.read(tmp_path)]
  assert splits[-3:] == ["validation", "stopped", "end"]
  assert (tmp_path / "checkpoints" / "5").exists()
