"""Tests of what commands say while they work, and of programs they keep."""

import os
import shutil
import time

import pytest
from helpers import runs

from sparse_transformer import programs, progress


def test_work_is_shown_by_lines_without_a_terminal(monkeypatch, capsys):
  clock = iter(range(0, 1000, 20))
  monkeypatch.setattr(time, "monotonic", lambda: next(clock))
  with progress.progress("scoring", 2313, done=13) as advance:
    for _ in range(4):  # after 20, 40, 60 (since the line, 0), 80 seconds
      advance(1)
  with progress.progress("scoring", 5, silent=True) as advance:
    advance(5)
  lines = capsys.readouterr().err.splitlines()

  assert lines[0] == "scoring 15 of 2,313"
  assert len(lines) == 2


def test_lines_of_work_without_a_known_end(monkeypatch, capsys):
  """As the steps of a run are that has a budget of time."""
  monkeypatch.setattr(progress, "SECONDS", -1)
  with progress.progress("step", None, done=2) as advance:
    advance(1)
  assert capsys.readouterr().err == "step 3\n"


def test_training_scoring_and_sampling_show_how_far_they_are(
  trained, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(progress, "SECONDS", -1)
  run = shutil.copytree(trained, tmp_path / "run")
  words = f"--workdir={run}", "--config.eval.batch_size=100"
  assert runs.command("eval.py", *words) == 0
  out, err = capsys.readouterr()

  assert "scoring 100 of 200\nscoring 200 of 200\n" in err
  assert out.startswith("{")
  assert len(out.splitlines()) == 1
  assert runs.command("sparse_transformer/sample.py", words[0], "--num=1") == 0
  assert "position 32 of 64\n" in capsys.readouterr().err
  flags = runs.flags_of(
    **{
      "train.steps": 2,
      "train.log_every": 2,
    }
  )
  word = f"--workdir={tmp_path / 'new'}"
  assert runs.command("train.py", runs.DIGITS, word, *flags) == 0
  out, err = capsys.readouterr()

  assert "step 1 of 2\n" in err
  assert "step       1  train       bits" in out


@pytest.fixture
def home(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.delenv(programs.DIRECTORY)
  return tmp_path / "cache" / "sparse_transformer"


def test_programs_are_kept_where_a_user_wants_them(home, monkeypatch):
  programs.keep()
  folder = os.environ[programs.DIRECTORY]

  assert [str(path) for path in home.iterdir()] == [folder]
  monkeypatch.delenv(programs.DIRECTORY)
  monkeypatch.setenv("NPROC", "3")  # another number of threads: other bits
  programs.keep()

  assert os.environ[programs.DIRECTORY] != folder
  monkeypatch.setenv(programs.DIRECTORY, "")
  programs.keep()

  assert not os.environ[programs.DIRECTORY]


COMPILES = """
from sparse_transformer import programs
programs.keep()
import jax
compiled = []
jax.monitoring.register_event_listener(lambda name, **_: compiled.append(name))
print(jax.jit(lambda x: 3 * x)(14.0))
print(any(x.endswith("/cache_hits") for x in compiled))
"""


def test_damaged_program_is_replaced(tmp_path):
  words = "-c", COMPILES
  more = {programs.DIRECTORY: tmp_path}
  more["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = 0

  def compiles():
    done = runs.python(*words, **more)
    assert done.returncode == 0 and not done.stderr, done.stderr
    value, is_kept = done.stdout.split()
    assert value == "42.0"
    return is_kept == "False"

  assert compiles()
  assert not compiles()

  (path,) = tmp_path.glob("*lambda*-cache")
  os.truncate(path, path.stat().st_size // 2)

  assert compiles()
  assert not compiles()
  assert path.stat().st_size


def test_oldest_programs_are_deleted_and_nothing_needs_the_folder(
  home, monkeypatch
):
  for i in range(4):
    path = home / "other" / str(i)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 100)
    os.utime(path, (i, i))

  monkeypatch.setattr(programs, "LARGEST", 250)
  programs.keep()

  assert sorted(x.name for x in path.parent.iterdir()) == ["2", "3"]
  monkeypatch.delenv(programs.DIRECTORY)
  monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a file
  programs.keep()

  assert programs.DIRECTORY not in os.environ
