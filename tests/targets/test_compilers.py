"""Tests of the processes that compile, with scripts in place of them."""

import dataclasses
import json
import shlex
import stat

import pytest
from helpers import runs
from helpers.errors import refused

from configs import digits
from sparse_transformer.targets import compilers, hardware, worker
from sparse_transformer.training import costs
from sparse_transformer.training.experiment import Experiment

H100 = hardware.parse("h100")
# Reads the request, which names the folder of the answer.
FOLDER = """request=$(cat)
folder=$(echo "$request" | sed 's/.*"folder": "\\([^"]*\\)".*/\\1/')"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
  """A function that installs a shell script as the interpreter for CUDA."""
  monkeypatch.setenv(compilers.VARIABLE, str(tmp_path))
  path = tmp_path / "cuda" / "bin" / "python"

  def install(script):
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{FOLDER}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path

  return install


def answers(**answer):
  return f"echo {shlex.quote(json.dumps(answer))} > $folder/answer.json"


def test_missing_compiler_names_the_command_that_installs_it(
  tmp_path, monkeypatch
):
  monkeypatch.setenv(compilers.VARIABLE, str(tmp_path))
  for compiler in ("cuda", "tpu"):
    with refused("`make targets`"):
      compilers.python(compiler)


def test_request_answer_and_progress(installed, tmp_path, capfd):
  path = installed(
    f'echo "$request" > {tmp_path}/request\n'
    f"echo $JAX_PLATFORMS $XLA_FLAGS > {tmp_path}/env\n"
    f"echo 'h100:1x1x1: compiling'\n{answers(result=dict(launches=3))}"
  )

  assert compilers.python("cuda") == path
  result = compilers.compile_for(H100, digits.get_config(), "attention")
  assert result == dict(launches=3)
  request = json.loads((tmp_path / "request").read_text())
  assert request["target"] == "h100:1x1x1"
  assert request["part"] == "attention"
  assert request["config"]["data"]["name"] == "digits"
  settings = (tmp_path / "env").read_text()
  assert settings.startswith("cpu --xla_gpu_")
  lines = capfd.readouterr().err.splitlines()
  assert lines == ["h100:1x1x1: starting", "h100:1x1x1: compiling"]


@pytest.mark.parametrize(
  "script, error, message",
  [
    (answers(error="no such topology"), ValueError, "^no such topology$"),
    ("echo 'not found' >&2\nexit 3", RuntimeError, "status 3:\nnot found"),
    ("kill -9 $$", OSError, "ended by signal 9; .* memory"),
  ],
)
def test_error_crash_or_end_of_a_request(script, error, message, installed):
  installed(script)
  with pytest.raises(error, match=message):
    compilers.compile_for(H100, digits.get_config())


def test_attention_is_that_of_the_training_step():
  config = runs.tiny(**{"model.sinks": True})
  experiment = Experiment(config)
  (request, *_) = costs.attention_requests(config, experiment.model)
  request = dataclasses.replace(request, segments=True)

  assert request.sinks
  ((_, requests, run, inputs),) = worker._attention(experiment, [request])
  assert requests == [request]
  assert inputs[-1].dtype == "int32"
  out, _ = run.eval_shape(*inputs)
  assert out.shape == inputs[3].shape


# Rendering.

PROGRAM = dict(
  name="training step",
  backend="batched",
  compiles=True,
  fits=True,
  memory=dict(
    arguments=2**30,
    temporaries=0,
    peak=61 * 2**30,
  ),
  launches=7,
  copies=0,
  unknown_loops=1,
  most_launched={"dot": 7},
  collectives={
    "all-reduce": dict(
      count=1,
      bytes=4,
    )
  },
  trace_seconds=1.0,
  compile_seconds=1.0,
)
REPORT = dict(
  target="h100:1x1x1",
  device="NVIDIA H100 80GB HBM3",
  devices=1,
  memory=80 * 2**30,
  batch_size=16,
  accumulation=1,
  remat="none",
  jax="0",
)


@pytest.mark.parametrize(
  "changes, words",
  [
    ({}, "61.00 GiB of 80.00 GiB: fits, with XLA_PYTHON_CLIENT_MEM_FRACTION"),
    ({}, "7 and 0 copies; at least, 1 loops counted once; dot 7\n"),
    ({}, "all-reduce 1 (4 B)"),
    (dict(fits=False), "of 80.00 GiB: does not fit"),
    (dict(compiles=False, fits=None, reason="why"), "does not compile  why"),
    (dict(compiles=False, fits=False, reason="why"), "does not fit  why"),
  ],
)
def test_rendering(changes, words):
  text = compilers.render(REPORT | dict(programs=[PROGRAM | changes]))
  assert words in text
  assert "compiled but not run" in text


@pytest.mark.parametrize("compiles", [True, False])
def test_status_says_whether_programs_compile(compiles, installed, capsys):
  program = PROGRAM | dict(
    compiles=compiles,
    reason="why",
  )
  installed(answers(result=REPORT | dict(programs=[program])))
  words = "sparse_transformer/explain.py", runs.DIGITS, "--target=h100"

  assert runs.command(*words) == (0 if compiles else 1)
  out, err = capsys.readouterr()
  assert "by batched" in out
  assert compiles or "h100:1x1x1: not every program compiles and fits" in err
