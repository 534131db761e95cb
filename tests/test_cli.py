"""Tests of the command lines: every mistake gives one line and status 1."""

import bz2
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import runs
from absl import flags

from sparse_transformer import cli as command
from sparse_transformer.training import loop as train

# Of ml_collections, as it loads a config file.
pytestmark = pytest.mark.filterwarnings(
  "ignore:the load_module:DeprecationWarning"
)
DIGITS = f"--config={runs.REPO / 'configs' / 'digits.py'}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """The workdir of a run of 2 steps; not to be changed."""
  workdir = tmp_path_factory.mktemp("trained")
  train.train(runs.tiny(**{"train.steps": 2}), workdir)
  return workdir


@pytest.fixture
def workdir(trained, tmp_path):
  """A copy of that run."""
  return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def fails(capfd, tmp_path):
  """fails(script, words, message): one line, status 1, nothing written."""

  def check(script, words, message):
    before = runs.files(tmp_path)
    capfd.readouterr()
    status = runs.command(script, *words)
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert re.search(message, err), err
    assert err.split(": ")[0] == pathlib.Path(script).name
    assert status == 1
    assert "Traceback" not in out
    assert runs.files(tmp_path) == before

  return check


# Settings of train.py: words, then what the line says.
MISTAKES = {
  "unknown pattern": (
    "--config.attention.pattern=zigzag",
    "attention.pattern 'zigzag'; known: dense, local, strided, fixed",
  ),
  "unknown mode": (
    "--config.attention.mode=mixed",
    "attention.mode 'mixed'; known: interleaved, merged, heads",
  ),
  "factor that is not there": (
    "--config.attention.cycle=(0,2)",
    r"attention.cycle \(0, 2\).*0 to 1",
  ),
  "stride beyond the sequence": (
    "--config.attention.stride=65",
    "attention.stride=65 does not fit.*between 1 and the 64",
  ),
  "no stride": ("--config.attention.stride=0", "attention.stride=0 .*1"),
  "window beyond the sequence": (
    "--config.attention.window=65",
    "attention.window=65 does not fit",
  ),
  "width beyond the stride": (
    "--config.attention.pattern=fixed --config.attention.width=9",
    r"Summary\(8, 9\) does not fit",
  ),
  "summaries beyond the stride": (
    "--config.attention.pattern=fixed --config.attention.width=4"
    " --config.attention.num_summaries=3",
    r"Summary\(8, 4, shift=2\) does not fit",
  ),
  "unknown backend": (
    "--config.attention.backend=fast",
    "backend.*'fast'.*auto, dense, blocked",
  ),
  "misspelt override": ("--config.attention.patern=fixed", "patern"),
  "misspelt group": ("--config.atention.pattern=fixed", "atention"),
  "override of another type": ("--config.train.steps=many", "steps.*many"),
  "fraction for a count": ("--config.train.steps=2.5", "steps.*2.5"),
  "number for a group": ("--config.train=3", "train"),
  "misspelt flag": ("--wrokdir=there", "wrokdir"),
  "stray argument": ("more", "unexpected argument 'more'.*--name=value"),
  "unknown data": ("--config.data.name=mnist", "'mnist'; known: digits"),
  "text without a path": ("--config.data.name=bytes", "data.path is not set"),
  "text that is not there": (
    "--config.data.name=bytes --config.data.path=/no/such",
    "no file or folder /no/such.*data.path",
  ),
  "heads that do not divide the width": (
    "--config.model.num_heads=3",
    "num_heads=3 must divide model.width=128",
  ),
  "no layers": ("--config.model.num_layers=0", "num_layers must be at least 1"),
  "unknown type": ("--config.model.dtype=float8", "'float8'; known: float32"),
  "dropout of everything": ("--config.model.dropout=1.0", "dropout=1.0"),
  "negative steps": ("--config.train.steps=-1", "train.steps=-1"),
  "warm-up as long as the run": (
    "--config.optimizer.warmup_steps=700",
    "optimizer.warmup_steps=700 must lie below train.steps=700",
  ),
  "batch that micro-batches do not divide": (
    "--config.train.accumulation=3",
    "train.batch_size=16 must be a multiple of.*train.accumulation=3",
  ),
  "no micro-batches": ("--config.train.accumulation=0", "accumulation=0"),
  "empty batch": ("--config.train.batch_size=0", "batch_size=0"),
  "negative batch": ("--config.train.batch_size=-16", "batch_size=-16"),
  "empty batch of evaluation": (
    "--config.eval.batch_size=0",
    "eval.batch_size=0",
  ),
  "no checkpoints kept": ("--config.checkpoint.keep=0", "checkpoint.keep=0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistaken_setting_is_one_line_before_anything_is_written(
  mistake, fails, tmp_path
):
  words, message = MISTAKES[mistake]
  workdir = f"--workdir={tmp_path / 'run'}"
  fails("train.py", [DIGITS, workdir, *words.split()], message)


def test_missing_flag_is_one_line(fails, tmp_path):
  fails("train.py", [f"--workdir={tmp_path / 'run'}"], "--config is missing")
  fails("train.py", [DIGITS], "--workdir is missing")
  for script in ("eval.py", "sparse_transformer/sample.py"):
    fails(script, [], "--workdir is missing")


@pytest.mark.parametrize(
  "content, message",
  [
    (None, "config.py"),
    ("", "get_config"),
    ("def get_config(:", "config.py|invalid syntax"),
    ("\0\1\2", "config.py|null byte"),
    ("import no_such_module", "no_such_module"),
    ("def get_config():\n  return 1 / 0", "division by zero"),
    ("def get_config():\n  return {}['colour']", "colour"),
    ("def get_config():\n  return 7", "default.py"),
    ("def get_config():\n  return {}", "default.py"),
  ],
  ids=range(9),
)
def test_file_that_gives_no_config_is_one_line(
  content, message, fails, tmp_path
):
  path = tmp_path / "config.py"
  if content is not None:
    path.write_text(content)
  sys_path = list(sys.path)
  words = [f"--config={path}", f"--workdir={tmp_path / 'run'}"]
  fails("train.py", words, message)
  sys.path[:] = sys_path


def test_data_set_that_is_not_there_is_one_line(fails, tmp_path):
  (tmp_path / "empty").mkdir()
  words = [
    DIGITS,
    f"--workdir={tmp_path / 'run'}",
    "--config.data.name=cifar10",
    f"--config.data.path={tmp_path / 'empty'}",
  ]
  fails("train.py", words, "cifar10.*prepare cifar10")


def test_damaged_data_is_one_line(fails, tmp_path):
  whole = bz2.compress(np.random.RandomState(0).bytes(10_000))
  path = tmp_path / "text.bz2"
  path.write_bytes(whole[: len(whole) // 2])
  words = [
    DIGITS,
    f"--workdir={tmp_path / 'run'}",
    "--config.data.name=bytes",
    f"--config.data.path={path}",
    "--config.data.length=64",
    "--config.data.columns=8",
  ]
  fails("train.py", words, "text.bz2 is damaged or truncated")


def test_text_shorter_than_a_window_is_one_line(fails, tmp_path):
  path = tmp_path / "text"
  path.write_text("short " * 10)
  words = [
    DIGITS,
    f"--workdir={tmp_path / 'run'}",
    "--config.data.name=bytes",
    f"--config.data.path={path}",
    "--config.data.length=64",
  ]
  fails("train.py", words, "fewer than data.length=64")


def test_workdir_of_another_config_is_one_line(fails, workdir):
  words = [DIGITS, f"--workdir={workdir}"]
  fails(
    "train.py",
    words,
    r"another config: .*model.width \(16 there, 128 now\).*--workdir",
  )


def test_workdir_that_is_a_file_is_one_line(fails, tmp_path):
  path = tmp_path / "file"
  path.write_text("mine")
  fails("train.py", [DIGITS, f"--workdir={path}"], re.escape(str(path)))


def test_folder_that_is_no_run_is_one_line(fails, tmp_path):
  (tmp_path / "empty").mkdir()
  for script in ("eval.py", "sparse_transformer/sample.py"):
    for name in ("empty", "missing"):
      words = [f"--workdir={tmp_path / name}"]
      fails(script, words, f"{name} is no run.*train.py")


def test_run_without_checkpoint_is_one_line(fails, workdir):
  shutil.rmtree(workdir / "checkpoints" / "2")
  for script in ("eval.py", "sparse_transformer/sample.py"):
    fails(script, [f"--workdir={workdir}"], "holds no checkpoint")
  shutil.rmtree(workdir / "checkpoints")
  fails("eval.py", [f"--workdir={workdir}"], "holds no checkpoint")


def test_checkpoint_that_is_not_there_is_one_line(fails, workdir):
  words = [f"--workdir={workdir}", "--step=99"]
  fails("eval.py", words, "no checkpoint of step 99.*there are 2$")
  fails("sparse_transformer/sample.py", words, "no checkpoint of step 99")


def test_unreadable_checkpoint_is_one_line(fails, workdir):
  files = [f for f in (workdir / "checkpoints").rglob("*") if f.is_file()]
  path = max(files, key=lambda file: file.stat().st_size)
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  message = "checkpoints/2 cannot be read: .*sets it aside"
  fails("eval.py", [f"--workdir={workdir}"], message)


def test_override_that_changes_the_network_is_one_line(fails, workdir):
  words = [f"--workdir={workdir}", "--config.model.width=32"]
  fails("eval.py", words, "of another network.*leave out overrides")


@pytest.mark.parametrize(
  "words, message",
  [
    ("--split=tests", "train.*validation.*test"),
    ("--min_context=-1", "min_context=-1"),
    ("--min_context=3", "min_context=3 must be 0 for images"),
    ("--config.attention.patern=fixed", "patern"),
    ("--config.attention.stride=x", "stride"),
    ("--step=last", "step.*last"),
    ("more", "unexpected argument 'more'"),
    ("--spilt=test", "spilt"),
  ],
)
def test_mistake_in_evaluation_is_one_line(words, message, fails, workdir):
  fails("eval.py", [f"--workdir={workdir}", *words.split()], message)


@pytest.mark.parametrize(
  "words, message",
  [
    ("--num=0", "num=0"),
    ("--temperature=-1", "temperature=-1"),
    ("--temperature=warm", "temperature.*warm"),
    ("more", "unexpected argument 'more'"),
  ],
)
def test_mistake_in_sampling_is_one_line(words, message, fails, workdir):
  script = "sparse_transformer/sample.py"
  fails(script, [f"--workdir={workdir}", *words.split()], message)


@pytest.mark.parametrize(
  "content", ["", "{", "[]", "7", '"x"', '{"data": {}}', '{"data": 7}', "\xff"]
)
def test_config_that_is_broken_is_one_line(content, fails, workdir):
  path = workdir / "config.json"
  path.write_text(content, encoding="latin-1")
  for script in ("eval.py", "sparse_transformer/sample.py"):
    fails(script, [f"--workdir={workdir}"], "config.json cannot be read")


@pytest.mark.parametrize(
  "error", [ValueError, OSError, FileNotFoundError, FloatingPointError]
)
def test_any_error_of_the_user_becomes_one_line(error, capfd, monkeypatch):
  def main(argv):
    raise error("first line\n  second line")

  monkeypatch.setattr(sys, "argv", ["tool"])
  with pytest.raises(SystemExit) as exit:
    command.run(main)
  flags.FLAGS.unparse_flags()
  assert exit.value.code == 1
  assert capfd.readouterr().err == "tool: first line second line\n"


def test_error_of_ours_keeps_its_traceback(monkeypatch):
  def main(argv):
    raise RuntimeError("a bug")

  monkeypatch.setattr(sys, "argv", ["tool"])
  with pytest.raises(RuntimeError, match="a bug"):
    command.run(main)
  flags.FLAGS.unparse_flags()


def test_verbosity_shows_where_an_error_was_raised(monkeypatch):
  def main(argv):
    raise ValueError("where")

  monkeypatch.setattr(sys, "argv", ["tool", "--verbosity=1"])
  with pytest.raises(ValueError, match="where"):
    command.run(main)
  flags.FLAGS.unparse_flags()


# As a user has it: commands of their own processes.


def python(*words):
  return subprocess.run(
    [sys.executable, *map(str, words)],
    cwd=runs.REPO,
    capture_output=True,
    text=True,
  )


def test_command_of_its_own_process_fails_in_one_line(tmp_path):
  workdir = tmp_path / "run"
  done = python(
    "train.py", DIGITS, f"--workdir={workdir}", "--config.attention.stride=0"
  )
  assert done.returncode == 1
  assert done.stderr.count("\n") == 1 and "attention.stride=0" in done.stderr
  assert not workdir.exists()


def test_last_line_of_evaluation_is_json_and_errors_are_empty(trained):
  done = python("eval.py", f"--workdir={trained}", "--split=validation")
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  result = json.loads(done.stdout.strip().split("\n")[-1])
  assert result["split"] == "validation"
  assert result["step"] == 2
  assert result["unit"] == "bits/dim"
  assert result["examples"] == 200
  assert result["tokens"] == 200 * 64
  assert 0 < result["bits_per_dim"] < np.log2(17) + 0.1
  assert 0 < result["standard_error"] < 0.1
