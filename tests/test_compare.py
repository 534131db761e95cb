"""Comparisons: budgets, choices, results, and one comparison end to end."""

import dataclasses
import json
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import threading
import time

import comparisons
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from scipy import stats

from sparse_transformer import config as config_lib, signals
from sparse_transformer.comparison import (
  budget,
  execution as comparison_runs,
  jobs,
  plan,
  record,
  results,
)
from sparse_transformer.training import loop
from sparse_transformer.training.analysis import costs
from sparse_transformer.training.experiment import Experiment

SCRIPT = "sparse_transformer/compare.py"


@pytest.mark.parametrize(
  "text, expected",
  [
    ("steps:500", ("steps", 500)),
    ("seconds:1.5", ("seconds", 1.5)),
    ("processor_seconds:9", ("processor_seconds", 9)),
    ("flops:1e15", ("flops", 1e15)),
    ("steps:2147483647", ("steps", 2**31 - 1)),
  ],
)
def test_budget_is_a_kind_and_an_amount(text, expected):
  assert budget.parse_budget(text) == expected


@pytest.mark.parametrize(
  "text",
  ["steps", "hours:3", "steps:0", "flops:nan", "steps:0.5", "steps:2147483648"]
  + ["seconds:1e300", "seconds:inf", "flops:inf", "seconds:-1"],
)
def test_anything_else_is_not_a_budget(text):
  with pytest.raises(ValueError, match="steps:N, seconds:N, "):
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
  field, found = plan.parse_vary(text, runs.tiny())
  assert field == text.partition("=")[0]
  assert found == expected


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
  changed = plan.with_values(config, **{field: text}).to_dict()
  group, name = field.split(".")
  assert changed[group].pop(name) == value
  expected = config.to_dict()
  del expected[group][name]
  assert changed == expected


@pytest.mark.parametrize("text", ["wide", "1.5", "'a'", "[" * 9999, "9" * 9999])
def test_value_of_another_type_raises(text):
  with pytest.raises(ValueError, match="model.width"):
    plan.with_values(runs.tiny(), **{"model.width": text})


def test_each_value_has_its_own_folder_within_the_comparison(tmp_path):
  long = "Local(4)" + " | Local(4)" * 100
  names = [".", "..", "x" * 300, "x" * 301, "ä" * 300, long, f"{long} | dense"]
  names += ["dense", "Local(4), Strided(4)", "Local(4) | Strided(4)", "1e-3"]
  for name in names:
    folder = tmp_path / plan.folder_name(name)
    assert not {*folder.name} & {*"/ |()"}
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
    of(config, field, [], ("steps", number)).config_of(choice)
    for number, field, choice in (
      (500, "model.width", "32"),
      (2000, "model.width", "32"),
      (500, "optimizer.warmup_steps", "100"),
    )
  ]
  assert [c.optimizer.warmup_steps for c in found] == [50, 100, 100]
  assert [c.train.steps for c in found] == [500, 2000, 500]


STEPS = ("steps", 20)


def of(config, field, values, limit, root=pathlib.Path("unused"), seeds=1):
  """The plan of a comparison."""
  return plan.Plan(config, root, field, values, limit, range(seeds))


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
    plan.check(of(config, field, values.split(","), budget))


def test_possible_runs_pass_the_checks():
  config = runs.tiny(**{"attention.pattern": "dense"})
  for field, values, limit in (
    ("attention.backend", ["auto", "dense"], ("seconds", 1.0)),
    # Also more than the steps of the config, which are unused.
    ("optimizer.warmup_steps", ["1", "1000"], ("seconds", 1.0)),
    ("optimizer.warmup_steps", ["1", "19"], STEPS),
  ):
    plan.check(of(config, field, values, limit))


@pytest.mark.parametrize("limit", [STEPS, ("seconds", 9.0), ("flops", 1e12)])
def test_process_that_starts_the_runs_computes_nothing_on_a_device(limit):
  """On a GPU, JAX would take most of the memory that the runs need."""
  comparison = of(runs.tiny(), "model.width", ["16", "32"], limit)
  arrays = {*map(id, jax.live_arrays())}
  with jax.transfer_guard("disallow_explicit"):
    comparison.about()
    plan.check(comparison)
    comparison.config_of("32")
    assert {*map(id, jax.live_arrays())} <= arrays
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
      jnp.asarray(np.ones(3)) + 1  # the guard sees what is computed


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"bits_per_dim": 3}'])
def test_damaged_result_is_an_error_that_names_it(text, tmp_path):
  path = tmp_path / "dense" / "seed0" / "result.json"
  path.parent.mkdir(parents=True)
  path.write_text(text)
  with pytest.raises(ValueError, match=f"{path} cannot be read: .*; delete it"):
    comparison_runs.run_all(
      of(runs.tiny(), "attention.pattern", ["dense"], STEPS, tmp_path),
      {"dense": ""},
    )


@pytest.mark.parametrize("error", [ValueError("why"), MemoryError("why")])
def test_error_in_the_process_of_a_run_is_sent_to_the_other(error, monkeypatch):
  def fail(*inputs):
    raise error

  monkeypatch.setattr(os, "setpgrp", lambda: None)
  receiver, sender = multiprocessing.Pipe(duplex=False)
  with pytest.raises(SystemExit, match="1"):
    jobs._call_and_exit(sender, jobs.Share(), None, fail)
  assert receiver.poll() and "why" in receiver.recv()


# Steps and scores.


def test_only_a_time_ends_a_run_before_its_last_step():
  for limit in ("seconds", 9.0), ("processor_seconds", 9.0):
    timed = of(runs.tiny(), "attention.pattern", ["dense"], limit)
    assert timed.limit(0) == timed.limit(None) == limit
    assert timed.config_of("dense").train.steps == 2**31 - 1
  counted = of(runs.tiny(), "attention.pattern", ["dense"], STEPS)
  assert counted.limit(0) is None
  assert counted.config_of("dense").train.steps == 20


def test_a_value_may_set_other_fields():
  text = "attention.pattern=local;local with data.length=32 train.batch_size=8"
  field, (_, choice) = plan.parse_vary(text, runs.tiny())
  pair = of(runs.tiny(), field, ["local", choice], STEPS)
  one, other = map(pair.config_of, pair.choices)
  assert one.attention == other.attention and one.data.length != 32
  assert (other.data.length, other.train.batch_size) == (32, 8)
  assert pair.workdir(choice, seed=0) != pair.workdir("local", seed=0)
  for bad, words in (
    ("data.width=8", "no field 'data.width'"),
    ("train.seed=8", "use --seeds"),
  ):
    with pytest.raises(ValueError, match=words):
      plan.parse_vary(f"attention.pattern=local;dense with {bad}", runs.tiny())


def test_schedule_makes_another_run_whose_flops_follow_it():
  later = "dense with attention.schedule=9:strided"
  comparison = of(
    runs.tiny(), "attention.pattern", ["dense", "strided", later], STEPS
  )
  plan.check(comparison)
  dense, strided, both = (
    budget.flops(comparison.config_of(choice), 20)
    for choice in comparison.choices
  )
  assert both == pytest.approx(dense * 9 / 20 + strided * 11 / 20)
  early = budget.flops(comparison.config_of(later), 5)
  assert early == budget.flops(comparison.config_of("dense"), 5)


def test_experiments_with_the_same_data_share_them():
  first, second, other = plan.experiments(
    runs.tiny(**{"data.columns": columns, "model.width": width})
    for columns, width in ((8, 16), (8, 32), (4, 16))
  )
  assert first.source is second.source is not other.source
  assert first.model.width == 16 and second.model.width == 32


def call_here(tasks, among):
  """Calls the functions of tasks in this process."""
  for task in tasks:
    task.function(*task.inputs)


def test_only_the_best_value_is_scored_on_the_test_split(tmp_path, monkeypatch):
  names = ["dense", "local"]
  comparison = of(
    runs.tiny(), "attention.pattern", names, STEPS, tmp_path, seeds=3
  )
  for run in TWO:
    workdir = comparison.workdir(run["choice"], seed=run["seed"])
    workdir.mkdir(parents=True)
    (workdir / "result.json").write_text(
      json.dumps({x: run[x] for x in run if x not in ("test", "curve")})
    )
    line = dict(step=1, split="validation", bits_per_dim=3.0)
    line |= dict(seconds=1.0, processor_seconds=1.0)
    (workdir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
  called = []

  def score(config, workdir, split, limit):
    assert split == "test" and config.train.steps == 20 and limit is None
    called.append(workdir)
    path = workdir / "result.json"
    test = dict(bits_per_dim=3.5, standard_error=0.1)
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(test=test)))

  monkeypatch.setattr(comparison_runs, "run", score)
  monkeypatch.setattr(jobs, "call", call_here)
  for _ in range(2):
    found = comparison_runs.run_all(comparison, dict(dense="", local=""))
    # Once: what is scored is not scored again.
    assert called == [comparison.workdir("local", seed=i) for i in range(3)]
    tests = {(run["choice"], bool(run["test"])) for run in found}
    assert tests == {("dense", False), ("local", True)}


GRID = {
  "dense": {"0.01": 3.0, "0.1": None, "0.001": 4.0},
  "local": {"0.01": 3.0, "0.1": 2.5, "0.001": 4.0},
}
TUNED = dict(
  tuned="optimizer.learning_rate",
  candidates=["0.01", "0.1", "1e-3"],
  tune_budget=("processor_seconds", 3.0),
)


def test_each_value_gets_its_best_candidate(tmp_path, monkeypatch):
  names, limit = ["dense", "local"], ("processor_seconds", 9.0)
  comparison = dataclasses.replace(
    of(runs.tiny(), "attention.pattern", names, limit, tmp_path, seeds=2),
    **TUNED,
  )
  plan.check(comparison)
  called = []

  def trained(config, workdir, split, limit):
    is_tuning = workdir.parent.name == "tune"
    assert limit == ("processor_seconds", 3.0 if is_tuning else 9.0)
    rate, pattern = config.optimizer.learning_rate, config.attention.pattern
    called.append((pattern, rate, config.train.seed, split))
    bits = GRID[pattern][str(rate)]
    if bits is None:
      raise FloatingPointError("why")
    workdir.mkdir(parents=True, exist_ok=True)
    result = dict.fromkeys(comparison_runs.NUMBERS, 1) | dict(best_step=1)
    score = dict(bits_per_dim=bits, standard_error=0.1)
    result |= dict.fromkeys(("validation", split), score)
    (workdir / "result.json").write_text(json.dumps(result))
    line = dict(step=1, split="validation", bits_per_dim=3.0)
    line |= dict(seconds=1.0, processor_seconds=1.0)
    (workdir / "metrics.jsonl").write_text(json.dumps(line) + "\n")

  monkeypatch.setattr(comparison_runs, "run", trained)
  monkeypatch.setattr(jobs, "call", call_here)
  for _ in range(2):
    tuning = record.tuning(comparison_runs.tune(comparison))
    # The candidates as they were written.
    assert tuning["scores"]["dense"] == {"0.01": 3, "0.1": None, "1e-3": 4}
    assert tuning["best"] == {"dense": "0.01", "local": "0.1"}
    assert len(called) == 6  # once: what is scored is not scored again
  seeds = {(seed, split) for _, _, seed, split in called}
  assert seeds == {(2, "validation")}  # seeds 0 and 1 are compared
  assert (tmp_path / "local" / "tune" / "1e-3" / "result.json").exists()
  del called[:]
  found = comparison_runs.run_all(comparison, tuning["best"])
  assert {run["seed"] for run in found} == {0, 1}
  assert {x[:2] for x in called} == {("dense", 0.01), ("local", 0.1)}
  tested = [x for x in called if x[3] == "test"]
  assert tested == [("local", 0.1, seed, "test") for seed in (0, 1)]
  # A value that no candidate trains ends the comparison.
  monkeypatch.setitem(GRID, "dense", dict.fromkeys(GRID["dense"]))
  for candidate in TUNED["candidates"]:
    folder = comparison.workdir("dense", candidate)
    (folder / "result.json").unlink()
  with pytest.raises(ValueError, match="pattern=dense, training diverged"):
    comparison_runs.tune(comparison)


def test_same_run_twice_in_a_grid_is_found_by_the_checks():
  comparison = of(runs.tiny(), "attention.pattern", ["dense"], STEPS)
  tuned = dict(tuned="model.dropout", candidates=["0.1", "1e-1"])
  with pytest.raises(ValueError, match="dropout=0.1 and .*=1e-1 are the same"):
    plan.check(dataclasses.replace(comparison, **tuned))


@pytest.mark.parametrize("window, is_equal", [(30, True), (20, False)])
def test_values_can_be_held_to_equal_keys(window, is_equal):
  names = [f"Local({window})", "Local(32)"]
  comparison = of(runs.tiny(), "attention.pattern", names, STEPS)
  plan.check(comparison)
  comparison = dataclasses.replace(comparison, equal="keys")
  if is_equal:  # 23.2 and 24.3 of 64
    plan.check(comparison)
  else:
    words = r"10 %: 17.0 with .*=Local\(20\), 24.2 with .*=Local\(32\)$"
    with pytest.raises(ValueError, match=words):
      plan.check(comparison)


def test_repeated_comparison_has_other_seeds():
  first, second = (
    dataclasses.replace(of(runs.tiny(), "model.width", ["16"], STEPS), seeds=x)
    for x in (range(3), range(3, 6))
  )
  assert second.config_of("16", seed=3).train.seed == 3
  assert second.config_of("16").train.seed == 6  # of tuning
  differing = {x for x, y in first.about().items() if second.about()[x] != y}
  assert differing == {"first_seed"}


# The record, and what is made from it.


TWO = [
  comparisons.run(choice, seed, bits)
  for choice, of_seeds in (("dense", (3.0, 4.0, 8.0)), ("local", (2.5, 3.0, 6)))
  for seed, bits in enumerate(of_seeds)
]


def test_means_gaps_and_their_errors_are_over_the_seeds():
  best, first = comparisons.record(*TWO)["rows"]
  assert (best["choice"], first["choice"]) == ("local", "dense")
  assert first["gap"] is None and first["validation"]["mean"] == 5
  samples = [3, 4, 8], [2.5, 3, 6]
  interval = stats.ttest_1samp(samples[0], 0).confidence_interval(0.95)
  error = (interval.high - interval.low) / 2
  assert first["validation"]["error"] == pytest.approx(error)
  assert best["gap"]["mean"] == pytest.approx(np.mean([-0.5, -1, -2]))
  welch = stats.ttest_ind(*samples, equal_var=False).confidence_interval(0.95)
  error = (welch.high - welch.low) / 2
  assert best["gap"]["error"] == pytest.approx(error)
  assert best["peak_bytes"] == 2**20 + 2 and best["processor_seconds"] == 40
  (single,) = comparisons.record(TWO[0])["rows"]
  assert single["validation"] == dict(mean=3, error=None)


@pytest.mark.parametrize("number", [2, 3, 9])
def test_errors_hold_in_95_of_100_comparisons(number):
  rng, held = np.random.default_rng(number), []
  for _ in range(2000):
    first, second = rng.normal(2, 0.1, number), rng.normal(3, 0.2, number)
    for found, truth in (
      (record.mean([*first]), 2),
      (record.mean([*second], [*first]), 1),
    ):
      held.append(abs(found["mean"] - truth) <= found["error"])
  one, difference = held[::2], held[1::2]
  assert 0.935 < np.mean(one) < 0.965
  assert np.mean(difference) > 0.935  # Welch's t is conservative for few seeds


def test_record_of_an_older_version_gets_the_errors_of_this_one(tmp_path):
  made = comparisons.record(*TWO)
  old = json.loads(json.dumps(made))
  del old["about"]["target"], old["about"]["first_seed"], old["tuning"]
  for row in old["rows"]:
    row["validation"]["deviation"] = row["validation"].pop("error")
  for run in old["runs"]:
    del run["keys"]
  record.write(tmp_path / "comparison.json", old)
  found = record.read(tmp_path / "comparison.json")
  assert "keys" in results.table(made)[0]
  assert "keys" not in results.table(found)[0]
  assert [row["gap"] for row in found["rows"]] == [
    row["gap"] for row in made["rows"]
  ]


def test_bits_at_equal_amounts_are_read_off_the_curves():
  # All have trained for 40 processor seconds: dense half of its steps.
  made = comparisons.record(*TWO)
  assert made["equal"] == {"processor_seconds": 40}
  best, first = made["rows"]
  assert first["equal"]["processor_seconds"]["mean"] == 5 + 2
  assert best["equal"]["processor_seconds"]["mean"] == pytest.approx(11.5 / 3)
  # Of a budget in seconds, at equal steps; with batches of several sizes, also
  # at equal tokens: 40 steps of 32 are 20 of 64.
  small = [run | dict(tokens_per_step=32) for run in TWO[3:]]
  made = comparisons.record(*TWO[:3], *small, budget=("seconds", 20))
  assert made["equal"] == {"tokens": 40 * 32, "steps": 40}
  assert made["rows"][1]["equal"]["tokens"]["mean"] == 5 + 2


def test_bits_before_the_first_validation_are_unknown():
  # The fast one has ended when the slow one is validated for the first time.
  late = dict(
    steps=[40], seconds=[40], processor_seconds=[80], bits_per_dim=[3]
  )
  made = comparisons.record(TWO[0] | dict(curve=late), TWO[3])
  assert made["equal"] == {} and "at" not in results.table(made)[0][3]
  made = comparisons.record(
    TWO[0] | dict(curve=late), TWO[3], budget=("seconds", 20)
  )
  assert made["equal"] == {"steps": 40}
  assert made["rows"][1]["equal"]["steps"]["mean"] == 3


def test_seeds_of_different_speed_are_averaged_where_all_have_been():
  slow = TWO[0] | dict(
    curve=dict(steps=[10, 30], seconds=[15, 45], bits_per_dim=[6, 4])
  )
  x, mean, low, high = record.over_seeds([TWO[0], slow], "seconds")
  np.testing.assert_allclose(x, [15, 20, 30, 40])
  np.testing.assert_allclose(low, [5.5, 5, 4, 3])
  np.testing.assert_allclose(high, [6, 6 - 1 / 3, 5, 4 + 1 / 3])
  np.testing.assert_allclose(mean, (low + high) / 2)
  single = [
    run | dict(curve=dict(steps=[i], seconds=[i], bits_per_dim=[i]))
    for i, run in enumerate(TWO[:2])
  ]
  assert [len(y) for y in record.over_seeds(single, "seconds")] == [1] * 4


def test_curve_of_training_is_thinned():
  times = dict(seconds=1 / 3, processor_seconds=1.0)
  lines = [
    dict(step=i, split="train", bits_per_dim=1.0, nats=1.0)
    | {name: i * seconds for name, seconds in times.items()}
    for i in range(1, 11)
  ]
  lines.append(lines[-1] | dict(split="validation", bits_per_dim=2.0))
  assert record.curve(lines, "validation") == dict(
    steps=[10], seconds=[3.33], processor_seconds=[10], bits_per_dim=[2.0]
  )
  train = record.curve(lines, "train", 4)
  assert train["steps"] == [1, 4, 7, 10]
  assert train["seconds"] == [0.33, 1.33, 2.33, 3.33]


def test_time_of_training_is_that_of_the_last_line():
  line = dict(step=1, split="train")
  times = dict(seconds=5.0, processor_seconds=7.0)
  early = {name: value / 2 for name, value in times.items()}
  config = runs.tiny(**{"train.steps": 10})
  for lines, expected in (
    ([line | early, line | times], (5, 7)),
    ([line | times, dict(step=1, split="skipped")], (5, 7)),
    ([], (None, None)),
  ):
    found = comparison_runs._trained(config, 10, lines)
    assert (found["seconds"], found["processor_seconds"]) == expected


def test_figure_is_drawn_from_what_the_file_of_a_record_contains(tmp_path):
  made = comparisons.record(*TWO)
  record.write(tmp_path / "comparison.json", made)
  found = record.read(tmp_path / "comparison.json")
  assert found == json.loads(json.dumps(made))
  assert found["runs"] == made["runs"] and found["rows"] == made["rows"]
  figure = results.draw(found)
  figure.draw_without_rendering()
  labels = [axis.get_xlabel() for axis in figure.axes]
  assert labels == ["processor seconds of training", "steps"]
  (tokens,) = figure.axes[1].child_axes
  assert tokens.get_xlabel() == "tokens"
  for axis, x in zip(figure.axes, (2, 1), strict=True):
    ends = [line.get_xydata()[-1].tolist() for line in axis.lines]
    assert ends == [[40 * x, 5], [40, pytest.approx(11.5 / 3)]]
  (legend,) = figure.legends
  assert [text.get_text() for text in legend.texts] == ["dense", "local"]


@pytest.mark.parametrize("number", [1, 9, 30])
def test_legend_is_within_the_figure_and_beside_the_panels(number):
  names = ["Local(8) | " * 9 + f"Global({i})" for i in range(number)]
  made = comparisons.record(
    *(comparisons.run(name, 0, 3 + i / 100) for i, name in enumerate(names))
  )
  figure = results.draw(made)
  figure.draw_without_rendering()
  (legend,) = figure.legends
  assert len({text.get_text() for text in legend.texts}) == number
  box = legend.get_window_extent()
  assert box.x1 <= figure.bbox.x1 and box.y0 >= 0
  for axis in figure.axes:
    assert axis.get_window_extent().x1 < box.x0
    assert axis.get_window_extent().width > 2 * figure.dpi


def test_table_ranks_by_validation_and_shows_the_only_test():
  tested = [
    run | dict(test=dict(bits_per_dim=9.0, standard_error=0.1))
    for run in TWO[3:]
  ]
  made = comparisons.record(*TWO[:3], *tested)
  titles, best, first = results.table(made)
  cells = [dict(zip(titles, row, strict=True)) for row in (best, first)]
  assert [row["attention.pattern"] for row in cells] == ["local", "dense"]
  assert [row["test"] for row in cells] == ["9.0000 ± 0.0000", "-"]
  assert [row["minus dense"][:7] for row in cells] == ["-1.1667", "-"]
  assert "at 40 processor seconds of training" in titles
  rates = [row["tokens per processor second"] for row in cells]
  assert rates == ["64", "32"]
  assert "best on validation, local" in results.notes(made)


def test_values_of_all_seeds_and_times_to_a_target_are_in_a_table():
  made = comparisons.record(*TWO, target=5.5)
  # Bits fall by 1 every 20 processor seconds, of local every 10.
  assert [row["time_to_target"] for row in made["rows"]] == [
    [10.0, 20.0, None],
    [40.0, 60.0, None],
  ]
  titles, best, first = results.by_seed(made)
  assert titles[-1] == "processor seconds to 5.5 bits/dim, by seed"
  assert best == ("local", "2.5000", "3.0000", "6.0000", "10, 20, -")
  assert first == ("dense", "3.0000", "4.0000", "8.0000", "40, 60, -")
  assert len(results.by_seed(comparisons.record(*TWO))[0]) == 4


@pytest.mark.parametrize("best, edge", [("0.01", False), ("1e-3", True)])
def test_grid_is_shown_with_its_best_and_whether_that_is_at_an_edge(best, edge):
  scores = {"0.01": 3.0, "0.1": None, "1e-3": 3.5, best: 2.0}
  tuning = record.tuning({"dense": scores, "local": scores | {"0.1": 1.0}})
  assert tuning["best"] == {"dense": best, "local": "0.1"}
  tune = ["optimizer.learning_rate", ["0.01", "0.1", "1e-3"]]
  about = comparisons.record(*TWO, tune=tune)["about"]
  made = record.make(about, TWO, tuning)
  titles, dense, local = results.grid(made)
  assert titles[1:] == tuple(f"{tune[0]}={x}" for x in tune[1])
  assert dense[tune[1].index(best) + 1] == "[2.0000]"
  assert dense[2] == "diverged" and local[2] == "[1.0000]"
  note = results._grid_notes(made)
  assert note.endswith(": dense, local." if edge else ": local.")
  assert not record.at_edge(["adamw", "muon"], "muon")


# Several runs at the same time.


def work(folder, what):
  """The function of a task. It is found by its name in a new process."""
  if what == "fails":
    raise ValueError("why")
  if what == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
  print(what)
  if what == "waits":
    with signals.Signals() as caught:
      (folder / "waits").touch()
      while not caught.name:
        time.sleep(0.01)
    (folder / "saved").touch()
    raise signals.Stopped(caught.name)
  mine = [*os.sched_getaffinity(0)] if sys.platform == "linux" else []
  (folder / "done").write_text(json.dumps([mine, os.environ["NPROC"]]))


def tasks_of(root, *names):
  return [
    jobs.Task(name, root / name, work, (root / name, name)) for name in names
  ]


@pytest.fixture
def cpu(monkeypatch):
  """A CPU with the cores of this machine, or two if it has one."""
  cores = sorted({0, 1, *os.sched_getaffinity(0)})
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
  monkeypatch.delenv("NPROC", raising=False)
  return cores


def test_machine_is_divided_into_equal_shares(cpu, monkeypatch):
  assert jobs.shares(1, {"seconds"}) == jobs.ALONE
  half, number = len(cpu) // 2, {"NPROC": str(len(cpu))}
  first, second = jobs.shares(2, {"steps", "flops"})
  assert (first.cores, second.cores) == (cpu[:half], cpu[half : 2 * half])
  assert first.variables == second.variables == number
  # A clock ends these runs: no bits are to keep.
  assert jobs.shares(2, {"steps", "processor_seconds"})[0].variables == {}
  assert jobs.devices(first) is jobs.devices(*jobs.ALONE) is None
  with pytest.raises(ValueError, match="--jobs=2: .* seconds are not a fair"):
    jobs.shares(2, {"seconds", "steps"})
  with pytest.raises(ValueError, match=f"at most {len(cpu)}, the cores"):
    jobs.shares(len(cpu) + 1, {"steps"})
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(jax, "local_devices", lambda: [*"abcde"])
  monkeypatch.setattr(jax, "local_device_count", lambda: 5)
  monkeypatch.delenv(jobs.GPUS, raising=False)
  first, second = jobs.shares(2, {"seconds"})
  assert not first.cores and jobs.devices(second) == ("a", "b")
  assert (first.variables, second.variables) == (
    {jobs.GPUS: "0,1"},
    {jobs.GPUS: "2,3"},
  )
  monkeypatch.setenv(jobs.GPUS, "7,GPU-8,9")
  parts = [share.variables[jobs.GPUS] for share in jobs.shares(3, {"steps"})]
  assert parts == ["7", "GPU-8", "9"]
  with pytest.raises(ValueError, match="--jobs=4 must be at most 3, the GPUs"):
    jobs.shares(4, {"steps"})
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  with pytest.raises(ValueError, match="cannot share a TPU"):
    jobs.shares(2, {"steps"})


def test_failure_ends_no_other_run_and_starts_none(tmp_path, capfd):
  core = min(os.sched_getaffinity(0))
  among = [jobs.Share([core], {"NPROC": str(i)}) for i in (7, 8)]
  first, second, third = tasks_of(tmp_path, "fails", "runs", "later")
  for tasks in (first, second), (first, third):
    with pytest.raises(OSError, match="run in .*/fails failed: why; .*kept"):
      jobs.call(tasks, among[: 2 if second in tasks else 1])
  assert json.loads((tmp_path / "runs" / "done").read_text()) == [[core], "8"]
  assert capfd.readouterr().out == "fails\nruns\nfails\n"
  assert (tmp_path / "runs" / "output.txt").read_text() == "runs\n"
  assert not (tmp_path / "later" / "done").exists()


def test_killed_run_is_a_failure_like_any_other(tmp_path):
  tasks = tasks_of(tmp_path, "dies", "runs")
  with pytest.raises(OSError, match="dies failed: .*status -9, see .*output"):
    jobs.call(tasks, [jobs.Share(variables={"NPROC": "1"})] * 2)
  assert (tmp_path / "runs" / "done").exists()


def test_signal_stops_all_runs(tmp_path):
  tasks = tasks_of(tmp_path, "waits")
  tasks += [
    tasks[0]._replace(workdir=tmp_path / "b", inputs=(tmp_path / "b", "waits"))
  ]

  def interrupt():
    while not all((x.workdir / "waits").exists() for x in tasks):
      time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

  threading.Thread(target=interrupt, daemon=True).start()
  with pytest.raises(signals.Stopped, match="SIGINT in .*waits and .*/b; what"):
    jobs.call(tasks, [jobs.Share()] * 2)
  assert all((x.workdir / "saved").exists() for x in tasks)


def words(tmp_path, *more):
  settings = runs.flags_of(**{"eval.batch_size": 64})
  settings = [x for x in settings if "train.steps" not in x]
  return runs.DIGITS, *settings, f"--workdir={tmp_path / 'c'}", *more


VARY = "--vary=attention.pattern=local,Strided(8)"


def test_each_task_runs_one_value_and_the_command_collects(
  tmp_path, monkeypatch, capfd
):
  called = []

  def trained(config, workdir, split, limit):
    rate = config.optimizer.learning_rate
    called.append((config.attention.pattern, rate, config.train.seed, split))
    workdir.mkdir(parents=True, exist_ok=True)
    made = comparisons.run("local", 0, 3 + rate) | dict(unit="bits/dim")
    for name in ("choice", "seed", "curve", "train", "test"):
      del made[name]
    made |= {split: made["validation"]}
    (workdir / "result.json").write_text(json.dumps(made))
    line = dict(step=1, split="validation", bits_per_dim=3.0)
    line |= dict(seconds=1.0, processor_seconds=1.0)
    (workdir / "metrics.jsonl").write_text(json.dumps(line) + "\n")

  monkeypatch.setattr(comparison_runs, "run", trained)
  monkeypatch.setattr(jobs, "call", call_here)
  line = words(tmp_path, VARY, "--budget=steps:6", "--seeds=2")
  line += ("--tune=optimizer.learning_rate=0.01,0.001",)
  for task, pattern in (1, "Strided(8)"), (0, "local"):
    del called[:]
    assert runs.command(SCRIPT, *line, f"--task={task}") == 0
    tuning = [(pattern, rate, 2, "validation") for rate in (0.01, 0.001)]
    seeds = [(pattern, 0.001, seed, "validation") for seed in (0, 1)]
    assert called == tuning + seeds
    files = {x.name for x in (tmp_path / "c").iterdir() if x.is_file()}
    assert files == {"comparison-of.json"}
  del called[:]
  assert runs.command(SCRIPT, *line) == 0
  assert called == [("local", 0.001, seed, "test") for seed in (0, 1)]
  assert "local" in (tmp_path / "c" / "comparison.md").read_text()


@pytest.mark.soak
def test_scores_are_the_same_with_jobs(tmp_path):
  for name, *more in ("alone",), ("shared", "--jobs=2"):
    line = words(tmp_path / name, VARY, "--budget=steps:6", *more)
    assert runs.command(SCRIPT, *line) == 0
  alone, shared = (
    {
      (run["choice"], run["best_step"], *run["validation"].values())
      for run in record.read(tmp_path / x / "c" / "comparison.json")["runs"]
    }
    for x in ("alone", "shared")
  )
  assert alone == shared and len(alone) == 2


def test_comparison_from_end_to_end(tmp_path, capfd, monkeypatch):
  # Of a single value, which is not tuned, as a run takes long; a soak test has
  # several.
  vary = "--vary=attention.pattern=Strided(8)"
  line = words(tmp_path, vary, "--budget=steps:6", "--target=6")
  assert runs.command(SCRIPT, *line) == 0
  root, output = tmp_path / "c", capfd.readouterr().out
  text = (root / "comparison.md").read_text()
  assert text in output
  made = record.read(root / "comparison.json")
  (row,), (run,) = made["rows"], made["runs"]
  assert run["choice"] == row["choice"] == "Strided(8)" and run["seed"] == 0
  assert 3 < run["validation"]["bits_per_dim"] < 6
  assert run["validation"]["standard_error"] > 0
  assert run["curve"]["steps"][-1] == run["best_step"] == run["steps"] == 6
  assert run["peak_bytes"] > 2**20
  assert 3 < run["test"]["bits_per_dim"] == row["test"]["mean"] < 6
  (seconds,) = row["time_to_target"]
  assert seconds > 0 and "processor seconds to 6 bits/dim" in text
  page = (root / "comparison.html").read_text()
  assert "data:image/png;base64," in page and "http" not in page
  # All runs are done: nothing is trained again, and no file changes; what says
  # so is written again if it is missing.
  before = runs.files(root)
  for name in ("comparison-of.json", "comparison.json"):
    (root / name).unlink()
  assert runs.command(SCRIPT, *line) == 0
  assert runs.files(root) == before
  # A run whose scoring was stopped is scored, and not trained again.
  workdir = root / plan.folder_name("Strided(8)") / "seed0"
  path = workdir / "result.json"
  result = json.loads(path.read_text())
  later = {name: result.pop(name) for name in ("best_step", "validation")}
  tested = result.pop("test")
  path.write_text(json.dumps(result))
  monkeypatch.setattr(loop, "train", None)
  config = config_lib.read_config(workdir)
  comparison_runs.run(config, workdir, "validation")
  assert json.loads(path.read_text()) == result | later
  comparison_runs.run(config, workdir, "test")
  assert json.loads(path.read_text())["test"] == tested
  # The folder of one comparison is not used for another.
  other = words(tmp_path, vary, "--budget=steps:7")
  assert runs.command(SCRIPT, *other) == 1
  assert "budget differ" in capfd.readouterr().err


@pytest.mark.soak
def test_comparison_resumes_with_the_missing_run(tmp_path, capfd):
  line = words(tmp_path, VARY, "--budget=processor_seconds:2", "--seeds=2")
  line += ("--config.checkpoint.every=0", "--config.eval.every=10")
  line += ("--tune=optimizer.learning_rate=1e-9,0.01",)
  line += ("--tune_budget=steps:10",)
  assert runs.command(SCRIPT, *line) == 0
  root = tmp_path / "c"
  made = record.read(root / "comparison.json")
  best, other = made["rows"]
  assert best["validation"]["mean"] < other["validation"]["mean"]
  assert best["test"] and not other["test"]
  assert {*made["equal"]} == {"steps"}
  for row in made["rows"]:
    first, second = record.of_choice(made["runs"], row["choice"])
    bits = [run["validation"]["bits_per_dim"] for run in (first, second)]
    assert row["seeds"] == 2 and bits[0] != bits[1]
    assert row["validation"]["mean"] == pytest.approx(np.mean(bits))
    # 12.7 standard errors, of two seeds.
    error = 12.706 * np.std(bits, ddof=1) / 2**0.5
    assert row["validation"]["error"] == pytest.approx(error, rel=1e-3)
    assert min(first["steps"], second["steps"]) > 1
    assert all(2 <= x["processor_seconds"] < 3 for x in (first, second))
    scores = made["tuning"]["scores"][row["choice"]]
    assert scores["0.01"] < scores["1e-9"]
    path = root / plan.folder_name(row["choice"]) / "seed0" / "config.json"
    assert json.loads(path.read_text())["optimizer"]["learning_rate"] == 0.01
  assert "# Tuning" in (root / "comparison.md").read_text()
  assert "At the edge of the grid" in (root / "comparison.html").read_text()
  missing = root / "local" / "seed1" / "result.json"
  expected = json.loads(missing.read_text())
  missing.unlink()
  others = {p: p.read_bytes() for p in root.glob("*/seed*/result.json")}
  # A run that fails is one line.
  path = missing.parent / "config.json"
  text = path.read_text()
  path.write_text("{}")
  capfd.readouterr()
  assert runs.command(SCRIPT, *line) == 1
  (error,) = capfd.readouterr().err.splitlines()
  assert "seed1 failed: " in error and "config.json" in error
  path.write_text(text)
  assert runs.command(SCRIPT, *line) == 0
  found = json.loads(missing.read_text())
  assert found["validation"] == expected["validation"]
  assert all(path.read_bytes() == text for path, text in others.items())
