"""Tests of several processes: two real ones, each with its own devices."""

import json
import os
import random
import signal
import socket
import subprocess
import sys

import pytest
from helpers import runs

from sparse_transformer.training import loop
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.experiment import Experiment

STOPPED = 130
TINY = {
  "eval.every": 3,
  "mesh.data": 1,
  "mesh.fsdp": 2,
}
# Of 4 devices; each step has its own dropout and examples.
LARGER = TINY | {
  "model.dropout": 0.1,
  "train.accumulation": 2,
  "train.steps": 12,
  "mesh.sequence": 2,
}
ONE = {
  "mesh.fsdp": 1,
  "mesh.sequence": 1,
}


def start(number, workdir, port, kill=(0, 0), changes=TINY):
  """Starts one of two processes; `kill` is (signal, step)."""
  devices = changes["mesh.fsdp"] * changes.get("mesh.sequence", 1) // 2
  return subprocess.Popen(
    [
      sys.executable,
      runs.REPO / "tests" / "helpers" / "processes.py",
      *map(str, map(int, kill)),
      runs.DIGITS,
      f"--workdir={workdir}",
      *runs.flags_of(**changes),
      f"--coordinator=localhost:{port}",
      "--num_processes=2",
      f"--process_id={number}",
      "--heartbeat_seconds=20",
      "--connect_seconds=1200",
    ],
    cwd=runs.REPO,
    env=runs.environment(devices),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def free_port():
  with socket.socket() as server:
    server.bind(("localhost", 0))
    return server.getsockname()[1]


def ends(*started):
  """(exit status, lines on standard error) of each process."""
  found = []
  for process in started:
    _, stderr = process.communicate(timeout=1200)
    lines = [x for x in stderr.splitlines() if not x.startswith("[Gloo]")]
    found.append((process.returncode, lines))
  return found


def statuses(ended):
  return [status for status, _ in ended]


def train_both(workdir, kill=(0, 0), victim=1, changes=TINY):
  port = free_port()
  kills = [(0, 0), (0, 0)]
  kills[victim] = kill
  first = start(0, workdir, port, kill=kills[0], changes=changes)
  second = start(1, workdir, port, kill=kills[1], changes=changes)
  return ends(first, second)


def last_arrays(workdir):
  experiment = Experiment(runs.tiny(**LARGER | ONE))
  return runs.arrays(store.Saved(workdir).restore(experiment.like))


def assert_alike(workdir, other):
  """Compares the metrics of two runs, which have each line once."""
  lines, expected = map(runs.without_speed, (workdir, other))
  for line, same in zip(lines, expected, strict=True):
    assert line.pop("split") == same.pop("split")
    assert line == pytest.approx(
      same,
      rel=1e-4,
      abs=1e-5,
    )


def test_two_processes_stop_together_and_one_resumes(
  tmp_path, shared_experiments
):
  two = tmp_path / "two"
  one = tmp_path / "one"
  changes = TINY | {"eval.every": 0}
  stopped = train_both(two, (signal.SIGTERM, 2), changes=changes)
  (first, said), (second, also) = stopped

  assert (first, second) == (STOPPED, STOPPED), (said, also)
  step = store.Saved(two).steps()[-1]
  assert 2 <= step <= 3  # the signal is known one step later
  line = (
    f"train.py: stopped: SIGTERM at step {step}, which is saved; run the same"
    " command again to resume"
  )

  assert said[-1] == also[-1] == line
  for workdir in (two, one):
    loop.train(runs.tiny(**changes | ONE), workdir)

  assert_alike(two, one)


# Slow: many processes.


@pytest.mark.soak
@pytest.mark.parametrize(
  "field, words",
  [
    ("train.seed", "train.seed is 0 in process 0, but 1 in process 1"),
    ("data.path", "data ("),
  ],
)
def test_processes_that_differ_are_rejected(field, words, tmp_path):
  common = {
    "data.name": "bytes",
    "data.length": 32,
    "data.columns": 8,
  }
  port = free_port()
  workdir = tmp_path / "run"
  started = []
  for i in range(2):
    path = tmp_path / f"text{i if field == 'data.path' else 0}"
    path.write_bytes(bytes(range(100)) * 50 + path.name.encode())
    changes = {"data.path": str(path)}
    if field == "train.seed":
      changes |= {"train.seed": i}
    changes = TINY | common | changes
    started.append(start(i, workdir, port, changes=changes))

  (first, lines), (second, nothing) = ends(*started)

  assert first == 1
  assert second == 1
  assert any(words in line for line in lines), lines
  assert not (workdir / "metrics.jsonl").exists()


@pytest.mark.soak
def test_killed_runs_end_as_the_uncut_one(tmp_path):
  uncut = tmp_path / "uncut"
  cut = tmp_path / "cut"
  assert statuses(train_both(uncut, changes=LARGER)) == [0, 0]
  rng = random.Random(0)
  for _ in range(5):
    victim = rng.randrange(2)
    step = rng.randrange(1, 6)
    found = statuses(train_both(cut, (signal.SIGKILL, step), victim, LARGER))
    assert found[victim] in (-signal.SIGKILL, 0)
    if found[victim]:
      assert found[1 - victim] != 0

  assert statuses(train_both(cut, changes=LARGER)) == [0, 0]
  assert last_arrays(cut) == last_arrays(uncut)
  assert runs.without_speed(cut) == runs.without_speed(uncut)


@pytest.mark.soak
def test_two_processes_resume_what_one_saved_and_back(tmp_path):
  two = tmp_path / "two"
  one = tmp_path / "one"
  stopped = train_both(two, (signal.SIGTERM, 3), 0, LARGER)
  assert statuses(stopped) == [STOPPED, STOPPED]

  # Damage of the last checkpoint is seen by both.
  step = store.Saved(two).steps()[-1]
  last = two / "checkpoints" / str(step)
  listed = json.loads((last / "files.json").read_text())
  largest = max((last / name for name in listed), key=os.path.getsize)
  largest.write_bytes(largest.read_bytes()[:-1] + b"?")
  stopped = train_both(two, (signal.SIGINT, 2), changes=LARGER)
  assert statuses(stopped) == [STOPPED, STOPPED]
  (_, lines), _ = stopped
  assert any("damaged" in line for line in lines)

  for workdir in (two, one):
    loop.train(runs.tiny(**LARGER | ONE), workdir)
  assert_alike(two, one)
