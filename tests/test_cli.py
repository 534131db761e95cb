"""Mistakes on the command line are reported in one line, with status 1."""

import asyncio
import re
import shlex
import shutil
import signal
import sys
import types

import pytest
from absl import flags
from helpers import runs

from sparse_transformer import (
  cli,
  config as config_lib,
  data,
  patterns,
  signals,
)
from sparse_transformer.model import sampling
from sparse_transformer.training.evaluation import evaluations, samples
from sparse_transformer.training.experiment import open_run
from sparse_transformer.training.loop import train

EXPLAIN = "sparse_transformer/explain.py"
# The commands, and the flag that names what they are about.
COMMANDS = {
  "train.py": "config",
  "eval.py": "workdir",
  "sparse_transformer/sample.py": "workdir",
  "sparse_transformer/explain.py": "config",
  "sparse_transformer/compare.py": "config",
  "sparse_transformer/export.py": "workdir",
  "sparse_transformer/report.py": "workdir",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_all_flags(command, capsys):
  runs.command(command, "--help")
  out = capsys.readouterr().out
  source = (runs.REPO / command).read_text()
  assert source[3:].split("\n")[0] in out
  defined = re.findall(r'DEFINE_\w+\(\s*"(\w+)"', source)
  listed = re.findall(r"^  --(?:\[no\])?([^\s=:]+):", out, re.MULTILINE)
  assert {*defined, COMMANDS[command]} <= {*listed}
  assert ("attention.pattern='strided': dense" in out) == ("config" in listed)


def assert_loads_no_jax(*words):
  """Runs a script; returns what it prints as an error."""
  done = runs.python("-X", "importtime", *words)
  lines = done.stderr.splitlines()
  modules = {line.split("|")[-1].strip() for line in lines}
  assert done.returncode == 1
  assert "absl" in modules
  assert not modules & {"jax", "matplotlib", "scipy"}
  return done.stderr


def test_flags_are_read_without_loading_jax():
  error = assert_loads_no_jax("train.py", "--config=no.py", "--workdir=x")
  assert "no.py: no such file\n" in error


@pytest.fixture
def parsed_no_flags(monkeypatch):
  """As before and after a command; its name is "tool"."""
  monkeypatch.setattr(sys, "argv", ["tool"])
  yield
  flags.FLAGS.unparse_flags()


@pytest.mark.parametrize(
  "error, message",
  [
    (FileNotFoundError("one\n  two"), "^tool: one two$"),
    (MemoryError(), "^tool: MemoryError$"),
    (
      RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating\n7 bytes"),
      r"smaller batches.*explain .*\(RESOURCE_EXHAUSTED: [^7]*\)$",
    ),
    (
      RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"),
      "^tool: a kernel does not compile .*backend=batched.*limit exceeded",
    ),
  ],
)
def test_error_that_a_user_can_fix_becomes_one_line(
  error, message, capfd, parsed_no_flags
):
  def main(argv):
    raise error

  with pytest.raises(SystemExit) as exit:
    cli.run(main)
  err = capfd.readouterr().err
  assert exit.value.code == 1
  assert err.count("\n") == 1
  assert re.search(message, err)


@pytest.mark.parametrize(
  "words, error",
  [
    ([], RuntimeError),
    (["--verbosity=1"], ValueError),
  ],
)
def test_bug_or_verbosity_keeps_the_traceback(words, error, parsed_no_flags):
  def main(argv):
    raise error("where")

  sys.argv += words
  with pytest.raises(error, match="where"):
    cli.run(main)


# Commands that read all of their flags before they end with an error.
SPACED = {
  "train.py": "--config FILE --config.train.accumulation 3 --workdir new",
  "eval.py": "--config.eval.batch_size 8 --workdir RUN --config FILE --step 77",
  "sparse_transformer/explain.py": (
    "--config FILE --config.attention.cycle 0,1 --config.train.accumulation 3"
  ),
  "sparse_transformer/data/__main__.py": "--data_dir new prepare mnist",
}


@pytest.mark.parametrize("command", SPACED)
def test_flag_and_value_may_be_two_words(command, trained, capfd):
  digits = runs.DIGITS.partition("=")[2]
  line = SPACED[command].replace("RUN", str(trained)).replace("FILE", digits)
  answers = []
  for separator in (" ", "="):
    words = re.sub(r"(--\S+) ", rf"\1{separator}", line).split()
    assert runs.command(command, *words) == 1
    answers.append(capfd.readouterr().err)

  assert answers[0] == answers[1]
  assert not re.search("is (missing|empty|given)|unexpected", answers[0])


@pytest.mark.parametrize(
  "given, found",
  {
    "digits": "configs/digits.py",
    "digits.py": "configs/digits.py",
    "configs/digit.py": "configs/digits.py",
    "mine/tinny.py": "mine/tiny.py",
  }.items(),
)
def test_nearest_config_file_is_named(
  given, found, tmp_path, monkeypatch, capfd
):
  monkeypatch.chdir(tmp_path)
  for name in "configs/digits.py", "configs/text.py", "mine/tiny.py":
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
  assert runs.command("train.py", f"--config={given}", "--workdir=new") == 1
  line = f"--config={given}: no such file; did you mean {found}?\n"
  assert capfd.readouterr().err == f"train.py: {line}"


def test_nearest_run_and_data_are_named(trained, tmp_path, capfd):
  shutil.copytree(trained, tmp_path / "digits")
  close = f"did you mean {tmp_path / 'digits'}?\n"
  workdir = f"--workdir={tmp_path / 'digit'}"
  assert runs.command("eval.py", workdir) == 1
  assert capfd.readouterr().err.endswith(close)

  config = f"--config={runs.REPO / 'configs' / 'text_small.py'}"
  path = f"--config.data.path={tmp_path / 'digtis'}"
  workdir = f"--workdir={tmp_path / 'new'}"
  assert runs.command("train.py", config, path, workdir) == 1
  assert capfd.readouterr().err.endswith(close)


@pytest.mark.parametrize("name", ["sample", "compare"])
def test_file_of_a_command_says_how_to_run_it(name):
  done = runs.python(f"sparse_transformer/{name}.py", "--workdir=x")
  assert done.returncode == 1
  assert done.stderr == (
    f"{name}.py: run it as python -m sparse_transformer.{name}, in the folder"
    " above\n"
  )


def test_device_that_is_absent_is_said_in_one_line(tmp_path):
  workdir = f"--workdir={tmp_path / 'new'}"
  done = runs.python("train.py", runs.DIGITS, workdir, JAX_PLATFORMS="gpu")
  assert done.returncode == 1
  assert done.stderr.count("\n") == 1
  assert "JAX_PLATFORMS=gpu XLA_FLAGS=" in done.stderr
  assert "no such device found" in done.stderr


def test_config_of_a_run_takes_the_place_of_a_file(tmp_path, capsys):
  config_lib.write_config(tmp_path, runs.tiny())
  pattern = "--config.attention.pattern=Local(5)"
  assert runs.command(EXPLAIN, f"--workdir={tmp_path}", pattern) == 0
  assert "Local(5)" in capsys.readouterr().out


def test_path_may_begin_with_the_home_directory(monkeypatch, capfd, trained):
  monkeypatch.setenv("HOME", str(trained))
  assert runs.command("eval.py", "--workdir=~/none") == 1
  assert f"eval.py: {trained}/none is not a run" in capfd.readouterr().err


@pytest.mark.parametrize(
  "variable, value, program, status",
  [
    (
      "MPLBACKEND",
      "module://matplotlib_inline.backend_inline",
      "import matplotlib.figure as m; m.Figure()",
      0,
    ),
    ("JAX_PLATFORMS", "cuda,foo", "import jax; jax.devices()", 1),
    ("JAX_PLATFORMS", "cuda", "import jax; jax.devices()", 1),
    ("PYTHONIOENCODING", "ascii", "print('模')", 0),
  ],
)
def test_variable_that_stops_a_library(variable, value, program, status):
  """Of those of a notebook or a cluster, on another machine."""
  script = f"""
from sparse_transformer import cli
def main(argv): {program}
cli.run(main)
"""
  done = runs.python("-c", script, **{variable: value})
  assert done.returncode == status
  assert done.stderr.count("\n") == status


WITH_HOOK = """
from helpers import runs
from sparse_transformer import data
data.SOURCES["mine"] = lambda config: None
def get_config():
  return runs.tiny(**{"train.steps": 2})
def on_metrics(step, split, values):
  print("hook", step, split, values["bits_per_dim"] > 0)
"""


def test_function_of_a_config_file_gets_the_metrics(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(data, "SOURCES", dict(data.SOURCES))
  path = tmp_path / "config.py"
  path.write_text(WITH_HOOK)
  config = f"--config={path}"
  workdir = f"--workdir={tmp_path / 'run'}"
  assert runs.command("train.py", config, workdir) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line for line in lines if line.startswith("hook")] == [
    "hook 1 train True",
    "hook 2 train True",
    "hook 2 validation True",
  ]
  assert f"eval.py {workdir} {config} --step=best" in lines[-1]


OWN = """
import dataclasses, pathlib
from helpers import runs
from sparse_transformer import data, patterns
pathlib.Path(__file__).with_name("was_run").touch()
@dataclasses.dataclass(frozen=True)
class Mine(patterns.Local):
  pass
patterns.CATALOGUE["Mine"] = Mine
data.SOURCES["mine"] = data.SOURCES["digits"]
get_config = runs.tiny
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
  """The folder of a run with a pattern and data that its config.py adds."""
  monkeypatch.chdir(tmp_path)
  before = [(x, dict(x)) for x in (data.SOURCES, patterns.CATALOGUE)]
  changes = {
    "attention.pattern": "Local(2) | Mine (8)",
    "data.name": "mine",
  }
  config_lib.write_config("a run", runs.tiny(**changes))
  (tmp_path / "a run" / "config.py").write_text(OWN)
  yield tmp_path / "a run"
  for registry, entries in before:
    registry.clear()
    registry.update(entries)


@pytest.mark.parametrize(
  "command",
  [
    "eval.py",
    "sparse_transformer/sample.py",
    EXPLAIN,
    "sparse_transformer/export.py",
    "sparse_transformer/report.py",
  ],
)
def test_code_of_a_run_is_named_and_not_run(command, own, capfd):
  words = ["--workdir=a run", "--config.train.seed=7"]
  assert runs.command(command, *words) == 1
  (line,) = capfd.readouterr().err.splitlines()
  start, _, printed = line.partition(", run ")
  assert start.endswith(
    ".py: Mine, mine must be registered first; if you trust the code in a"
    " run/config.py"
  )
  config = "--config=a run/config.py"
  assert shlex.split(printed) == ["python", command, *words, config]
  assert not (own / "was_run").exists()


def test_command_that_names_the_code_of_a_run_works(own, capfd):
  assert runs.command(EXPLAIN, "--workdir=a run") == 1
  printed = capfd.readouterr().err.partition(", run ")[2]
  assert runs.command(*shlex.split(printed)[1:]) == 0
  assert (own / "was_run").exists()
  assert "Mine(8)" in capfd.readouterr().out


def test_override_makes_the_code_of_a_run_unnecessary(own, capfd):
  dense = "--config.attention.pattern=dense"
  digits = "--config.data.name=digits"
  assert runs.command(EXPLAIN, "--workdir=a run", digits, dense) == 0
  assert runs.command(EXPLAIN, "--workdir=a run", digits) == 1
  assert ": Mine must be registered first" in capfd.readouterr().err


def test_code_of_a_run_is_named_before_jax_loads(own):
  error = assert_loads_no_jax("eval.py", f"--workdir={own}")
  assert "must be registered first" in error


def test_library_works_in_a_notebook(trained, tmp_path, monkeypatch, capsys):
  """There, no flags are parsed, and the command line is the kernel's."""
  workdir = shutil.copytree(trained, tmp_path / "run")
  monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "x.json"])
  handlers = [signal.getsignal(number) for number in signals.STOPPING]

  async def cell():  # runs within the kernel's event loop
    train(config_lib.read_config(workdir), workdir)  # resumes
    run = open_run(workdir)
    source = run.experiment.source
    state = run.restore()
    score = evaluations.evaluate(run, state)
    tokens, _ = sampling.sample(
      sampling.Cached(run.experiment.model),
      state.ema,
      sampling.Sampler(),
      samples.no_prompts(source, 2),
      64,
    )
    return score, samples.save(workdir, source, tokens)

  score, (path,) = asyncio.run(cell())
  assert score.step == 2
  assert path.exists()
  assert capsys.readouterr().err == ""
  assert not flags.FLAGS.is_parsed()
  assert handlers == [signal.getsignal(number) for number in signals.STOPPING]


def test_closed_event_loop_of_orbax_is_not_shown():
  """Its threads print that, many times, after a write has failed."""
  shown = []
  for text in ("Event loop is closed", "other"):
    problem = types.SimpleNamespace(exc_value=RuntimeError(text))
    cli._report(problem, shown.append)
  assert [str(x.exc_value) for x in shown] == ["other"]
