"""Every bad input is answered by one clear line, soon, and leaves nothing."""

import pathlib
import re
import shutil
import signal
import sys

import bad_inputs
import pytest
import runs

# Raised by Python when it parses a config file that is not a program.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")
SECONDS = 10  # for an answer
MAX_LINE = 1600  # characters


class Unanswered(BaseException):
  """No answer in time."""


@pytest.fixture(autouse=True)
def alarm():
  """Ends what takes too long."""

  def stop(number, frame):
    raise Unanswered(f"no answer in {SECONDS} seconds")

  handler = signal.signal(signal.SIGALRM, stop)
  yield
  signal.alarm(0)
  signal.signal(signal.SIGALRM, handler)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("bad", [*bad_inputs.cases()], ids=lambda bad: bad.name)
def test_bad_input_is_answered_in_one_line(
  bad, trained, tmp_path, capfd, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])  # config files add to it
  bad_inputs.prepare(bad.words, trained)
  before = runs.files(tmp_path)
  capfd.readouterr()
  signal.alarm(SECONDS)
  status = runs.command(bad.script, *bad.words)
  signal.alarm(0)
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
  shutil.rmtree(tmp_path)  # hundreds of copies of a run
