"""Comparisons: plans, checks, records, processes, and one from end to end."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
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

from configs import digits
from sparse_transformer import config as config_lib, patterns, signals
from sparse_transformer.comparison import (
  jobs,
  plan as plan_lib,
  preflight,
  record,
  results,
  trials,
)
from sparse_transformer.training import loop
from sparse_transformer.training.experiment import Experiment

SCRIPT = "sparse_transformer/compare.py"
STEPS = ("steps", 20)


def of(field, values, budget=STEPS, seeds=1, root="unused", **changes):
  """The plan of a comparison of values, separated by semicolons, of digits."""
  more = {x: changes.pop(x) for x in [*changes] if "." not in x}
  config = runs.tiny(**{"attention.pattern": "dense"} | changes)
  what = runs.DIGITS.partition("=")[2], digits.get_config(), config
  what += pathlib.Path(root), field, values.split(";"), budget, range(seeds)
  return plan_lib.Comparison(*what, **more)


# Plans.


@pytest.mark.parametrize(
  "text, expected",
  [
    ("attention.pattern=dense", ["dense"]),
    ("model.width=16, 32", ["16", "32"]),
    ("attention.cycle=(0,),(1,0)", ["(0,)", "(1,0)"]),
    ("attention.pattern=BigBird(8, 3),local", ["BigBird(8, 3)", "local"]),
    ("attention.pattern=Local(4), A(4);dense", ["Local(4), A(4)", "dense"]),
  ],
)
def test_values_are_separated_outside_of_brackets(text, expected):
  field = text.partition("=")[0]
  assert plan_lib.parse_vary(text, runs.tiny()) == (field, expected)


def test_each_value_has_its_own_folder_within_the_comparison(tmp_path):
  long = "Local(4)" + " | Local(4)" * 100
  names = [".", "..", "x" * 300, "x" * 301, "ä" * 300, long, f"{long} | dense"]
  names += ["dense", "Local(4), Strided(4)", "Local(4) | Strided(4)", "1e-3"]
  for name in names:
    folder = tmp_path / plan_lib.folder_name(name)
    assert not {*folder.name} & {*"/ |()"}
    folder.mkdir()  # neither too long, nor that of another
    assert folder.resolve().parent == tmp_path


def test_config_of_a_run_follows_from_its_choice_seed_and_budget():
  grid = dict(tuned="model.dropout", candidates=["0.1", "0.2"])
  grid["tune_budget"] = ("processor_seconds", 3)
  choices = "local;local with data.length=32 train.batch_size=4"
  plan = of("attention.pattern", choices, seeds=2, **grid)
  changes = {"optimizer.warmup_steps": 100, "attention.pattern": "local"}
  short, long = (
    plan_lib.Trial(plan, choice, "0.2", 1) for choice in plan.choices
  )
  expected = runs.tiny(**changes, **{"model.dropout": 0.2})
  expected.train.update(seed=1, steps=20)
  expected.optimizer.warmup_steps = 1
  assert short.config.to_dict() == expected.to_dict()
  expected.data.length, expected.train.batch_size = 32, 4
  assert long.config.to_dict() == expected.to_dict()
  tuning = plan.tuning
  assert [x.config.model.dropout for x in tuning] == [0.1, 0.1, 0.2, 0.2]
  assert {x.config.train.seed for x in tuning} == {2}  # is not compared
  assert {x.config.train.steps for x in tuning} == {2**31 - 1}
  assert len({x.workdir for x in (short, long, *tuning)}) == 6
  # Warm-up is shortened unless it is what varies.
  for field, value, most in (
    ("model.width", "32", 2),
    ("optimizer.warmup_steps", "15", 15),
  ):
    plan = of(field, value, **{"optimizer.warmup_steps": 15})
    trial = plan_lib.Trial(plan, value, seed=0)
    assert trial.config.optimizer.warmup_steps == most


# Checks.


def test_checks_include_candidates_and_both_budgets():
  grid = dict(tuned="model.dropout", candidates=["0.1", "1e-1"])
  with pytest.raises(ValueError, match="dropout=0.1 and .*=1e-1 are the same"):
    preflight.check_runs(of("attention.pattern", "dense", **grid))
  grid = dict(tuned="optimizer.warmup_steps", candidates=["1", "9"])
  grid["tune_budget"] = ("steps", 5)
  with pytest.raises(ValueError, match="warmup_steps=9 must be .*steps=5"):
    preflight.check_runs(of("attention.pattern", "dense", **grid))


def test_possible_runs_pass_without_computing_on_a_device():
  """On a GPU, JAX would take most of the memory that the runs need."""
  arrays = {*map(id, jax.live_arrays())}
  with jax.transfer_guard("disallow_explicit"):
    preflight.check_runs(of("model.width", "16;32"))
    # Also more than the steps of the config, which are unused.
    timed = of("optimizer.warmup_steps", "1;1000", ("seconds", 1.0))
    preflight.check_runs(timed)
    # 23.2 and 24.3 keys of 64.
    preflight.check_runs(
      of("attention.pattern", "Local(30);Local(32)", equal="keys")
    )
    assert {*map(id, jax.live_arrays())} <= arrays
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
      jnp.asarray(np.ones(3)) + 1  # the guard sees what is computed


def test_schedule_makes_another_run_whose_flops_follow_it():
  later = "dense with attention.schedule=9:strided"
  plan = of("attention.pattern", f"dense;strided;{later}")
  preflight.check_runs(plan)
  experiments = [
    Experiment(plan_lib.Trial(plan, x, seed=0).config) for x in plan.choices
  ]
  dense, strided, both = (trials.flops(x, 20) for x in experiments)
  assert both == pytest.approx(dense * 9 / 20 + strided * 11 / 20)
  dense, _, both = (trials.keys(x, 9) for x in experiments)
  assert dense == both == 32.5
  with pytest.raises(ValueError, match="seconds:9 leaves open whether"):
    preflight.check_runs(dataclasses.replace(plan, budget=("seconds", 9)))


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


def test_bits_at_equal_amounts_are_read_off_the_curves():
  # All have trained for 40 processor seconds: dense half of its steps.
  made = comparisons.record(*TWO)
  assert made["equal"] == {"processor_seconds": 40}
  best, first = made["rows"]
  assert first["equal"]["processor_seconds"]["mean"] == 5 + 2
  assert best["equal"]["processor_seconds"]["mean"] == pytest.approx(11.5 / 3)
  # Before the first validation, bits are unknown: the fast one has ended when
  # the slow one is validated.
  late = dict(
    seconds=[40], processor_seconds=[80], bits_per_dim=[3], steps=[40]
  )
  pair = TWO[0] | dict(curve=late), TWO[3]
  assert comparisons.record(*pair)["equal"] == {}
  made = comparisons.record(*pair, budget=("seconds", 20))
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


@pytest.mark.parametrize("best, edge", [("0.01", False), ("1e-3", True)])
def test_tables_rank_and_show_seeds_tests_targets_and_tuning(
  best, edge, tmp_path
):
  test = dict(bits_per_dim=9.0, standard_error=0.1)
  tested = [run | dict(test=test) for run in TWO[3:]]
  tune = ["optimizer.learning_rate", ["0.01", "0.1", "1e-3"]]
  about = comparisons.record(*TWO, target=5.5, tune=tune)["about"]
  plan = of(
    "attention.pattern", "dense;local", tuned=tune[0], candidates=tune[1]
  )
  scores = {"0.01": 3.0, "0.1": None, "1e-3": 3.5} | {best: 2.0}
  bits = [
    scores[x.candidate] if x.choice == "dense" else len(x.candidate)
    for x in plan.tuning
  ]
  found = [x and dict(bits_per_dim=x) for x in bits]
  grid = record.tuning(plan.tuning, found)
  assert grid["best"] == {"dense": best, "local": "0.1"}
  made = record.make_record(about, TWO[:3] + tested, grid)
  text = results.write_results(tmp_path, made)
  # From what the file contains, also that of an older version.
  old = json.loads((tmp_path / "comparison.json").read_text())
  assert old == json.loads(json.dumps(made))
  del old["about"]["first_seed"], old["about"]["tune_budget"]
  old |= dict(rows=[], equal={})
  record.write_record(tmp_path / "old.json", old)
  assert record.read_record(tmp_path / "old.json") == json.loads(
    json.dumps(made)
  )
  titles, *rows = results.ranking(made)
  cells = [dict(zip(titles, row, strict=True)) for row in rows]
  assert [row["attention.pattern"] for row in cells] == ["local", "dense"]
  assert [row["test"] for row in cells] == ["9.0000 ± 0.0000", "-"]
  assert [row["minus dense"][:7] for row in cells] == ["-1.1667", "-"]
  assert "at 40 processor seconds of training" in titles
  assert [row["tokens per processor second"] for row in cells] == ["64", "32"]
  assert "best on validation, local" in text
  # Bits fall by 1 every 20 processor seconds, of local every 10.
  titles, *rows = results.by_seed(made)
  assert titles[-1] == "processor seconds to 5.5 bits/dim, by seed"
  assert rows == [
    ("local", "2.5000", "3.0000", "6.0000", "10, 20, -"),
    ("dense", "3.0000", "4.0000", "8.0000", "40, 60, -"),
  ]
  (titles, dense, local), note = results.grid(made)
  assert titles[1:] == tuple(f"{tune[0]}={x}" for x in tune[1])
  assert dense[tune[1].index(best) + 1] == "[2.0000]"
  assert dense[2] == "diverged" and local[2] == "[3.0000]"
  assert note.endswith(": dense, local." if edge else "better: local.")
  page = (tmp_path / "comparison.html").read_text()
  assert "data:image/png;base64," in page and "http" not in page


@pytest.mark.parametrize("number", [1, 9, 30])
def test_figure_has_a_line_for_each_value_and_a_legend_beside(number):
  names = ["Local(8) | " * 9 + f"Global({i})" for i in range(number)]
  made = comparisons.record(
    *(comparisons.run(name, 0, 3 + i / 100) for i, name in enumerate(names))
  )
  figure = results.draw_curves(made)
  figure.draw_without_rendering()
  time, steps = figure.axes
  assert time.get_xlabel() == "processor seconds of training"
  assert steps.get_xlabel() == "steps of 64 tokens"
  ends = [line.get_xydata()[-1].tolist() for line in steps.lines]
  assert ends == [[40, 3 + i / 100] for i in range(number)]
  (legend,) = figure.legends
  assert len({text.get_text() for text in legend.texts}) == number
  box = legend.get_window_extent()
  assert box.x1 <= figure.bbox.x1 and box.y0 >= 0
  for axis in figure.axes:
    assert axis.get_window_extent().x1 < box.x0
    assert axis.get_window_extent().width > 2 * figure.dpi


# Processes.


def job(root, name, program, **more):
  """A job that runs a program in Python, in a folder of its own."""
  (root / name).mkdir(exist_ok=True)
  command = sys.executable, "-c", f"import os, sys, time; {program}"
  return jobs.Job(name, root / name, command, root / name / "out", **more)


@pytest.fixture
def cpu(monkeypatch):
  """A CPU with the cores of this machine, or two if it has one."""
  cores = sorted({0, 1, *os.sched_getaffinity(0)})
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
  monkeypatch.delenv("NPROC", raising=False)
  return cores


def test_machine_is_divided_into_equal_shares(cpu, monkeypatch):
  assert jobs.share_machine(1, {"seconds"}) == jobs.ALONE
  half, number = len(cpu) // 2, {"NPROC": str(len(cpu))}
  first, second = jobs.share_machine(2, {"steps"})
  assert (first.cores, second.cores) == (cpu[:half], cpu[half : 2 * half])
  assert first.variables == second.variables == number
  # A clock ends these runs: no bits are to keep.
  assert (
    jobs.share_machine(2, {"steps", "processor_seconds"})[0].variables == {}
  )
  with pytest.raises(ValueError, match="--jobs=2: .* seconds are not a fair"):
    jobs.share_machine(2, {"seconds", "steps"})
  with pytest.raises(ValueError, match=f"at most {len(cpu)}, the cores"):
    jobs.share_machine(len(cpu) + 1, {"steps"})
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(jax, "local_device_count", lambda: 5)
  monkeypatch.delenv(jobs.GPUS, raising=False)
  found = jobs.share_machine(2, {"seconds"})
  assert [x.variables for x in found] == [
    {jobs.GPUS: "0,1"},
    {jobs.GPUS: "2,3"},
  ]
  monkeypatch.setenv(jobs.GPUS, "7,GPU-8,9")
  found = jobs.share_machine(3, {"steps"})
  assert [x.variables[jobs.GPUS] for x in found] == ["7", "GPU-8", "9"]
  with pytest.raises(ValueError, match="--jobs=4 must be at most 3, the GPUs"):
    jobs.share_machine(4, {"steps"})
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  with pytest.raises(ValueError, match="cannot share a TPU"):
    jobs.share_machine(2, {"steps"})


def test_failure_ends_no_other_run_and_starts_none(tmp_path, capfd):
  core = min(os.sched_getaffinity(0))
  among = [jobs.Share([core], {"NPROC": str(i)}) for i in (7, 8)]
  show = "print(*os.sched_getaffinity(0), os.environ['NPROC'])"
  tasks = [
    job(tmp_path, "excused", "sys.exit(1)", is_failure=lambda: False),
    job(tmp_path, "fails", "time.sleep(2); sys.exit('why')"),
    job(tmp_path, "dies", "os.abort()"),
    job(tmp_path, "runs", f"time.sleep(4); {show}"),
    job(tmp_path, "later", show),
  ]
  # Under a supervisor that ignores it, a process would have no status.
  handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
  words = "run in .*fails failed: .*status 1, see .*out: why"
  try:
    with pytest.raises(OSError, match=f"(?s){words}.*kept"):
      jobs.call([*tasks[:2], *tasks[3:]], among)
  finally:
    signal.signal(signal.SIGCHLD, handler)
  assert (tmp_path / "runs" / "out").read_text() in (
    f"{core} {i}\n" for i in (7, 8)
  )
  assert capfd.readouterr().out == "excused\nfails\nruns\n"
  with pytest.raises(OSError, match="run in .*dies failed: SIGABRT ended it"):
    jobs.call(tasks[2:3])


WAIT = (
  "import signal; signal.signal(15, lambda *_: sys.exit(open('saved', 'w')"
  " and 0)); os.chdir({!r}); open('waits', 'w'); time.sleep(600)"
)


def test_signal_is_forwarded_to_all_runs(tmp_path):
  tasks = [job(tmp_path, x, WAIT.format(str(tmp_path / x))) for x in "ab"]

  def interrupt():
    while not all((x.workdir / "waits").exists() for x in tasks):
      time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=interrupt, daemon=True).start()
  with pytest.raises(signals.Stopped, match="SIGTERM in .*/a and .*/b; what"):
    jobs.call(tasks, [jobs.Share()] * 2)
  assert all((x.workdir / "saved").exists() for x in tasks)


# Comparisons.


def pretend(scores, called):
  """`jobs.call` that writes what runs would, with bits by values in words."""

  def call(tasks, among):
    for task in tasks:
      assert len(among) == 1
      script, *words = task.command[1:]
      words = dict(word.lstrip("-").split("=", 1) for word in words)
      bits = scores[task.label.split(", seed")[0]]
      called.append(task.label)
      if pathlib.Path(script).name == "train.py":
        split = "end" if bits else "diverged"
        line = dict(step=6, split="validation", bits_per_dim=bits or 9.0)
        line |= dict(seconds=1.0, processor_seconds=1.0)
        lines = line, dict(step=6, split=split, peak_bytes=2**20)
        path = task.workdir / "metrics.jsonl"
        text = "".join(f"{json.dumps(x)}\n" for x in lines)
      else:
        about = dict(min_context=0, weights="ema", dtype="float32")
        about |= dict(split=words["split"], step=6, unit="bits/dim")
        path = task.workdir / "evaluations" / f"{words['split']}.json"
        text = json.dumps(about | dict(bits_per_dim=bits, standard_error=0.1))
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
      assert bits or not task.is_failure()

  return call


def words(root, *more):
  """The command line of a comparison of two patterns, on a tiny network."""
  settings = runs.flags_of(**{"eval.batch_size": 64})
  settings = [x for x in settings if "train.steps" not in x]
  vary = "--vary=attention.pattern=local,Strided(8)", "--budget=steps:6"
  return runs.DIGITS, *settings, f"--workdir={root / 'c'}", *vary, *more


def test_values_are_tuned_and_trained_and_only_the_best_is_tested(
  tmp_path, monkeypatch, capfd
):
  names = [f"attention.pattern={x}" for x in ("local", "Strided(8)")]
  rate = "optimizer.learning_rate"
  local, strided = (
    {f"{x}, {rate}={y}": bits for y, bits in of.items()}
    for x, of in zip(
      names,
      ({"0.01": 3.0, "0.1": 2.0}, {"0.01": 1.5, "0.1": None}),
      strict=True,
    )
  )
  called = []
  monkeypatch.setattr(jobs, "call", pretend(local | strided, called))
  line = *words(tmp_path, "--seeds=2"), f"--tune={rate}=0.01,0.1"
  chosen = [f"{names[0]}, {rate}=0.1", f"{names[1]}, {rate}=0.01"]
  # As an array of tasks, each with one value, and the command that collects.
  for task, of in (1, strided), (0, local):
    del called[:]
    assert runs.command(SCRIPT, *line, f"--task={task}") == 0
    grid, best = [f"{x}, seed 2" for x in of], chosen[task == 1]
    scored = [f"{x}: validation" for x in grid if of[x.rpartition(",")[0]]]
    final = [f"{best}, seed {seed}" for seed in (0, 1)]
    final += [f"{x}: validation" for x in final]
    assert called == grid + scored + final
    found = {x.name for x in (tmp_path / "c").iterdir() if x.is_file()}
    assert found == {"comparison-of.json"}
  del called[:]
  for _ in range(2):  # what is scored is not scored again
    assert runs.command(SCRIPT, *line) == 0
    assert called == [f"{chosen[1]}, seed {x}: test" for x in (0, 1)]
  made = record.read_record(tmp_path / "c" / "comparison.json")
  assert [row["choice"] for row in made["rows"]] == ["Strided(8)", "local"]
  assert made["tuning"]["scores"]["Strided(8)"] == {"0.01": 1.5, "0.1": None}
  # The folder of one comparison is not used for another.
  capfd.readouterr()
  assert runs.command(SCRIPT, *line, "--first_seed=3") == 1
  assert "another comparison: in " in capfd.readouterr().err
  # A value that no candidate trains ends the comparison.
  monkeypatch.setattr(jobs, "call", pretend(dict.fromkeys(local | strided), []))
  line = [*line, f"--workdir={tmp_path / 'd'}"]
  assert runs.command(SCRIPT, *line) == 1
  assert "diverged with every value of --tune" in capfd.readouterr().err


CONFIG = """
import dataclasses
from configs import digits
from sparse_transformer import patterns

@patterns.register
@dataclasses.dataclass(frozen=True)
class Rake(patterns.Pattern):
  "The multiples of a step, and each query."
  step: int

  def mask(self, q, k):
    return (k <= q) & (k % self.step == 0) | (k == q)

  @classmethod
  def examples(cls):
    raise NotImplementedError

def on_metrics(step, split, values):
  with open({hook!r}, "a") as file:
    print(step, split, file=file)

get_config = digits.get_config
"""


def below(root):
  """The command lines of processes that work below a folder."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
      found.append(path.read_bytes().decode().split("\0"))
  return [x for x in found if any(f"={root}/" in word for word in x[1:])]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_killed_comparison_leaves_no_run_and_resumes_with_the_same_scores(
  tmp_path, capfd, request
):
  """Of a pattern that its config file registers, as all of this takes long."""
  request.addfinalizer(lambda: patterns.CATALOGUE.pop("Rake", None))
  root, hook, file = tmp_path / "c", tmp_path / "hook", tmp_path / "mine.py"
  file.write_text(CONFIG.format(hook=str(hook)))
  values = "local;Rake(4)" if len(os.sched_getaffinity(0)) > 1 else "Rake(4)"
  line = [f"--config={file}", *words(tmp_path)[1:]]
  line += [
    f"--vary=attention.pattern={values}",
    "--config.checkpoint.every=1",
    f"--jobs={values.count(';') + 1}",
  ]
  folders = [root / "local/seed0", root / "Rake_4-c752c6b1/seed0"]
  folders = folders[-values.count(";") - 1 :]
  first = subprocess.Popen(
    [sys.executable, "-m", "sparse_transformer.compare", *line],
    cwd=runs.REPO,
    process_group=0,
  )
  while not all((x / "checkpoints").exists() for x in folders):
    assert first.poll() is None
    time.sleep(0.01)
  first.kill()
  first.wait()
  time.sleep(0.5)
  assert not below(root)
  assert not (root / "comparison.json").exists()
  capfd.readouterr()
  assert runs.command(SCRIPT, *line) == 0
  text = (root / "comparison.md").read_text()
  assert text in capfd.readouterr().out
  made = record.read_record(root / "comparison.json")
  run = record.of_choice(made["runs"], "Rake(4)")[0]
  assert run["curve"]["steps"][-1] == run["best_step"] == run["steps"] == 6
  assert 3 < run["validation"]["bits_per_dim"] < 6
  assert run["validation"]["standard_error"] > 0 and run["peak_bytes"] > 2**20
  assert [bool(row["test"]) for row in made["rows"]] == [True, False][
    : len(folders)
  ]
  assert hook.read_text().count("6 end") == len(folders)
  # The same as of a run that was not stopped, in another process.
  config = config_lib.read_config(folders[-1])
  loop.train(config, tmp_path / "whole")
  whole, mine = (
    runs.without_speed(x) for x in (tmp_path / "whole", folders[-1])
  )
  assert whole == mine
  # Nothing is done twice; what says so is written again if it is missing.
  before = runs.files(root)
  for name in ("comparison-of.json", "comparison.json"):
    (root / name).unlink()
  assert runs.command(SCRIPT, *line) == 0
  assert runs.files(root) == before


def test_missing_start_is_found_before_a_run_trains(trained, tmp_path, capfd):
  vary = f"--vary=train.init_from={trained},{tmp_path / 'nowhere.npz'}"
  line = [x for x in words(tmp_path, vary) if "=attention.pattern" not in x]
  assert runs.command(SCRIPT, *line) == 1
  assert "nowhere.npz" in capfd.readouterr().err.splitlines()[-1]
  assert not (tmp_path / "c").exists()


@pytest.mark.soak
def test_scores_are_the_same_with_jobs_and_a_time_ends_runs(tmp_path):
  for name, *more in ("alone",), ("shared", "--jobs=2"):
    assert runs.command(SCRIPT, *words(tmp_path / name, *more)) == 0
  alone, shared = (
    {
      (run["choice"], run["best_step"], *run["validation"].values())
      for run in record.read_record(tmp_path / x / "c" / "comparison.json")[
        "runs"
      ]
    }
    for x in ("alone", "shared")
  )
  assert alone == shared and len(alone) == 2
  line = words(tmp_path / "timed", "--budget=processor_seconds:2", "--seeds=2")
  line += "--config.checkpoint.every=0", "--config.eval.every=10"
  line += "--tune=optimizer.learning_rate=1e-9,0.01", "--tune_budget=steps:10"
  assert runs.command(SCRIPT, *line) == 0
  made = record.read_record(tmp_path / "timed" / "c" / "comparison.json")
  assert {*made["equal"]} == {"steps"}
  assert {*made["tuning"]["best"].values()} == {"0.01"}
  for run in made["runs"]:
    assert run["steps"] > 1 and 2 <= run["processor_seconds"] < 3
