"""Every bad input is answered by one clear line, soon, and leaves nothing."""

import contextlib
import pathlib
import re
import resource
import shutil
import signal
import sys

import bad_inputs
import pytest
import runs

# Raised by Python when it parses a config file that is not a program.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")
SECONDS = 10  # for an answer
MEMORY = 2**32  # bytes that an answer may take
MAX_LINE = 1600  # characters


class Unanswered(BaseException):
  """No answer in time."""


@contextlib.contextmanager
def limits():
  """Ends what takes too long or too much memory, before the machine suffers."""

  def stop(number, frame):
    raise Unanswered(f"no answer in {SECONDS} seconds")

  handler = signal.signal(signal.SIGALRM, stop)
  signal.alarm(SECONDS)
  old = resource.getrlimit(resource.RLIMIT_AS)
  if sys.platform == "linux":
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (size, old[1]))
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, old)


@pytest.mark.parametrize(
  "bad",
  [  # one case in five is quick enough
    pytest.param(bad, id=bad.name, marks=[pytest.mark.soak] * (number % 5 > 0))
    for number, bad in enumerate(bad_inputs.cases())
  ],
)
def test_bad_input_is_answered_in_one_line(
  bad, trained, tmp_path, capfd, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])  # config files add to it
  bad_inputs.prepare(bad.words, trained)
  before = runs.files(tmp_path)
  capfd.readouterr()
  with limits():
    status = runs.command(bad.script, *bad.words)
  out, err = capfd.readouterr()
  assert status == 1, (bad, out, err)
  assert err.count("\n") == 1 and err.endswith("\n"), (bad, err)
  program, _, message = err.partition(": ")
  assert program == pathlib.Path(bad.script).name, (bad, err)
  assert re.search(bad.phrase, message), (bad, err)
  assert len(message) < MAX_LINE, (bad, err)
  assert "Traceback" not in out + err, (bad, out, err)
  assert " at 0x" not in err, (bad, err)  # what only a programmer can read
  assert runs.files(tmp_path) == before, bad
  shutil.rmtree(tmp_path)  # hundreds of copies of a run
