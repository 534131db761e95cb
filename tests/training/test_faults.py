"""Faults: signals, damage, full disks, non-finite numbers, other data.

With real processes, signals and files; `make soak` runs the longer tests.
"""

import contextlib
import errno
import fcntl
import gc
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import runs
from helpers.cases import soak
from helpers.errors import refused

from sparse_transformer import config as config_lib, data, signals
from sparse_transformer.training import (
  loop,
  metrics,
  step as step_lib,
  workdir as workdir_lib,
)
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.experiment import Experiment, open_run

SETTINGS = {
  "model.dropout": 0.2,
  "train.accumulation": 2,
  "train.steps": 24,
  "train.log_every": 2,
  "eval.every": 4,
  "eval.sequences": 16,
  "checkpoint.every": 3,
  "checkpoint.keep": 3,
}
CONTENT = {
  "attention.pattern": runs.CONTENT,
  "model.num_layers": 2,
  "model.experts": 4,
}
ORDERS = {"data.orders": ("rotation", "jigsaw")}
pytestmark = pytest.mark.usefixtures("shared_experiments")

# What a run prints if nothing is wrong.
EXPECTED = (
  r"resumes from step \d|step +\d+  (train|valid)|attention by|compil"
  r"|model\.remat="
  r"|best validation|[\d,]+ parameters; "
)


def words(workdir, **changes):
  """The command line of a tiny run."""
  settings = runs.flags_of(**SETTINGS | changes)
  return [runs.DIGITS, *settings, f"--workdir={workdir}"]


def start(script, *line, **environment):
  """Starts a command in its own process."""
  settings = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(runs.REPO),
  }
  return subprocess.Popen(
    [sys.executable, runs.REPO / script, *line],
    cwd=runs.REPO,
    env=os.environ | settings | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def of_split(workdir, split):
  return [line for line in metrics.read(workdir) if line["split"] == split]


def last_state(workdir):
  return runs.arrays(open_run(workdir).restore())


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shared_experiments):
  """The workdir of a run without faults."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  loop.train(runs.tiny(**SETTINGS), workdir)
  return workdir


@pytest.fixture
def copy(whole, tmp_path):
  """A copy of it that a test may change."""
  return shutil.copytree(whole, tmp_path / "copy")


def assert_resumes_exactly(workdir, whole, **changes):
  """Checks that a resumed run ends like one without faults."""
  loop.train(runs.tiny(**SETTINGS | changes), workdir)
  assert runs.without_speed(workdir) == runs.without_speed(whole)
  assert last_state(workdir) == last_state(whole)


# Signals.


@pytest.mark.parametrize(
  "kills, changes",
  [
    (1, {}),
    soak(10, {}),
    soak(10, CONTENT),
    soak(10, ORDERS),
  ],
)
def test_killed_run_resumes_exactly(kills, changes, whole, tmp_path):
  rng = random.Random(kills)
  workdir = tmp_path / "run"
  if changes:
    whole = tmp_path / "whole"
    loop.train(runs.tiny(**SETTINGS | changes), whole)
  # Many saves; each deletes an earlier checkpoint.
  line = words(workdir, **changes | {"checkpoint.every": 1})
  for _ in range(kills):
    process = start("train.py", *line)
    # A moment during steps, saves or evaluation: after some lines and time.
    for _ in zip(range(rng.randrange(3, 7)), process.stdout, strict=False):
      pass
    time.sleep(rng.random() * 0.3)
    process.kill()
    *lines, _ = process.communicate()[0].split("\n")
    for line in lines:  # no warnings
      assert re.match(EXPECTED, line), line

  assert_resumes_exactly(workdir, whole, **changes)
  # To start a complete run again changes nothing.
  before = runs.files(workdir / "checkpoints")
  assert_resumes_exactly(workdir, whole, **changes)
  assert runs.files(workdir / "checkpoints") == before


# During compilation, a step, a save and evaluation.
@pytest.mark.parametrize("line", [None, "  2", "  6  train", " 12  train"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.soak
def test_signal_saves_and_the_run_resumes_exactly(
  line, number, whole, tmp_path
):
  workdir = tmp_path / "run"
  process = start("train.py", *words(workdir))
  if line:
    text = f"step     {line}"
    assert any(text in x for x in process.stdout), f"{text!r} not printed"
  else:
    lock = workdir / "lock"
    while not (lock.exists() and lock.read_text()):
      time.sleep(0.01)
    time.sleep(0.2)

  process.send_signal(number)
  output, _ = process.communicate()

  assert process.returncode == 130, output
  last = output.strip().splitlines()[-1]
  stopped = f"train.py: stopped: {signal.Signals(number).name}"
  steps = store.Saved(workdir).steps()
  assert f"{stopped} at step {steps[-1]}, which is saved" in last
  assert_resumes_exactly(workdir, whole)


ON_TERMINAL = """
import fcntl, runpy, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
runpy.run_path("train.py", run_name="__main__")
"""


def test_workdir_is_locked_until_a_closed_terminal_ends_its_run(
  whole, tmp_path
):
  program = tmp_path / "on_terminal.py"
  workdir = tmp_path / "run"
  program.write_text(ON_TERMINAL)
  terminal, other = pty.openpty()
  process = subprocess.Popen(
    [sys.executable, program, *words(workdir)],
    cwd=runs.REPO,
    env=os.environ | {"PYTHONPATH": str(runs.REPO)},
    stdin=other,
    stdout=other,
    stderr=other,
    start_new_session=True,
  )
  os.close(other)
  shown = b""
  while b"step       6  train" not in shown:
    shown += os.read(terminal, 1000)
  process.send_signal(signal.SIGSTOP)
  in_use = f"in use by process {process.pid} on "

  with refused(in_use), workdir_lib.hold(workdir):
    pass

  process.send_signal(signal.SIGCONT)
  os.close(terminal)  # the system sends SIGHUP, and so may a shell
  process.send_signal(signal.SIGHUP)

  assert process.wait() == 130
  assert_resumes_exactly(workdir, whole)


def lock_that_fails(number):
  def flock(*_):
    raise OSError(number, "why")

  return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_disk_without_locks_is_used_with_a_warning(
  number, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(fcntl, "flock", lock_that_fails(number))
  with workdir_lib.hold(tmp_path):
    pass
  warning = "warning: .*/lock cannot be locked .*why"
  assert re.match(warning, capsys.readouterr().err)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EAGAIN])
def test_lock_of_another_process_is_an_error(number, tmp_path, monkeypatch):
  monkeypatch.setattr(fcntl, "flock", lock_that_fails(number))
  with refused("is in use by ano"), workdir_lib.hold(tmp_path):
    pass


@pytest.mark.parametrize(
  "line",
  [
    ["eval.py", "--split=train", "--config.eval.batch_size=1"],
    ["sparse_transformer/sample.py", "--num=2000"],
  ],
)
def test_signal_ends_evaluation_and_sampling(line, whole, monkeypatch, capfd):
  enter = signals.Signals.__enter__

  def catch_one(self):
    enter(self)
    os.kill(os.getpid(), signal.SIGTERM)
    return self

  monkeypatch.setattr(signals.Signals, "__enter__", catch_one)
  before = runs.files(whole)

  assert runs.command(*line, f"--workdir={whole}") == 130
  *_, last = capfd.readouterr().err.splitlines()
  assert "stopped: SIGTERM" in last
  assert runs.files(whole) == before


# Damage.


def test_run_resumes_exactly_from_before_damage_or_from_the_start(
  copy, whole, capsys
):
  saved = sorted((copy / "checkpoints").iterdir())
  for damaged in (saved[-1:], saved):
    for step in damaged:
      for file in (step / "state").rglob("*"):
        if file.is_file():
          file.write_bytes(b"")
    assert_resumes_exactly(copy, whole)
    reported = capsys.readouterr().err
    assert reported.count("cannot be used: damaged") == len(damaged)


def test_checkpoint_describes_its_run(whole):
  about = json.loads((whole / "checkpoints/24/about/metadata").read_text())
  assert about["config"]["train"]["steps"] == 24
  assert about["versions"]["jax"] == jax.__version__
  assert about["data"] == Experiment(runs.tiny()).source.digest()


# Non-finite numbers.


@pytest.fixture
def spoil(monkeypatch):
  """Puts symbols that do not exist into the batches of some steps."""
  plain = Experiment.batch

  def spoil(*steps):
    def batch(self, updates):
      found = plain(self, updates)
      return jnp.full_like(found, 200) if updates + 1 in steps else found

    monkeypatch.setattr(Experiment, "batch", batch)
    return monkeypatch

  return spoil


def test_bad_batch_stops_the_run_which_resumes_exactly_without_it(
  whole, tmp_path, spoil
):
  patch = spoil(5)
  with pytest.raises(FloatingPointError) as error:
    loop.train(runs.tiny(**SETTINGS), tmp_path)
  text = str(error.value)
  assert "nats is nan at step 5" in text
  examples = data.batches(range(1397), 8, 0)[4].tolist()
  assert ", ".join(map(str, examples)) in text
  assert store.Saved(tmp_path).steps()[-1] == 3
  patch.undo()
  assert_resumes_exactly(tmp_path, whole)


@pytest.mark.parametrize("metric", ["nats", soak("gradient_norm")])
def test_nonfinite_step_leaves_the_state_unchanged(metric, spoil, monkeypatch):
  plain = step_lib.position_losses

  def losses(logits_BLV, tokens_BL):
    # The loss stays the same; its gradient, as of sqrt at 0, is non-finite.
    first = logits_BLV[:, :1, 0]
    return plain(logits_BLV, tokens_BL) + 0 * jnp.sqrt(first - first)

  if metric == "nats":
    spoil(1)
  else:
    monkeypatch.setattr(step_lib, "position_losses", losses)

  experiment = Experiment(runs.tiny(**SETTINGS))
  state = experiment.first_state()
  given = experiment.first_state()
  with jax.set_mesh(experiment.mesh):
    new, measured = experiment.update(given, experiment.batch(0))

  assert np.isnan(measured[metric])
  assert int(new.step) == 1
  assert metric == "nats" or np.isfinite(measured["nats"])
  for part in ("params", "opt_state", "ema"):
    assert runs.arrays(getattr(new, part)) == runs.arrays(getattr(state, part))


# Disks.


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 24 MiB."""
  folder = tmp_path / "small"
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder]
  if subprocess.run(mount, capture_output=True).returncode:
    pytest.skip("may not mount a file system here")
  yield folder
  subprocess.run(["umount", "-l", folder], check=True)


def fill(folder, leave=0):
  """Fills a file system, except for some bytes."""
  # Unbuffered: otherwise closing the file would try to write the rest.
  with (folder / "filler").open("wb", buffering=0) as file:
    with contextlib.suppress(OSError):
      while True:
        file.write(bytes(2**14))
    file.truncate(file.tell() - leave)


# Orbax leaves coroutines unfinished.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_full_disk_stops_the_run_and_keeps_the_last_checkpoint(
  whole, small_disk
):
  workdir = shutil.copytree(whole, small_disk / "run")
  shutil.rmtree(workdir / "checkpoints" / "24")
  fill(small_disk, leave=2**17)

  with pytest.raises(OSError) as error:
    loop.train(runs.tiny(**SETTINGS), workdir)
  line = ".*(RESOURCE_EXHAUSTED|No space left).*"
  assert re.fullmatch(line, str(error.value))
  assert store.Saved(workdir).steps()[-1] == 21
  (small_disk / "filler").unlink()
  assert_resumes_exactly(workdir, whole)
  del error
  gc.collect()  # what Orbax left unfinished, here rather than in a later test


def test_unwritable_checkpoints_end_a_run(tmp_path):
  """Before the first step."""
  folder = tmp_path / "run" / "checkpoints"
  folder.parent.mkdir()
  folder.write_text("")

  with pytest.raises(OSError) as error:
    loop.train(runs.tiny(**SETTINGS), tmp_path / "run")
  text = str(error.value)
  assert f"a checkpoint could not be written to {folder}: " in text
  assert text.endswith("; saved steps: []")
  assert "\n" not in text
  assert not (tmp_path / "run" / "metrics.jsonl").exists()


# Inputs.


def test_other_data_are_an_error(tmp_path):
  path = tmp_path / "text"
  workdir = tmp_path / "run"
  path.write_bytes(b"some text " * 50)
  config = runs.text(path, **{"train.steps": 0})
  loop.train(config, workdir)
  path.write_bytes(b"same size " * 50)
  before = runs.files(workdir / "checkpoints")

  with refused("was trained on other data"):
    loop.train(config, workdir)

  assert runs.files(workdir / "checkpoints") == before


def test_same_data_in_other_splits_are_an_error(tmp_path):
  folder = tmp_path / "text"
  workdir = tmp_path / "run"
  texts = dict(
    train=b"a" * 90,
    val=b"b" * 40,
    test=b"c" * 40,
  )
  for name, text in texts.items():
    (folder / name).mkdir(parents=True)
    (folder / name / "0").write_bytes(text)
    (folder / name / "1").write_bytes(text)

  config = runs.text(folder, **{"train.steps": 0})
  loop.train(config, workdir)
  digest = Experiment(config).source.digest()
  assert digest["splits"] == [180, 80, 80]
  store.Saved(workdir).check_data(0, digest)

  (folder / "train" / "1").replace(folder / "val" / "-")
  with refused(r"\[180, 80, 80\].*\[90, 170, 80\]"):
    loop.train(config, workdir)


def test_config_is_compared_with_that_of_the_last_checkpoint(copy, capsys):
  (copy / "config.json").unlink()
  before = runs.files(copy / "checkpoints")
  other = SETTINGS | {"train.seed": 1}

  with refused(r"another config: train.seed \(0 there"):
    loop.train(runs.tiny(**other), copy)

  assert runs.files(copy / "checkpoints") == before
  state = loop.train(runs.tiny(**SETTINGS), copy)
  assert int(state.step) == 24
  assert "resumes from step 24" in capsys.readouterr().out
  assert config_lib.read_config(copy).train.seed == 0


# Devices and long runs.


LONG = """
import os, sys
import jax, numpy as np
from helpers import runs
from sparse_transformer.training import loop, metrics

step, compiled, seen = 0, [], []
watch = metrics.Monitor.watch

def listen(name, *_, **__):
  if "backend_compile" in name:
    compiled.append(step)

def measure(self, done, measured):
  global step
  step = done
  if done % 500 == 250:
    with open("/proc/self/statm") as file:
      resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    seen.append((resident, len(os.listdir("/proc/self/fd"))))
  return watch(self, done, measured)

jax.monitoring.register_event_duration_secs_listener(listen)
metrics.Monitor.watch = measure
loop.train(runs.tiny(**{
  "train.steps": 20_000, "train.log_every": 100,
  "eval.every": 1000, "checkpoint.every": 1000,
}), sys.argv[1])
# The first saves and validations fill caches that the next ones reuse.
before, after = (np.median(part, 0) for part in (seen[18:22], seen[-4:]))
print("memory and open files at step 10,000 and 19,000:", before, after)
assert after[0] <= 1.02 * before[0]
assert after[1] <= before[1]
# The start, the first step, and the first validation.
assert set(compiled) <= {0, 1000}, compiled
"""


@pytest.mark.soak
def test_long_run_needs_no_more_memory_files_or_compilations(tmp_path, capfd):
  program = tmp_path / "long.py"
  program.write_text(LONG)
  # A cache of compiled programs would hide compilations.
  process = start(
    program,
    tmp_path / "run",
    PYTHONPATH=os.pathsep.join(map(str, (runs.REPO, runs.REPO / "tests"))),
    JAX_ENABLE_COMPILATION_CACHE="false",
  )
  output, _ = process.communicate()

  assert process.returncode == 0, output[-2000:]
  with capfd.disabled():
    print("\n" + output.splitlines()[-1])
