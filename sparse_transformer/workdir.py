"""A workdir in use: who holds it, who asks the run to stop, whole files."""

import contextlib
import datetime
import fcntl
import os
import pathlib
import signal
import socket
import threading

from sparse_transformer import prepared


@contextlib.contextmanager
def hold(workdir):
  """Keeps other runs out of a workdir.

  The lock is the system's: that of a process that died is free. Raises
  ValueError with the process and the host that hold it.
  """
  path = pathlib.Path(workdir) / "lock"
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      file.seek(0)
      holder = file.read().strip() or "another process"
      raise ValueError(
        f"{workdir} is in use by {holder}; wait until it has ended, or use"
        " another --workdir"
      ) from None
    now = datetime.datetime.now().isoformat(" ", "seconds")
    # Who holds it is a help to others only: a full disk is no matter here.
    with contextlib.suppress(OSError):
      file.truncate(0)
      file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
      file.flush()
    yield


def write_text(path, text):
  """Writes a file in one go: a process that is killed leaves old or new."""
  new = path.with_name(f"{path.name}.new")
  new.write_text(text)
  new.replace(path)


STOPPING = signal.SIGTERM, signal.SIGINT


class Stopped(Exception):
  """A run was asked to stop, and has saved what it had."""


class Signals:
  """Notes the first SIGTERM or SIGINT; a second one ends the process at once.

  Work in progress goes on to a place where it can stop: see `check`.
  """

  def __enter__(self):
    self.name = None  # of the signal that came
    # While XLA compiles no handler of Python runs, but a thread does.
    reader, self._writer = os.pipe()
    os.set_blocking(self._writer, False)
    self._wakeup = signal.set_wakeup_fd(self._writer)
    threading.Thread(target=_end_at_second, args=[reader], daemon=True).start()
    self._before = {
      number: signal.signal(number, self._note) for number in STOPPING
    }
    return self

  def __exit__(self, *_):
    for number, handler in self._before.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._wakeup)
    os.close(self._writer)

  def _note(self, number, frame):
    del frame
    self.name = signal.Signals(number).name

  def check(self):
    """Raises Stopped once a signal has come."""
    if self.name:
      raise Stopped(self.name)

  def checked(self, items):
    """The same items; taking one of them checks."""

    def item(i):
      self.check()
      return items[i]

    return prepared.Lazy(len(items), item)


def _end_at_second(reader):
  """Ends the process at the second signal, whose number is read, as a shell
  says it: status 128 and the number."""
  count = 0
  with open(reader, "rb", buffering=0) as file:
    while number := file.read(1):
      count += number[0] in STOPPING
      if count == 2:
        os._exit(128 + number[0])
