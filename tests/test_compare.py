"""Comparisons: budgets, choices, results, and one comparison end to end."""

import json
import multiprocessing
import os
import re

import numpy as np
import pytest
import runs

from sparse_transformer.comparison import (
  budget,
  checks,
  choices,
  folder,
  results,
  runs as comparison_runs,
)
from sparse_transformer.training import costs
from sparse_transformer.training.experiment import Experiment

# Raised by ml_collections when it loads a config file.
pytestmark = pytest.mark.filterwarnings(
  "ignore:the load_module:DeprecationWarning"
)
SCRIPT = "sparse_transformer/compare.py"


@pytest.mark.parametrize(
  "text, expected",
  [
    ("steps:500", ("steps", 500)),
    ("seconds:1.5", ("seconds", 1.5)),
    ("flops:1e15", ("flops", 1e15)),
    ("steps:2147483647", ("steps", 2**31 - 1)),
  ],
)
def test_budget_is_a_kind_and_an_amount(text, expected):
  assert budget.parse_budget(text) == expected


@pytest.mark.parametrize(
  "text",
  ["", "500", "steps", "steps:", "steps:x", "hours:3", "steps:0", "flops:nan"]
  + ["steps:0.5", "steps:2147483648", "steps:1e30", "steps:inf", "steps:nan"]
  + ["seconds:1e300", "seconds:inf", "flops:inf", "seconds:-1"],
)
def test_anything_else_is_not_a_budget(text):
  with pytest.raises(ValueError, match="steps:N, seconds:N or flops:N"):
    budget.parse_budget(text)


@pytest.mark.parametrize(
  "text, expected",
  [
    ("attention.pattern=dense,local", ["dense", "local"]),
    ("attention.pattern=dense", ["dense"]),
    ("model.width=16, 32", ["16", "32"]),
    ("attention.cycle=(0,),(1,0)", ["(0,)", "(1,0)"]),
    ("attention.pattern=BigBird(8, 3),local", ["BigBird(8, 3)", "local"]),
    (
      "attention.pattern=Local(4), Strided(4);dense",
      ["Local(4), Strided(4)", "dense"],
    ),
  ],
)
def test_values_are_separated_outside_of_brackets(text, expected):
  field, found = choices.parse_vary(text, runs.tiny())
  assert field == text.partition("=")[0]
  assert found == expected


@pytest.mark.parametrize(
  "text, message",
  [
    ("pattern=dense", "no field 'pattern'"),
    ("attention.patern=dense", "no field 'attention.patern'"),
    ("attention.pattern", "different values"),
    ("attention.pattern=dense,,local", "different values"),
    ("attention.pattern=dense,dense", "different values"),
    ("train.seed=1,2", "sets train.seed itself; use --seeds"),
    ("train.steps=2,4", "sets train.steps itself; use --budget"),
  ],
)
def test_field_that_cannot_vary_and_equal_values_raise(text, message):
  with pytest.raises(ValueError, match=message):
    choices.parse_vary(text, runs.tiny())


@pytest.mark.parametrize(
  "field, text, value",
  [
    ("model.width", "32", 32),
    ("model.dropout", "0.1", 0.1),
    ("model.half_size", "True", True),
    ("attention.cycle", "(1, 0)", (1, 0)),
    ("attention.pattern", "fixed", "fixed"),
  ],
)
def test_one_field_is_changed_and_no_other(field, text, value):
  config = runs.tiny()
  changed = choices.with_values(config, **{field: text}).to_dict()
  group, name = field.split(".")
  assert changed[group].pop(name) == value
  expected = config.to_dict()
  del expected[group][name]
  assert changed == expected


@pytest.mark.parametrize("text", ["wide", "1.5", "'a'", "[" * 9999, "9" * 9999])
def test_value_of_another_type_raises(text):
  with pytest.raises(ValueError, match="model.width"):
    choices.with_values(runs.tiny(), **{"model.width": text})


def test_each_value_has_its_own_folder():
  names = ["dense", "Local(4), Strided(4)", "Local(4) | Strided(4)", "1e-3"]
  folders = {choices.folder_name(name) for name in names}
  assert len(folders) == len(names)
  assert not any(set(folder) & set("/ |()") for folder in folders)


def test_folder_is_within_the_comparison_and_its_name_not_too_long(tmp_path):
  long = "Local(4)" + " | Local(4)" * 100
  names = [".", "..", "x" * 300, "x" * 301, "ä" * 300, long, f"{long} | dense"]
  for name in names:
    folder = tmp_path / choices.folder_name(name)
    folder.mkdir()  # neither too long, nor that of another
    assert folder.resolve().parent == tmp_path


def test_flops_count_weights_and_pairs_but_not_what_is_recomputed():
  config = runs.tiny(**{"model.remat": "block"})
  model = Experiment(config).model
  weights = costs.step(config, model, 0)["flops"]["weights"]
  pairs = sum(p.pairs(64) for heads in model.patterns for p in heads)
  # Two heads of width 8: seven products per pair in training, a batch of 8.
  step = weights + pairs * 8 * 14 * 8
  assert budget.flops_per_step(config) == step
  assert budget.count_steps(config, ("flops", 7.5 * step)) == 7
  assert budget.count_steps(config, ("steps", 9)) == 9


def test_budget_of_no_step_or_more_than_can_be_counted_is_an_error():
  config = runs.tiny()
  step = budget.flops_per_step(config)
  for amount in (step * 0.99, step * 2**31, 1e300):
    message = re.escape(f"--budget=flops:{amount:g} allows")
    with pytest.raises(ValueError, match=message):
      budget.count_steps(config, ("flops", amount))


def test_warm_up_is_shortened_unless_it_is_what_varies():
  config = runs.tiny(**{"optimizer.warmup_steps": 100})
  found = [
    choices.with_steps(config, steps, field)
    for steps, field in (
      (500, "model.width"),
      (2000, "model.width"),
      (500, "optimizer.warmup_steps"),
    )
  ]
  assert [c.optimizer.warmup_steps for c in found] == [50, 100, 100]
  assert [c.train.steps for c in found] == [500, 2000, 500]


STEPS = ("steps", 20)


@pytest.mark.parametrize(
  "field, values, budget, message",
  [
    ("train.batch_size", "8,0", STEPS, "train.batch_size=0 must be"),
    ("train.accumulation", "1,3", STEPS, "multiple of .*accumulation=3"),
    ("train.batch_size", "8,1000000000", STEPS, "needs at least"),
    ("checkpoint.keep", "1,0", STEPS, "checkpoint.keep=0 must be"),
    ("optimizer.learning_rate", "1e-3,-1", STEPS, "learning_rate=-1"),
    ("optimizer.warmup_steps", "5,20", STEPS, "warmup_steps=20 must.*steps=20"),
    ("model.num_heads", "2,3", STEPS, "model.num_heads=3 must divide"),
    ("attention.backend", "auto,fast", STEPS, "fast"),
    ("model.width", "16,32", ("flops", 1e6), "allows 0.[0-9]* steps"),
    ("data.name", "digits,bytes", STEPS, "data.path is not set"),
    # The same run twice.
    ("model.dropout", "0.1,1e-1", STEPS, "0.1 and .*=1e-1 are the same"),
    ("model.dropout", "0,0.0", STEPS, "are the same"),
    ("attention.pattern", "Local(3),Local( 3)", STEPS, "are the same"),
    ("attention.pattern", "dense,Causal()", STEPS, "are the same"),
    ("attention.stride", "8,16", STEPS, "are the same"),  # of dense attention
  ],
)
def test_impossible_run_is_found_by_the_checks(field, values, budget, message):
  config = runs.tiny(**{"attention.pattern": "dense"})
  with pytest.raises((ValueError, OSError), match=message):
    checks.check(config, field, values.split(","), budget, "test")


def test_possible_runs_pass_the_checks():
  config = runs.tiny(**{"attention.pattern": "dense"})
  for field, values, limit in (
    ("attention.backend", ["auto", "dense"], ("seconds", 1.0)),
    # Also more than the steps of the config, which are unused.
    ("optimizer.warmup_steps", ["1", "1000"], ("seconds", 1.0)),
    ("optimizer.warmup_steps", ["1", "19"], STEPS),
  ):
    checks.check(config, field, values, limit, "test")


def test_folder_of_something_else_is_an_error(tmp_path):
  about = dict(field="a", seeds=1)
  cases = {
    "file": "--workdir=.*file is a file",
    "run/config.json": "holds a run",
    "other/comparison-of.json": "another comparison: seeds differ",
    "empty/comparison-of.json": "comparison-of.json cannot be read",
    "list/comparison-of.json": "comparison-of.json cannot be read",
  }
  contents = {"other": '{"field": "a", "seeds": 2}', "list": "[1]"}
  for name, message in cases.items():
    path = tmp_path / name
    root = tmp_path / name.partition("/")[0]
    path.parent.mkdir(exist_ok=True)
    path.write_text(contents.get(root.name, ""))
    with pytest.raises((ValueError, OSError), match=message):
      folder.check(root, about)
  (tmp_path / "new" / "comparison-of.json").mkdir(parents=True)
  with pytest.raises(ValueError, match="comparison-of.json cannot be read"):
    folder.check(tmp_path / "new", about)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"bits_per_dim": 3}'])
def test_damaged_result_is_an_error_that_names_it(text, tmp_path):
  path = tmp_path / "dense" / "seed0" / "result.json"
  path.parent.mkdir(parents=True)
  path.write_text(text)
  with pytest.raises(ValueError, match=f"{path} cannot be read .*delete it"):
    comparison_runs.run_all(
      runs.tiny(), tmp_path, "attention.pattern", ["dense"], STEPS, 1, "test"
    )


@pytest.mark.parametrize("error", [ValueError("why"), MemoryError("why")])
def test_error_in_the_process_of_a_run_is_sent_to_the_other(error, monkeypatch):
  def fail(*inputs):
    raise error

  monkeypatch.setattr(comparison_runs, "run", fail)
  monkeypatch.setattr(os, "setpgrp", lambda: None)
  receiver, sender = multiprocessing.Pipe(duplex=False)
  with pytest.raises(SystemExit, match="1"):
    comparison_runs._run_and_exit(sender)
  assert receiver.poll() and "why" in receiver.recv()


def test_means_and_deviations_are_over_the_seeds():
  run = dict(steps=3, seconds=2.0, tokens_per_second=5.0, flops=1e9)
  several, single = results.summarize(
    {
      "a": [
        run | dict(bits_per_dim=bits, peak_bytes=peak)
        for bits, peak in ((1.0, 7), (2.0, 9), (6.0, 8))
      ],
      "b": [run | dict(bits_per_dim=1.5, peak_bytes=1, seconds=None)],
    }
  )
  assert several["bits_per_dim"] == 3 and several["peak_bytes"] == 9
  assert several["deviation"] == pytest.approx(np.std([1, 2, 6], ddof=1))
  assert single["deviation"] is None and single["seconds"] is None


def words(tmp_path, *more):
  small = {"model.num_layers": 1, "eval.batch_size": 64}
  settings = runs.tiny(**small).to_dict()
  changed = {
    f"--config.{group}.{name}={value}"
    for group in ("model", "train", "eval", "checkpoint")
    for name, value in settings[group].items()
  }
  return (
    f"--config={runs.REPO / 'configs' / 'digits.py'}",
    *sorted(changed),
    f"--workdir={tmp_path / 'c'}",
    *more,
  )


VARY = "--vary=attention.pattern=local,Strided(8)"


def test_comparison_from_end_to_end(tmp_path, capfd):
  line = words(tmp_path, VARY, "--budget=steps:6", "--seeds=1")
  assert runs.command(SCRIPT, *line) == 0
  root, output = tmp_path / "c", capfd.readouterr().out
  text = (root / "comparison.md").read_text()
  assert text in output and len(text.splitlines()) == 4
  rows = json.loads((root / "comparison.json").read_text())["rows"]
  assert [row["choice"] for row in rows] == ["local", "Strided(8)"]
  for row in rows:
    assert row["steps"] == 6 and row["seeds"] == 1
    assert 3 < row["bits_per_dim"] < 6 and row["deviation"] is None
    assert row["peak_bytes"] > 2**20 and row["tokens_per_second"] > 0
  page = (root / "comparison.html").read_text()
  assert "data:image/png;base64," in page and "http" not in page
  # All runs are done: nothing is trained again, and no file changes.
  before = runs.files(root)
  assert runs.command(SCRIPT, *line) == 0
  assert runs.files(root) == before
  # The folder of one comparison is not used for another.
  other = words(tmp_path, VARY, "--budget=steps:7", "--seeds=1")
  assert runs.command(SCRIPT, *other) == 1
  assert "budget differ" in capfd.readouterr().err


@pytest.mark.soak
def test_comparison_resumes_with_the_missing_run(tmp_path, capfd):
  line = words(tmp_path, VARY, "--budget=steps:6", "--seeds=2")
  assert runs.command(SCRIPT, *line) == 0
  root = tmp_path / "c"
  for row in json.loads((root / "comparison.json").read_text())["rows"]:
    of_choice = root / choices.folder_name(row["choice"])
    found = [
      json.loads((of_choice / f"seed{seed}" / "result.json").read_text())
      for seed in range(2)
    ]
    bits = [result["bits_per_dim"] for result in found]
    assert row["seeds"] == 2 and bits[0] != bits[1]
    assert row["bits_per_dim"] == pytest.approx(np.mean(bits))
    assert row["deviation"] == pytest.approx(np.std(bits, ddof=1))
  missing = root / "local" / "seed1" / "result.json"
  expected = json.loads(missing.read_text())
  missing.unlink()
  others = {p: p.read_bytes() for p in root.glob("*/seed*/result.json")}
  # A run that fails is one line.
  steps = missing.with_name("steps.json")
  text = steps.read_text()
  steps.write_text("-1")
  capfd.readouterr()
  assert runs.command(SCRIPT, *line) == 1
  (error,) = capfd.readouterr().err.splitlines()
  assert "seed1 failed: " in error and "=-1 must be an integer" in error
  steps.write_text(text)
  assert runs.command(SCRIPT, *line) == 0
  found = json.loads(missing.read_text())
  assert found["bits_per_dim"] == expected["bits_per_dim"]
  assert all(path.read_bytes() == text for path, text in others.items())


@pytest.mark.parametrize(
  "more, message",
  [
    (["--vary=model.width=16,banana"], "model.width=banana"),
    (["--vary=attention.pattern=local,wrong"], "attention.pattern"),
    (["--vary=model.width=16", "--budget=x"], "--budget=x"),
    (["--vary=model.width=16", "--seeds=0"], "--seeds=0"),
    (["--vary=checkpoint.keep=1,0"], "checkpoint.keep=0"),
    (["--vary=train.seed=1,2"], "use --seeds"),
    ([], "--vary is missing"),
  ],
)
def test_mistakes_are_reported_in_one_line_and_write_nothing(
  more, message, tmp_path, capsys
):
  assert runs.command(SCRIPT, *words(tmp_path, *more)) == 1
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1
  assert not (tmp_path / "c").exists()
