"""Comparisons: plans, checks, records, processes, and one from end to end."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import comparisons, runs
from helpers.errors import refused
from scipy import stats

from configs import digits
from sparse_transformer import config as config_lib, patterns, signals
from sparse_transformer.comparison import (
  jobs,
  plan as plan_lib,
  preflight,
  record,
  run,
)
from sparse_transformer.training import loop, metrics

SCRIPT = "sparse_transformer/compare.py"
STEPS = plan_lib.Budget("steps", 20)


def of(field, values, budget=STEPS, seeds=1, root="unused", **changes):
  """The plan of a comparison of values, separated by semicolons, of digits."""
  options = {x: changes.pop(x) for x in [*changes] if "." not in x}
  return plan_lib.Comparison(
    file=runs.DIGITS.partition("=")[2],
    preset=digits.get_config(),
    config=runs.tiny(**{"attention.pattern": "dense"} | changes),
    root=pathlib.Path(root),
    vary=plan_lib.Axis(field, values.split(";")),
    budget=budget,
    seeds=range(seeds),
    **options,
  )


# Plans.


def test_values_are_separated_outside_of_brackets():
  for text, expected in {
    "model.width=16, 32": ["16", "32"],
    "attention.cycle=(0,),(1,0)": ["(0,)", "(1,0)"],
    "attention.pattern=BigBird(8, 3),local": ["BigBird(8, 3)", "local"],
    "attention.pattern=(A(4), A(8, 1)), A(9)": ["(A(4), A(8, 1))", "A(9)"],
    "attention.pattern=Local(4), A(4);dense": ["Local(4), A(4)", "dense"],
  }.items():
    field = text.partition("=")[0]
    assert plan_lib.parse_axis(text, "vary") == (field, expected)


def test_each_value_has_its_own_folder_within_the_comparison(tmp_path):
  long = "Local(4)" + " | Local(4)" * 100
  names = [".", "..", "x" * 300, "ä" * 300, long, f"{long} | dense", "1e-3"]
  for name in [*names, "Local(4), Strided(4)", "Local(4) | Strided(4)"]:
    folder = tmp_path / plan_lib.folder_name(name)
    assert not {*folder.name} & {*"/ |()"}
    folder.mkdir()  # neither too long, nor that of another
    assert folder.resolve().parent == tmp_path


def test_config_of_a_run_follows_from_its_choice_seed_and_budget():
  grid = dict(
    tune=plan_lib.Axis("model.dropout", ["0.1", "0.2"]),
  )
  grid["tune_budget"] = plan_lib.Budget("processor_seconds", 3)
  choices = "local;local with data.length=32 train.batch_size=4"
  plan = of("attention.pattern", choices, seeds=2, **grid)
  changes = {
    "optimizer.warmup_steps": 100,
    "attention.pattern": "local",
  }
  short, long = (
    plan_lib.Trial(plan, choice, "0.2", 1) for choice in plan.choices
  )
  expected = runs.tiny(**changes, **{"model.dropout": 0.2})
  expected.train.update(seed=1, steps=20)
  expected.optimizer.warmup_steps = 1

  assert short.config.to_dict() == expected.to_dict()
  expected.data.length = 32
  expected.train.batch_size = 4

  assert long.config.to_dict() == expected.to_dict()
  tuning = plan.tuning
  assert [x.config.model.dropout for x in tuning] == [0.1, 0.1, 0.2, 0.2]
  assert {x.config.train.seed for x in tuning} == {2}  # is not compared
  assert {x.config.train.steps for x in tuning} == {2**31 - 1}
  assert len({x.workdir for x in (short, long, *tuning)}) == 6

  # Warm-up is shortened, unless it is what varies.
  plan = of("optimizer.warmup_steps", "15")
  trial = plan_lib.Trial(plan, "15", seed=0)

  assert trial.config.optimizer.warmup_steps == 15


# Checks.


def test_runs_are_checked_without_computing_on_a_device():
  """On a GPU, JAX would take most of the memory that the runs need."""
  arrays = {*map(id, jax.live_arrays())}
  with jax.transfer_guard("disallow_explicit"):
    # Also more than the steps of the config, which are unused.
    timed = of(
      "optimizer.warmup_steps", "1;1000", plan_lib.Budget("seconds", 1.0)
    )
    preflight.check_runs(timed)
    # 23.2 and 24.3 keys of 64.
    alike = of("attention.pattern", "Local(30);Local(32)", equal_keys=True)
    preflight.check_runs(alike)
    assert {*map(id, jax.live_arrays())} <= arrays
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
      jnp.asarray(np.ones(3)) + 1  # the guard sees what is computed


def test_comparison_does_not_go_on_with_other_data(tmp_path):
  path = tmp_path / "text"
  changes = {
    "data.name": "bytes",
    "data.path": str(path),
    "data.length": 32,
    "data.columns": 8,
    "data.fractions": (0.5, 0.25, 0.25),
  }
  plan = of("attention.pattern", "dense;local", root=tmp_path / "c", **changes)
  path.write_bytes(b"abcd" * 256)
  preflight.begin(plan)
  preflight.begin(plan)
  path.write_bytes(b"abce" * 256)

  with refused("describes other data; use another"):
    preflight.begin(plan)


# The record, and what is made from it.


TWO = [
  comparisons.run(choice, seed, bits)
  for choice, of_seeds in (("dense", (3.0, 4.0, 8.0)), ("local", (2.5, 3.0, 6)))
  for seed, bits in enumerate(of_seeds)
]


def test_means_gaps_and_their_errors_are_over_the_seeds():
  best, first = comparisons.record(*TWO)["rows"]
  assert best["choice"] == "local"
  assert first["choice"] == "dense"
  assert first["gap"] is None
  assert first["validation"]["mean"] == 5

  samples = [3, 4, 8], [2.5, 3, 6]
  interval = stats.ttest_1samp(samples[0], 0).confidence_interval(0.95)
  error = (interval.high - interval.low) / 2

  assert first["validation"]["error"] == pytest.approx(error)
  assert best["gap"]["mean"] == pytest.approx(np.mean([-0.5, -1, -2]))

  welch = stats.ttest_ind(*samples, equal_var=False).confidence_interval(0.95)
  error = (welch.high - welch.low) / 2

  assert best["gap"]["error"] == pytest.approx(error)
  assert best["peak_bytes"] == 2**20 + 2
  assert best["processor_seconds"] == 40
  (single,) = comparisons.record(TWO[0])["rows"]
  assert single["validation"] == dict(
    mean=3,
    error=None,
  )


def test_tables_rank_and_show_seeds_tests_and_tuning(tmp_path):
  test = dict(
    bits_per_dim=9.0,
    standard_error=0.1,
  )
  tested = [run | dict(test=test) for run in TWO[3:]]
  tune = plan_lib.Axis("optimizer.learning_rate", ["1e-3", "0.01", "0.1"])
  about = comparisons.record(
    *TWO,
    tune=tune,
    words=["a  b"],
  )["about"]
  grid = dict(
    tune=tune,
  )
  plan = of("attention.pattern", "dense;local", **grid)
  scores = {
    "dense": (3.5, 2.0, None),
    "local": (4.0, 4.0, 3.0),
  }
  found = [
    bits and dict(bits_per_dim=bits)
    for pair in zip(*scores.values(), strict=True)
    for bits in pair
  ]
  grid = record.tuning(plan.tuning, found)

  assert grid["best"] == {
    "dense": "0.01",
    "local": "0.1",
  }

  made = record.make_record(about, TWO[:3] + tested, grid)
  record.write_results(tmp_path, made)
  text = (tmp_path / "comparison.md").read_text()
  written = json.loads((tmp_path / "comparison.json").read_text())

  assert written == json.loads(json.dumps(made))
  titles, *rows = record.ranking(made)
  cells = [dict(zip(titles, row, strict=True)) for row in rows]

  assert [row["attention.pattern"] for row in cells] == ["local", "dense"]
  assert [row["test"] for row in cells] == ["9.0000 ± 0.0000", "-"]
  assert [row["minus dense"][:7] for row in cells] == ["-1.1667", "-"]
  assert cells[1]["by seed"] == "3.0000, 4.0000, 8.0000"
  assert "best on validation, local" in text
  (titles, dense, local), note = record.grid(made)
  assert titles[1:] == tuple(f"{tune.field}={x}" for x in tune.values)
  assert dense[2:] == ("[2.0000]", "diverged")
  assert local[3] == "[3.0000]"
  assert note.endswith("a value beyond it may be better: local.")


def test_figure_has_a_line_for_each_value_and_a_legend_beside():
  names = ["Local(8) | " * 9 + f"Global({i})" for i in range(40)]
  bits = ((name, 0, 3 + i / 100) for i, name in enumerate(names))
  made = comparisons.record(*(comparisons.run(*x) for x in bits))
  figure = record.draw_curves(made)
  figure.draw_without_rendering()
  time, steps = figure.axes

  assert time.get_xlabel() == "processor seconds"
  assert steps.get_xlabel() == "steps of 64 tokens"
  ends = [line.get_xydata()[-1].tolist() for line in steps.lines]
  assert ends == [[40, 3 + i / 100] for i in range(40)]
  # No two look alike, in color and marker.
  looks = {(line.get_color(), line.get_marker()) for line in steps.lines}
  assert len(looks) == 40
  (legend,) = figure.legends
  assert len({text.get_text() for text in legend.texts}) == 40
  box = legend.get_window_extent()
  assert box.x1 <= figure.bbox.x1
  assert box.y0 >= 0
  for axis in figure.axes:
    assert axis.get_window_extent().x1 < box.x0
    assert axis.get_window_extent().width > 2 * figure.dpi


# Processes.


def job(root, name, program, **more):
  (root / name).mkdir(exist_ok=True)
  command = sys.executable, "-ISc", f"import os, sys, time; {program}"
  return jobs.Job(name, root / name, command, **more)


def test_machine_is_divided_into_equal_shares(monkeypatch):
  cores = [*range(5)]
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
  monkeypatch.delenv("NPROC", raising=False)

  assert jobs.divide_machine(1, {"seconds"}) == jobs.ALONE
  found = jobs.divide_machine(2, {"steps"})
  assert [x.cores for x in found] == [["0", "1"], ["2", "3"]]
  assert [x.variables for x in found] == [{"NPROC": "5"}] * 2
  # A clock ends these runs: no bits are to keep.
  timed = jobs.divide_machine(2, {"steps", "processor_seconds"})
  assert timed[0].variables == {}
  with refused("--jobs=2: .* seconds are not a fair"):
    jobs.divide_machine(2, {"seconds", "steps"})
  with refused("--jobs=6 must be at most 5, the number of"):
    jobs.divide_machine(6, {"steps"})

  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setenv(jobs.GPUS, "7,GPU-8,9")
  found = jobs.divide_machine(3, {"seconds"})

  assert [x.variables[jobs.GPUS] for x in found] == ["7", "GPU-8", "9"]
  two = jax.devices() * 2
  monkeypatch.setattr(jax, "devices", lambda *_: two)
  monkeypatch.setattr(jax, "device_count", lambda: 2)
  plan = of("attention.backend", "dense;batched", **{"mesh.data": 1})
  preflight.check_runs(plan, 2)  # as each has one of the two
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

  with refused("cannot share a TPU"):
    jobs.divide_machine(2, {"steps"})


# One fails when the other has started, which ends after that was noticed.
FAIL = """
while not os.path.exists({0!r}):
  time.sleep(0.01)
os.symlink(str(os.getpid()), {0!r} + ".failing")
sys.exit('why')
"""
OUTLAST = """
open({0!r}, 'w').close()
while not os.path.islink({0!r} + ".failing"):
  time.sleep(0.01)
pid = int(os.readlink({0!r} + ".failing"))
while os.path.exists(f"/proc/{{pid}}"):
  time.sleep(0.01)
"""


def test_failure_ends_no_other_run_and_starts_none(tmp_path, capfd):
  core = str(min(os.sched_getaffinity(0)))
  parts = [jobs.MachinePart([core], {"NPROC": str(i)}) for i in (7, 8)]
  show = "print(*os.sched_getaffinity(0), os.environ['NPROC'])"
  tasks = [
    job(tmp_path, "excused", "sys.exit(1)", is_failure=lambda: False),
    job(tmp_path, "fails", FAIL.format(str(tmp_path / "pid"))),
    job(tmp_path, "runs", OUTLAST.format(str(tmp_path / "pid")) + show),
    job(tmp_path, "later", show),
  ]
  words = "run in .*fails failed: .*status 1, see .*output.txt: why.*kept"

  with pytest.raises(OSError, match=words):
    jobs.call(tasks, parts)
  output = (tmp_path / "runs" / jobs.OUTPUT).read_text()
  assert output in (f"{core} 7\n", f"{core} 8\n")
  assert capfd.readouterr().out == "excused\nfails\nruns\n"
  # As some supervisors do.
  handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
  with pytest.raises(OSError, match="run in .*dies failed: SIGKILL .* memory"):
    jobs.call([job(tmp_path, "dies", "os.kill(os.getpid(), 9)")])

  signal.signal(signal.SIGCHLD, handler)
  (tmp_path / "dies" / jobs.OUTPUT).symlink_to(tmp_path / "mine")

  with refused("output.txt is not a regular file"):
    jobs.call([job(tmp_path, "dies", "")], parts)


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

  with pytest.raises(signals.Stopped, match="SIGTERM ended .*/a and .*/b; s"):
    jobs.call(tasks, [jobs.MachinePart()] * 2)
  assert all((x.workdir / "saved").exists() for x in tasks)


# Comparisons.


def test_run_is_trained_and_scored_in_one_process(tmp_path, capfd):
  """With the record of two commands, which can be given again."""
  workdir = tmp_path / "run"
  words = runs.DIGITS, f"--workdir={workdir}", *runs.flags_of()
  start = run.__file__, runs.REPO / "train.py"
  done = runs.python(*start, *words)

  assert done.returncode == 0, done.stderr
  path = workdir / "evaluations" / "validation-step4-context0-ema.json"
  made = json.loads(path.read_text())
  asked = "--split=validation", "--step=best"
  (again,) = runs.scores(capfd, workdir, *asked)

  assert all(made[x] == again[x] for x in again.keys() - {"command"})
  which = "--split=validation --step=4 --min_context=0"
  assert made["command"] == (
    f"python {runs.REPO / 'eval.py'} {words[0]} {words[1]} {which}"
  )
  about = (workdir / "checkpoints/4/about/metadata").read_text()
  assert f"python {start[1]} {words[0]} {words[1]} " in about
  # What fails is said in one line, by the command that it would be.
  shutil.rmtree(path.parent)
  path.parent.touch()
  done = runs.python(*start, *words)

  assert done.returncode == 1
  assert done.stderr.count("\n") == 1
  assert done.stderr.startswith("eval.py: the score cannot be written: ")
  done = runs.python(*start, *words, "--config.train.step=9")
  assert done.returncode == 1
  assert "eval" not in done.stderr
  assert done.stderr.startswith("train.py: the config has no field")


def pretend(scores, called):
  """`jobs.call` that writes what runs would, with bits by values in words."""

  def call(tasks, parts):
    for task in tasks:
      assert len(parts) == 1
      script, *words = task.command[1:]
      flags = (word[2:].split("=", 1) for word in words if word[:2] == "--")
      words = dict(flags)
      bits = scores[task.label.split(", seed")[0]]
      called.append(task.label)
      about = dict(
        min_context=0,
        weights="ema",
        dtype="float32",
        step=6,
        standard_error=0.1,
        unit="bits/dim",
        bits_per_dim=bits,
      )
      scored = about | dict(split=words.get("split", "validation"))
      files = {f"evaluations/{scored['split']}.json": json.dumps(scored)}
      if script == run.__file__:
        split = "end" if bits else "diverged"
        line = dict(
          step=6,
          split="validation",
          bits_per_dim=bits or 9.0,
          seconds=1.0,
          processor_seconds=1.0,
        )
        lines = line, dict(step=6, split=split, peak_bytes=2**20)
        # As of a user who looked at it when the best step was another one.
        early = about | dict(
          split="validation",
          step=3,
          bits_per_dim=1.0,
        )
        files = files if bits else {}
        about_step = '{"validation": 9, "commit": "c0"}'
        listed = {"about/metadata": zlib.crc32(about_step.encode())}
        files |= {
          "metrics.jsonl": "".join(f"{json.dumps(x)}\n" for x in lines),
          "evaluations/early.json": json.dumps(early),
          "checkpoints/6/files.json": json.dumps(listed),
          "checkpoints/6/about/metadata": about_step,
        }
      for name, text in files.items():
        path = task.workdir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
      assert bits or not task.is_failure()

  return call


def words(root, *more):
  """The command line of a comparison of two patterns, on a tiny network."""
  settings = runs.flags_of(**{"eval.batch_size": 64})
  vary = "--vary=attention.pattern=local,Strided(8)", "--budget=steps:6"

  def name(word):
    return word.partition("=")[0]

  given = {name(word): word for word in (*settings, *vary, *more)}
  return runs.DIGITS, f"--workdir={root / 'c'}", *given.values()


def test_values_are_tuned_and_trained_and_only_the_best_is_tested(
  tmp_path, monkeypatch, capfd
):
  names = [f"attention.pattern={x}" for x in ("local", "Strided(8)")]
  rate = "optimizer.learning_rate"
  found = (3.0, 2.0), (1.5, None)
  scores = {
    f"{x}, {rate}={y}": bits
    for x, of_x in zip(names, found, strict=True)
    for y, bits in zip(("0.01", "0.1"), of_x, strict=True)
  }
  called = []
  monkeypatch.setattr(jobs, "call", pretend(scores, called))
  line = *words(tmp_path, "--seeds=2"), f"--tune={rate}=0.01,0.1"
  assert runs.command(SCRIPT, *line) == 0
  grid = [f"{x}, {rate}={y}, seed 2" for y in ("0.01", "0.1") for x in names]
  chosen = [f"{names[0]}, {rate}=0.1", f"{names[1]}, {rate}=0.01"]
  final = [f"{x}, seed {seed}" for seed in (0, 1) for x in chosen]
  expected = grid + final
  tests = [f"{chosen[1]}, seed {x}: test" for x in (0, 1)]

  assert called == expected + tests
  path = tmp_path / "c/local/seed0/evaluations/validation.json"
  others = path.read_text().replace("validation", "test")  # asked for by hand
  path.with_name("test.json").write_text(others)
  assert runs.command(SCRIPT, *line) == 0

  assert called == expected + tests  # nothing is done twice
  made = json.loads((tmp_path / "c" / "comparison.json").read_text())
  assert [row["choice"] for row in made["rows"]] == ["Strided(8)", "local"]
  assert made["rows"][0]["test"]
  assert not made["rows"][1]["test"]
  assert made["tuning"]["scores"]["Strided(8)"] == {
    "0.01": 1.5,
    "0.1": None,
  }
  assert made["about"]["commit"] == "c0"  # not of what makes the record
  # The folder of one comparison is not used for another.
  capfd.readouterr()
  assert runs.command(SCRIPT, *line, "--first_seed=3") == 1
  assert "describes another comparison; use" in capfd.readouterr().err

  # A value that no candidate trains ends the comparison.
  monkeypatch.setattr(jobs, "call", pretend(dict.fromkeys(scores), []))
  (tmp_path / "c").rename(tmp_path / "before")

  assert runs.command(SCRIPT, *line) == 1
  assert "diverged with every value of --tune" in capfd.readouterr().err


CONFIG = """
import dataclasses
from configs import digits
from sparse_transformer import patterns

@patterns.register
@dataclasses.dataclass(frozen=True)
class Rake(patterns.Pattern):
  step: int

  def mask(self, q, k):
    return (k <= q) & (k % self.step == 0) | (k == q)

def on_metrics(step, split, values):
  with open({hook!r}, "a") as file:
    print(step, split, file=file)

get_config = digits.get_config
"""


def below(root):
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
      found.append(path.read_bytes().decode().split("\0"))
  return [x for x in found if any(f"={root}/" in word for word in x[1:])]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two jobs")
@pytest.mark.soak
@pytest.mark.parametrize("values", ["Rake(4)", "local;Rake(4)"])
def test_killed_comparison_leaves_no_run_and_resumes_with_the_same_scores(
  values, tmp_path, capfd, request
):
  """Of a pattern that its config file registers, as all of this takes long."""
  request.addfinalizer(lambda: patterns.CATALOGUE.pop("Rake", None))
  root = tmp_path / "c"
  hook = tmp_path / "hook"
  file = tmp_path / "mine.py"
  file.write_text(CONFIG.format(hook=str(hook)))
  more = f"--vary=attention.pattern={values}", "--config.checkpoint.every=1"
  line = [f"--config={file}", *words(tmp_path, *more, "--jobs=2")[1:]]
  folders = [root / f"{x}/seed0" for x in ("local", "Rake_4-c752c6b1")]
  folders = folders[-1 - values.count(";") :]
  command = sys.executable, "-m", "sparse_transformer.compare", *line
  first = subprocess.Popen(
    command,
    cwd=runs.REPO,
    process_group=0,
  )
  while not all((x / "checkpoints").exists() for x in folders):
    assert first.poll() is None
    time.sleep(0.01)
  first.kill()
  first.wait()
  while below(root):  # they end with it
    time.sleep(0.01)

  assert not (root / "comparison.json").exists()
  capfd.readouterr()
  assert runs.command(SCRIPT, *line) == 0

  assert (root / "comparison.md").read_text() in capfd.readouterr().out
  made = json.loads((root / "comparison.json").read_text())
  rake = record.of_choice(made["runs"], "Rake(4)")[0]

  assert rake["curve"]["steps"][-1] == rake["best_step"] == rake["steps"] == 6
  assert 3 < rake["validation"]["bits_per_dim"] < 6
  best, *others = made["rows"]
  assert best["test"]
  assert not any(x["test"] for x in others)
  assert hook.read_text().count("6 end") == len(folders)

  # The same as of a run that was not stopped, in another process.
  loop.train(config_lib.read_config(folders[-1]), tmp_path / "whole")
  whole = runs.without_speed(tmp_path / "whole")

  assert whole == runs.without_speed(folders[-1])


@pytest.mark.soak
def test_scores_are_the_same_with_jobs_and_a_time_ends_runs(tmp_path):
  def made(name, *more):
    assert runs.command(SCRIPT, *words(tmp_path / name, *more)) == 0
    return json.loads((tmp_path / name / "c/comparison.json").read_text())

  def scores(made):
    return [x["validation"] for x in made["runs"]]

  assert scores(made("alone")) == scores(made("shared", "--jobs=2"))
  timed = made(
    "timed",
    *("--budget=processor_seconds:2", "--seeds=2", "--tune_budget=steps:10"),
    *("--config.checkpoint.every=0", "--config.eval.every=10"),
    "--tune=optimizer.learning_rate=1e-9,0.01",
  )

  assert {*timed["tuning"]["best"].values()} == {"0.01"}
  # The last step is the one in which the time is over. A step's line is written
  # a moment after the clock was read.
  for one in timed["runs"]:
    choice = plan_lib.folder_name(one["choice"])
    folder = tmp_path / "timed" / "c" / choice / f"seed{one['seed']}"
    lines = [x for x in metrics.read(folder) if x["split"] == "train"]
    times = [x["processor_seconds"] for x in lines]
    assert len(times) == one["steps"]
    assert times[-1] >= 2
    assert all(x <= 2 for x in times[:-2])


def test_choices_that_are_blind_to_a_symbol_are_named():
  runs = []
  for choice, seen in ("dense", 1.0), ("local", 0.0), ("column", 0.5):
    run = comparisons.run(
      choice, seed=0, bits=2.0, sees={"the byte above": seen}
    )
    runs.append(run)
  made = comparisons.record(*runs)

  titles, *rows = record.ranking(made)
  column = titles.index("sees the byte above")
  cells = {row[0]: row[column] for row in rows}
  assert cells == {"dense": "yes", "local": "no", "column": "50 %"}
  text = record.notes(made)
  assert "With local, no position sees the byte above. Their gap" in text

  # Where all see it, there is nothing to say.
  rivals = comparisons.record(runs[0], runs[2])
  assert "no position sees" not in record.notes(rivals)
