"""Tests of runs that start from others, or change."""

import itertools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from helpers import runs
from helpers.cases import listed, soak
from helpers.errors import refused

from sparse_transformer import config as config_lib
from sparse_transformer.training import (
  banner,
  loop,
  metrics,
  optimizer,
  warm_start,
)
from sparse_transformer.training.checkpoints import exported, store
from sparse_transformer.training.experiment import Experiment, open_run

arrays = runs.arrays
pytestmark = pytest.mark.usefixtures("shared_experiments")


def advance(experiment, state, steps):
  """The state after these steps of the program that a run compiles."""
  schedule = optimizer.schedule(experiment.config)
  with jax.set_mesh(experiment.mesh):
    for step in steps:
      state, _ = experiment.update(state, experiment.batch(step), schedule)
  return state


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shared_experiments):
  """The workdir of a run of 4 steps, with checkpoints at steps 2 and 4."""
  workdir = tmp_path_factory.mktemp("trained") / "run"
  loop.train(runs.tiny(**{"eval.every": 2}), workdir)
  return workdir


# Starting from another run.


@pytest.mark.parametrize(
  "ending", ["", "/../run:2", *map(soak, (":2", ":best", "/:2"))]
)
def test_run_starts_from_the_averaged_weights_of_another(trained, ending):
  start = {
    "train.init_from": f"{trained}{ending}",
    "train.seed": 1,
  }
  config = runs.tiny(**start | {"attention.pattern": "local"})
  state, about = warm_start.first_state(Experiment(config))
  saved, step = store.Saved(trained), 2 if ending else 4
  step = saved.find("best") if ending == ":best" else step
  other = saved.restore(Experiment(runs.tiny()).like, step)
  assert arrays(state.params) == arrays(state.ema) == arrays(other.ema)
  first = Experiment(config).first_state()
  assert arrays(state.opt_state) == arrays(first.opt_state)
  assert int(state.step) == 0
  assert about["run_step"] == step
  assert about["random"] == []


@pytest.mark.parametrize("steps", [0, 4])
def test_start_is_recorded_and_needed_once(steps, trained, tmp_path):
  other = shutil.copytree(trained, tmp_path / "other")
  run = tmp_path / "run"
  start = {
    "train.init_from": str(other),
    "checkpoint.every": 0,
  }
  config = runs.tiny(**start | {"train.steps": steps})
  loop.train(config, run)
  first, *_ = metrics.read(run)

  assert first["split"] == "start"
  assert first["run"] == str(other)
  assert first["run_step"] == 4

  shutil.rmtree(other)
  loop.train(config, run)  # resumes: no need for the other

  assert metrics.read(run)[0] == first


def test_parameters_that_do_not_fit_are_named_and_stay_random(
  trained, tmp_path
):
  path = tmp_path / "text"
  path.write_bytes(bytes(range(256)) * 2)
  start = {
    "train.init_from": str(trained),
    "data.length": 64,
  }

  with refused(r"logits.kernel is \[16, 17\] there"):
    warm_start.first_state(Experiment(runs.text(path, **start)))

  config = runs.text(path, **start | {"train.init_partial": True})
  state, about = warm_start.first_state(Experiment(config))

  assert about["random"] == ["logits.kernel", "token.embedding"]
  assert about["unused"] == []

  random = Experiment(config).first_state().params
  other = open_run(trained).restore().ema
  for name in ("logits", "token"):
    assert arrays(state.params[name]) == arrays(random[name])
  assert arrays(state.params["blocks"]) == arrays(other["blocks"])


SPANS = {
  "model.positions": "learned",
  "model.max_span": 64,
}
MEANINGS = {  # of both runs, of the new one, and what is said
  "heads": ({}, {"model.num_heads": 4}, "num_heads=4 here, but 2 there"),
  "rotary": ({}, {"model.rotary_base": 100.0}, "base=100.0 here, but 1"),
  "spans": (
    SPANS,
    {"model.max_span": 8},
    "model.max_span=8 here, but 64 there",
  ),
  "symbols": (
    {"data.name": "bytes", "data.path": "text"},
    {"data.name": "tokens"},
    "symbols of data=tokens here, but bytes there",
  ),
}


@pytest.mark.parametrize(
  "name, exports",
  listed(
    default=[
      ("heads", False),
      ("rotary", True),
      ("symbols", False),
    ],
    every=itertools.product(MEANINGS, (False, True)),
  ),
)
def test_weights_that_mean_something_else_are_rejected_or_named(
  name, exports, tmp_path, monkeypatch
):
  """Although all shapes agree."""
  common, here, message = MEANINGS[name]
  monkeypatch.chdir(tmp_path)
  pathlib.Path("text").write_bytes(b"some text " * 1000)
  common = {"model.positions": "rotary"} | common
  other = tmp_path / "other"
  experiment = Experiment(runs.tiny(**common))
  runs.untrained(other, experiment.config)
  if exports:
    other = tmp_path / "other.safetensors"
    exported.save(other, experiment.config, experiment.init().params)
  start = common | here | {"train.init_from": str(other)}

  with refused(f"is another network: .*{message}"):
    warm_start.first_state(Experiment(runs.tiny(**start)))

  start["train.init_partial"] = True
  _, about = warm_start.first_state(Experiment(runs.tiny(**start)))
  (changed,) = about["changed"]
  assert message in changed and not about["random"]
  assert message in banner.origin(about)


def test_settings_that_change_no_meaning_may_differ(tmp_path):
  other = runs.untrained(tmp_path, runs.tiny())
  changes = {
    "model.dropout": 0.1,
    "model.remat": "none",
    "model.dtype": "bfloat16",
    "train.init_from": str(other),
  }
  warm_start.first_state(Experiment(runs.tiny(**changes)))


def test_weights_of_which_none_fits_are_rejected(trained):
  start = {
    "train.init_from": str(trained),
    "train.init_partial": True,
  }
  config = runs.tiny(**start | {"model.width": 32})
  with refused("is another network"):
    warm_start.first_state(Experiment(config))


def test_centroids_of_the_other_run_are_named(tmp_path):
  routing = runs.tiny(**{"attention.pattern": "Routing(4, 8)"})
  other = runs.untrained(tmp_path, routing)
  config = runs.tiny(**{"train.init_from": str(other)})
  with refused("centroids.4 is absent here"):
    warm_start.first_state(Experiment(config))


# Changes.


def test_run_goes_on_with_other_settings(trained, tmp_path, capsys):
  workdir = shutil.copytree(trained, tmp_path / "run")
  more = {
    "train.steps": 8,
    "train.batch_size": 4,
    "optimizer.beta1": 0.5,
  }
  config = runs.tiny(**{"eval.every": 2} | more)

  with refused("use --allow_changes, another"):
    loop.train(config, workdir)

  state = loop.train(config, workdir, allow_changes=True)
  reported = capsys.readouterr().err

  assert "train.steps was 4, is 8" in reported
  (line,) = (workdir / config_lib.CHANGES).read_text().splitlines()
  assert json.loads(line)["step"] == 4
  # The steps that follow are those of the new settings, and no others.
  expected = open_run(trained).restore()
  # What `model.remat=auto` chooses for a small network.
  experiment = Experiment(config).with_remat("none")
  expected = advance(experiment, expected, range(4, 8))

  assert arrays(state) == arrays(expected)
  loop.train(config, workdir)  # without the flag: nothing changes any more


def test_other_rates_and_numbers_of_steps_need_no_other_program(
  trained, tmp_path
):
  compiled = set()

  def listen(event, **_):
    if event.startswith("/jax/compilation_cache/cache_"):
      compiled.add(event.rpartition("/")[2])

  workdir = shutil.copytree(trained, tmp_path / "run")
  changes = {
    "eval.every": 2,
    "train.steps": 8,
    "optimizer.learning_rate": 0.02,
    "optimizer.warmup_steps": 3,
    "optimizer.minimum": 0.1,
  }
  jax.monitoring.register_event_listener(listen)
  try:
    loop.train(runs.tiny(**changes), workdir, allow_changes=True)
  finally:
    jax.monitoring.unregister_event_listener(listen)
  assert compiled == {"cache_hits"}

  rates = {}
  for line in metrics.read(workdir):
    if line["split"] == "train":
      rates[line["step"]] = line["learning_rate"]
  for step in range(5, 9):
    progress = (step - 1 - 3) / 5
    share = (1 + np.cos(np.pi * progress)) / 2
    expected = 0.02 * (0.1 + 0.9 * share)
    assert rates[step] == pytest.approx(expected, rel=1e-5)


PATTERN = {"attention.pattern": "dense"}


def test_finished_run_is_not_relabelled(trained, tmp_path):
  workdir = shutil.copytree(trained, tmp_path / "run")
  before = runs.files(workdir)
  for changes in (PATTERN, {"attention.stride": 4}, {"eval.sequences": 4}):
    config = runs.tiny(**{"eval.every": 2} | changes)
    (name,) = changes
    with refused(f"config: {name} .*--allow_changes"):
      loop.train(config, workdir)
    with refused(f"{name} cannot change, .* no step"):
      loop.train(config, workdir, allow_changes=True)

  assert runs.files(workdir).keys() == before.keys()
  for name in "config.json", "patterns.png", "metrics.jsonl":
    assert runs.files(workdir)[name] == before[name]


def test_pattern_of_a_begun_run_changes_if_told_to(trained, tmp_path, capsys):
  workdir = shutil.copytree(trained, tmp_path / "run")
  shutil.rmtree(workdir / "checkpoints" / "4")
  config = runs.tiny(**{"eval.every": 2} | PATTERN)

  with refused("attention.pattern .*--allow_changes"):
    loop.train(config, workdir)

  later = workdir / "evaluations" / "test-step4-context0-ema.json"
  later.parent.mkdir()
  later.touch()  # of the step that went

  with refused("trained again with another config; move the file"):
    loop.train(config, workdir, allow_changes=True)

  later.unlink()
  loop.train(config, workdir, allow_changes=True)

  assert "pattern was 'strided', is 'dense'" in capsys.readouterr().err
  (line,) = (workdir / config_lib.CHANGES).read_text().splitlines()
  assert json.loads(line)["step"] == 2
  free = {
    "attention.backend": "dense",
    "mesh.data": 1,
  }
  config = runs.tiny(**{"eval.every": 1} | PATTERN | free)
  loop.train(config, workdir)

  assert [4] == [x for x, _ in config_lib.read_changes(workdir)][1:]
  # Where a run resumes without its later checkpoints, all changes are one.
  shutil.rmtree(workdir / "checkpoints" / "4")
  loop.train(config, workdir, allow_changes=True)
  ((step, changed),) = config_lib.read_changes(workdir)

  assert step == 2
  assert {*changed} == {*PATTERN, *free, "eval.every"}


def test_config_that_was_edited_is_told_where_its_run_is_read(
  trained, tmp_path, capsys
):
  workdir = shutil.copytree(trained, tmp_path / "run")
  open_run(workdir)
  assert not capsys.readouterr().err
  path = workdir / "config.json"
  path.write_text(path.read_text().replace('"strided"', '"dense"'))
  assert open_run(workdir).experiment.config.attention.pattern == "strided"
  line = "used with its own config, not with --config.attention.pattern=dense"
  assert line in capsys.readouterr().err


def test_config_that_was_edited_is_compared_with_the_checkpoint(
  trained, tmp_path, capsys
):
  workdir = shutil.copytree(trained, tmp_path / "run")
  path = workdir / "config.json"
  path.write_text(path.read_text().replace('"strided"', '"dense"'))
  changes = {
    "eval.every": 2,
    "train.steps": 6,
  }
  config = runs.tiny(**changes | PATTERN)
  loop.train(config, workdir, allow_changes=True)

  assert "pattern was 'strided', is 'dense'" in capsys.readouterr().err
  changes = {
    "attention.pattern": ("strided", "dense"),
    "train.steps": (4, 6),
  }
  assert config_lib.read_changes(workdir) == [(4, changes)]


def test_other_changes_need_another_run(trained):
  changes = {
    "optimizer.name": "muon",
    "train.steps": 8,
  }
  with refused("use another --workdir"):
    loop.train(runs.tiny(**changes), trained, allow_changes=True)
  changes = {
    "eval.every": 2,
    "train.steps": 3,
  }
  with refused("train.steps=3 must be at least 4"):
    loop.train(runs.tiny(**changes), trained, allow_changes=True)
