"""Runs avoid kernels that are wrong, without losing a step."""

import re
import signal

import jax
import numpy as np
import pytest
from helpers import backend_laws as laws, kernel_faults, runs
from helpers.cases import soak

from sparse_transformer.attention import registry, verification, verify_request
from sparse_transformer.model import normalization
from sparse_transformer.patterns import Causal
from sparse_transformer.training import kernel_check
from sparse_transformer.training.experiment import Experiment

ENDS = {
  "hang": f"it took more than {kernel_check.MAX_SECONDS} seconds",
  "crash": f"its process ended with status -{int(signal.SIGSEGV)}",
}
FAULTS = {
  "edge": r"error of out 0\.\d+, above 2e-05",
  "lse": r"error of lse 0\.001, above 0\.0001",
  "gradient": r"error of dv nan, above 2e-05",
  "lowering": "NotImplementedError: .*'unlowered'",
  "run_time": ".*illegal address",
  "memory": ".*Out of memory.*; the next run checks it again$",
}


@pytest.fixture
def check(monkeypatch, tmp_path):
  """Checks the kernels of a run; returns the backends that were verified."""
  jax.devices()  # in use, so that this process checks
  driver = tmp_path / "driver"
  driver.write_text(str(tmp_path))
  monkeypatch.setattr(kernel_check, "DRIVER", driver)
  backends = []

  def counted(*args):
    report = verify_request(*args)
    backends.append(report.backend)
    return report

  monkeypatch.setattr(kernel_check, "verify_request", counted)

  def check(**changes):
    backends.clear()
    kernel_check.avoid_wrong(Experiment(runs.tiny(**changes)))
    return [*backends]

  yield check
  for name in {*registry.BACKENDS} & {*ENDS, *FAULTS}:
    registry.unregister(name)


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_kernel_is_avoided_in_a_line(name, check, capfd):
  kernel_faults.register(name)
  assert check() == [name, "streamed"]
  err = capfd.readouterr().err
  (line,) = [x for x in err.splitlines() if x.startswith("warning")]
  begin = f"warning: attention by streamed, not {name}, which failed its check"
  assert re.match(f"{begin}: {FAULTS[name]}", line)
  assert (name in check()) == (name == "memory")  # no verdict is kept


def test_check_is_made_once_per_device_driver_and_version(check, monkeypatch):
  kernel_faults.register("lse")
  assert check() == ["lse", "streamed"]
  assert check() == []
  assert "lse" in registry.avoided()
  assert len(check(**{"attention.pattern": "Local(5)"})) == 2
  monkeypatch.setattr(jax, "__version__", "0")
  assert len(check()) == 2
  kernel_check.DRIVER.write_text(str(kernel_check.DRIVER))
  assert len(check()) == 2
  assert check() == []


def test_right_kernel_is_kept_and_check_can_be_skipped(check):
  assert check() == []  # of plain XLA
  kernel_faults.register("none")
  assert check(**{"attention.check": False}) == []
  assert check(**{"attention.backend": "none"}) == []
  assert check() == ["none"]
  assert not registry.avoided()
  registry.unregister("none")


def test_wrong_kernels_of_norms_are_avoided_in_a_line(
  check, monkeypatch, capfd
):
  name = normalization.NAME
  avoided = lambda x, remat: registry.avoided().get(name)
  verified = []

  def verify(*question):
    verified.append(question)
    return ["error of dx 1, above 2e-05"]

  monkeypatch.setattr(normalization, "unsupported", avoided)
  monkeypatch.setattr(normalization, "verify", verify)
  for _ in range(2):  # the second time, from the file of the verdict
    check()
    err = capfd.readouterr().err
    (line,) = [x for x in err.splitlines() if x.startswith("warning")]
    begin = f"warning: norms by plain XLA, not {name}, which failed its check"
    assert line.startswith(f"{begin}: error of dx 1, above 2e-05; ")
  assert verified == [((1, 64, 16), "float32", 0.0)]
  assert name in registry.avoided()

  check(**{"attention.check": False})
  assert not registry.avoided()


def test_what_is_drawn_fits_in_16_bits():
  request = laws.request_for(
    (Causal(),),
    30_000,
    qk_width=1,
    value_width=1,
    dtype="float16",
  )
  for array in verification.draw(request):
    assert np.isfinite(array).all()


@pytest.mark.parametrize("names", [[*ENDS], soak([*ENDS, *FAULTS])])
def test_run_goes_on_without_kernels_that_are_wrong(names, tmp_path):
  """In a process that is forked before devices are used."""
  (tmp_path / "driver").write_text(str(tmp_path))
  words = (
    kernel_faults.__file__,
    ",".join(names),
    runs.DIGITS,
    *runs.flags_of(**{"train.steps": 2}),
    f"--workdir={tmp_path}/run",
  )
  settings = runs.environment(1) | {"DRIVER": tmp_path / "driver"}
  done = runs.python(*words, **settings)

  assert done.returncode == 0, done.stderr
  assert "attention by streamed" in done.stdout
  assert "step 2" in re.sub(" +", " ", done.stdout)
  lines = [x for x in done.stderr.splitlines() if x.startswith("warning: ")]
  for name, line in zip(reversed(names), lines, strict=True):
    assert re.search(f"not {name}, .*: {(ENDS | FAULTS)[name]}", line)
