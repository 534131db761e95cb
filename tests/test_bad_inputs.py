"""Every bad input is answered by one clear line, and leaves nothing.

Before any network is compiled.
"""

import pathlib
import re
import shutil
import sys

import jax
import pytest
from helpers import bad_inputs, runs
from helpers.cases import soak

# Raised by Python when it parses a config file that is not a program.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")
MAX_LINE = 1600  # characters
# Programs that are not of a network: they make random weights, and copy them.
SMALL = {"jit(init)", "jit(copy)"}


@pytest.fixture
def compiled():
  """The names of the programs that are compiled, or read from the cache."""
  names = set()

  def listen(event, _, **about):
    if event.endswith("/backend_compile_duration"):
      names.add(about.get("fun_name"))

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
  "bad",
  [bad if bad.is_quick else soak(bad) for bad in bad_inputs.cases()],
  ids=lambda bad: bad.name,
)
def test_bad_input_is_answered_in_one_line(
  bad, trained, compiled, tmp_path, capfd, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])  # config files add to it
  bad_inputs.prepare(bad.words, trained)
  before = runs.files(tmp_path)
  capfd.readouterr()
  compiled.clear()
  status = runs.command(bad.script, *bad.words)
  out, err = capfd.readouterr()

  assert status == 1, (bad, out, err)
  assert err.count("\n") == 1 and err.endswith("\n"), (bad, err)

  program, _, message = err.partition(": ")
  path = pathlib.Path(bad.script)
  name = path.parent.name if path.stem == "__main__" else path.name

  assert program == name, (bad, err)
  assert re.search(bad.phrase, message), (bad, err)
  assert len(message) < MAX_LINE, (bad, err)
  assert "Traceback" not in out + err, (bad, out, err)
  assert " at 0x" not in err, (bad, err)  # what only a programmer can read
  assert runs.files(tmp_path) == before, bad
  assert compiled <= SMALL, bad
  shutil.rmtree(tmp_path)  # hundreds of copies of a run
