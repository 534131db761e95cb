"""Mistakes on the command line are reported in one line, with status 1."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import runs
from absl import flags

from sparse_transformer import cli, config as config_lib, signals
from sparse_transformer.model import kv_cache, sampling
from sparse_transformer.training.evaluation import (
  evaluations,
  samples,
  trained_run,
)
from sparse_transformer.training.loop import train

# The flags of each command. A stored config is that of --workdir.
FLAGS = {
  "train.py": (
    "[no]allow_changes config connect_seconds coordinator distributed"
    " heartbeat_seconds limit num_processes process_id profile workdir"
  ),
  "eval.py": "min_context split step weights workdir",
  "-m sparse_transformer.sample": (
    "[no]cache given num prompt seed step temperature top_k top_p workdir"
  ),
  "-m sparse_transformer.explain": (
    "[no]compile config example [no]json out part step target temperature"
    " workdir"
  ),
  "-m sparse_transformer.compare": (
    "budget config equal first_seed jobs seeds target task tune tune_budget"
    " vary workdir"
  ),
  "-m sparse_transformer.export": "out step weights workdir",
  "-m sparse_transformer.report": "workdir",
  "-m sparse_transformer.data": "data_dir",
}


@pytest.fixture
def workdir(trained, tmp_path):
  """A copy of that run."""
  return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize("command", FLAGS)
def test_help_lists_all_flags_without_loading_jax(command):
  done = subprocess.run(
    [sys.executable, "-X", "importtime", *command.split(), "--help"],
    cwd=runs.REPO,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0
  path = command.removeprefix("-m ").removesuffix(".py").replace(".", "/")
  path = path.replace("data", "data/__main__")
  source = (runs.REPO / f"{path}.py").read_text()
  assert done.stdout.lstrip().startswith(source[3:].split("\n")[0])
  listed = re.findall(r"^  --([^\s=:]+):", done.stdout, re.MULTILINE)
  assert listed == FLAGS[command].split()
  fields = "attention.pattern='strided': dense, local" in done.stdout
  assert fields == ("config" in listed)
  loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
  assert "absl" in loaded and not loaded & {"jax", "matplotlib", "scipy"}


def test_help_is_shown_whatever_else_is_on_the_command_line(tmp_path, capfd):
  (tmp_path / "config.py").write_text("1 / 0")
  words = [f"--config={tmp_path / 'config.py'}", "--helpshort", "--wrokdir=x"]
  assert runs.command("train.py", *words) == 0
  out, err = capfd.readouterr()
  assert "Trains a model" in out and not err


@pytest.mark.parametrize(
  "error, message",
  [
    *((kind("one\n  two"), "^tool: one two$") for kind in cli.USER_ERRORS),
    (FileNotFoundError("one\n  two"), "^tool: one two$"),
    (MemoryError(), "out of memory; .*MemoryError"),
    (RecursionError("too deep"), r"too deep \(too deep\)"),
    (OverflowError("of an int"), r"too large \(of an int\)"),
    (
      RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating\n7 bytes"),
      r"smaller batches.*explain .*\(RESOURCE_EXHAUSTED: [^7]*\)$",
    ),
    (
      RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"),
      "^tool: a kernel does not compile .*backend=batched.*limit exceeded",
    ),
    (ValueError(f"{9999 * 'a'} is {9999 * 'b '}"), r"a{9} \.\.\. .*b b$"),
  ],
)
def test_error_that_a_user_can_fix_becomes_one_line(
  error, message, capfd, monkeypatch
):
  def main(argv):
    raise error

  monkeypatch.setattr(sys, "argv", ["tool"])
  with pytest.raises(SystemExit) as exit:
    cli.run(main)
  flags.FLAGS.unparse_flags()
  err = capfd.readouterr().err
  assert exit.value.code == 1 and err.count("\n") == 1 and len(err) < 2000
  assert re.search(message, err)


def test_closed_pipe_is_reported_in_one_line(capfd, monkeypatch):
  reader, writer = os.pipe()
  os.close(reader)
  monkeypatch.setattr(sys, "argv", ["tool"])
  with open(writer, "w") as out:
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as exit:
      cli.run(lambda argv: print("result"))
    flags.FLAGS.unparse_flags()
    print("and nothing when the process ends", flush=True)
  assert exit.value.code == 1
  assert capfd.readouterr().err == "tool: [Errno 32] Broken pipe\n"


@pytest.mark.parametrize(
  "words, error",
  [
    ([], RuntimeError),
    ([], NotImplementedError),
    (["--verbosity=1"], ValueError),
  ],
)
def test_bug_or_verbosity_keeps_the_traceback(words, error, monkeypatch):
  def main(argv):
    raise error("where")

  monkeypatch.setattr(sys, "argv", ["tool", *words])
  with pytest.raises(error, match="where"):
    cli.run(main)
  flags.FLAGS.unparse_flags()


# Commands that read all of their flags before they end with an error.
SPACED = {
  "train.py": "--config FILE --workdir new --config.train.accumulation 3",
  "eval.py": "--workdir RUN --config.eval.batch_size 8 --step 77",
  "sparse_transformer/sample.py": "--prompt no --workdir RUN --step 77",
  "sparse_transformer/explain.py": (
    "--config FILE --config.train.accumulation 3"
  ),
  "sparse_transformer/compare.py": (
    "--workdir new --config FILE --config.model.width 9 --vary train.steps=1,2"
  ),
  "sparse_transformer/export.py": "--workdir RUN --out a.safetensors --step 77",
  "sparse_transformer/report.py": "--workdir nowhere --config.model.width 32",
  "sparse_transformer/data/__main__.py": "prepare mnist --data_dir new",
}


@pytest.mark.parametrize("command", SPACED)
def test_flag_and_value_may_be_two_words(command, trained, capfd):
  answers = []
  for separator in (" ", "="):
    words = re.sub(r"(--\S+) ", rf"\1{separator}", SPACED[command]).split()
    words = [w.replace("RUN", str(trained)) for w in words]
    words = [w.replace("FILE", runs.DIGITS.partition("=")[2]) for w in words]
    assert runs.command(command, *words) == 1
    answers.append(capfd.readouterr().err)
  assert answers[0] == answers[1]
  assert not re.search("is (missing|empty)|unexpected", answers[0])


@pytest.mark.parametrize(
  "variable, value, module, status",
  [
    (
      "MPLBACKEND",
      "module://matplotlib_inline.backend_inline",
      "matplotlib.figure",
      0,
    ),
    ("JAX_PLATFORMS", "cuda,foo", "jax", 1),
    ("XLA_FLAGS", "--xla_force_host_platform_device_count=0", "jax", 1),
  ],
)
def test_variable_that_stops_a_library(variable, value, module, status):
  """Of those of a notebook or a cluster, on another machine."""
  script = (
    "from sparse_transformer import cli\n"
    f"def main(argv): import {module} as m; m.Figure() if {not status} else"
    " m.devices()\n"
    "cli.run(main)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", script],
    cwd=runs.REPO,
    env=os.environ | {variable: value},
    capture_output=True,
    text=True,
  )
  assert done.returncode == status, done.stderr
  assert done.stderr.count("\n") == status
  assert not status or f"({variable}={value})" in done.stderr


def test_evaluation_prints_json_last_and_no_errors(trained):
  done = subprocess.run(
    [sys.executable, "eval.py", f"--workdir={trained}", "--split=validation"],
    cwd=runs.REPO,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  result = json.loads(done.stdout.strip().split("\n")[-1])
  assert (result["split"], result["step"]) == ("validation", 2)
  assert (result["examples"], result["tokens"]) == (200, 200 * 64)
  assert 0 < result["bits_per_dim"] < np.log2(17) + 0.1
  assert 0 < result["standard_error"] < 0.1


def test_function_of_a_config_file_gets_the_metrics(tmp_path, capsys):
  path = tmp_path / "config.py"
  path.write_text(
    "import runs\n"
    "def get_config(): return runs.tiny(**{'train.steps': 2})\n"
    "def on_metrics(step, split, values):\n"
    "  print('hook', step, split, values['bits_per_dim'] > 0)\n"
  )
  words = f"--config={path}", f"--workdir={tmp_path / 'run'}"
  assert runs.command("train.py", *words) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line for line in lines if line.startswith("hook")] == [
    *("hook 1 train True", "hook 2 train True", "hook 2 validation True")
  ]


def test_library_works_in_a_notebook(workdir, monkeypatch, capsys):
  """There, no flags are parsed, and the command line is the kernel's."""
  monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "x.json"])
  handlers = [signal.getsignal(number) for number in signals.STOPPING]

  async def cell():  # runs within the kernel's event loop
    config = config_lib.read_config(workdir)
    train(config, workdir)  # resumes
    run = experiment, _ = trained_run.open_run(workdir)
    state = trained_run.restore(*run)
    result, params = evaluations.evaluate(*run, state), state.ema
    decoder = kv_cache.Decoder(experiment.model)
    sampler = sampling.Sampler()
    tokens, _ = sampling.sample(decoder, params, sampler, num=2, length=64)
    return result, samples.save(workdir, experiment.source, tokens)

  result, (path,) = asyncio.run(cell())
  assert result["step"] == 2 and path.exists()
  assert capsys.readouterr().err == ""
  assert not flags.FLAGS.is_parsed()
  assert handlers == [signal.getsignal(number) for number in signals.STOPPING]
