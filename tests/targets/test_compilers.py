"""Tests of the processes that compile, with scripts in place of them."""

import json
import shlex
import stat

import pytest

from configs import digits
from sparse_transformer.targets import advice, catalogue, compilers, rendering

H100 = catalogue.parse("h100")


@pytest.fixture
def installed(tmp_path, monkeypatch):
  """A function that installs a shell script as the interpreter for CUDA."""
  monkeypatch.setenv(compilers.VARIABLE, str(tmp_path))
  path = tmp_path / "cuda" / "bin" / "python"

  def install(script):
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path

  return install


def echo(**answer):
  return f"echo {shlex.quote(json.dumps(answer))}"


def test_missing_compiler_names_the_command_that_installs_it(
  tmp_path, monkeypatch
):
  monkeypatch.setenv(compilers.VARIABLE, str(tmp_path))
  for compiler in ("cuda", "tpu"):
    with pytest.raises(ValueError, match="`make targets`"):
      compilers.python(compiler)


def test_request_answer_and_progress(installed, tmp_path, capsys):
  path = installed(
    f"cat > {tmp_path}/request\n"
    f"echo $JAX_PLATFORMS $XLA_FLAGS > {tmp_path}/env\n"
    f"{echo(doing='compiling')}\n{echo(result=dict(launches=3))}"
  )
  assert compilers.python("cuda") == path
  result = compilers.compile_for(H100, digits.get_config(), "attention")
  assert result == dict(launches=3)
  request = json.loads((tmp_path / "request").read_text())
  assert (request["target"], request["part"]) == ("h100:1x1x1", "attention")
  assert request["config"]["data"]["name"] == "digits"
  settings = (tmp_path / "env").read_text()
  assert settings.startswith("cpu ") and "--xla_dump_to=" in settings
  lines = capsys.readouterr().err.splitlines()
  assert [line.rpartition(" (")[0] for line in lines] == [
    "h100:1x1x1: starting",
    "h100:1x1x1: compiling",
  ]


def test_error_of_a_request(installed):
  installed(f"cat > /dev/null\n{echo(error='no such topology')}\nsleep 60")
  with pytest.raises(ValueError, match="^no such topology$"):
    compilers.compile_for(H100, digits.get_config())


def test_crash_shows_what_was_logged(installed):
  installed("cat > /dev/null\necho 'assembler: not found' >&2\nexit 3")
  with pytest.raises(RuntimeError, match="status 3:\nassembler: not found"):
    compilers.compile_for(H100, digits.get_config())


def test_process_that_is_killed_is_one_line(installed):
  installed("cat > /dev/null\nkill -9 $$")
  with pytest.raises(OSError, match="ended by signal 9; .* memory"):
    compilers.compile_for(H100, digits.get_config())


# Advice.


def program(gib, memory=80):
  """A report of one program; None for the memory of one that is rejected."""
  sizes = dict(arguments=2**30, temporaries=0, peak=int(gib * 2**30))
  return dict(
    name="training step",
    executor="batched",
    compiles=True,
    fits=gib <= memory,
    memory=sizes,
    launches=7,
    copies=0,
    unknown_loops=0,
    most_launched={"dot": 7},
    collectives={"all-reduce": dict(count=1, bytes=4)},
    kernels=[],
    modelled=dict(seconds=0.5, without=2),
    trace_seconds=1.0,
    compile_seconds=1.0,
  )


def report(config, target, gib):
  return dict(
    target=str(target),
    device="NVIDIA H100 80GB HBM3",
    devices=target.num_devices,
    memory=target.memory,
    part="step",
    batch_size=config.train.batch_size,
    accumulation=config.train.accumulation,
    remat=config.model.remat,
    jax="0",
    programs=[program(gib)],
  )


def advise(monkeypatch, gib, remat="none"):
  """Advice for a program of `gib` GiB, if memory follows a simple rule."""

  def compile_for(target, config, part):
    sequences = 16 / target.num_devices / config.train.accumulation
    less = 4 if config.model.remat == "block" else 1
    return report(config, target, 1 + (gib - 1) * sequences / 16 / less)

  monkeypatch.setattr(advice, "compile_for", compile_for)
  config = digits.get_config()
  config.train.batch_size, config.model.remat = 16, remat
  first = compile_for(H100, config, "step")
  result = advice.advise(H100, config, first)
  text = rendering.render(first | dict(advice=result))
  assert ("nothing that was tried fits" in text) is not result["found"]
  assert config.model.remat == remat and config.train.accumulation == 1
  return [(x["target"], x["changes"]) for x in result["tried"]], text


def test_advice_is_the_first_change_that_fits(monkeypatch):
  tried, text = advise(monkeypatch, 200)
  assert tried == [("h100:1x1x1", {"model.remat": "block"})]
  assert "with --config.model.remat=block: 50.75 GiB" in text
  # The estimate of memory says how much accumulation is needed.
  tried, _ = advise(monkeypatch, 1000)
  changes = {"model.remat": "block", "train.accumulation": 4}
  assert tried[1:] == [("h100:1x1x1", changes)]


def test_advice_for_attention_takes_arguments_to_depend_on_the_batch():
  config = digits.get_config()
  failed = report(config, H100, 140)
  failed["programs"][0]["memory"]["arguments"] = 70 * 2**30
  step, attention = (
    advice._accumulations(H100, config, failed | dict(part=part))
    for part in ("step", "attention")
  )
  assert (step, attention) == ([16], [2, 16])


def test_advice_ends(monkeypatch):
  tried, text = advise(monkeypatch, 1e6, remat="block")
  assert tried == [
    ("h100:1x1x1", {"train.accumulation": 16}),
    ("h100:1x1x2", {}),
    ("h100:1x1x4", {}),
    ("h100:1x1x8", {}),
  ]


def test_rendering_of_a_rejected_program():
  config = digits.get_config()
  failed = report(config, H100, 1)
  failed["programs"] = [
    dict(
      name="training step",
      executor="batched",
      compiles=False,
      fits=None,
      reason="too many registers",
    )
  ]
  text = rendering.render(failed)
  assert "does not compile  too many registers" in text
  assert "Compiled for, not run on" in text
