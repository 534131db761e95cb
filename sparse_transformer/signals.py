"""Signals that ask a command to stop."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self, TextIO

# Sent by `kill` and by clusters, by Ctrl-C, and when a terminal closes.
STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
AGAIN = "a second SIGTERM or SIGINT ends the process at once"
# Exit status of a command that one of these signals stopped.
STOPPED = 128 + signal.SIGINT

# Start of a program that should end when its parent, the process argv[1], ends.
# This works on Linux only.
END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
  PR_SET_PDEATHSIG = 1
  ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != int(sys.argv[1]):  # the parent has already ended
    sys.exit(1)
"""


class Stopped(Exception):
  """Raised when a signal stops a command, after its work was saved."""


class Signals:
  """A context manager that catches SIGTERM, SIGINT and SIGHUP.

  A caught signal does not interrupt the work in progress. The work notices the
  signal when it reads `name`, the name of the signal, or calls `check`. A
  second SIGTERM or SIGINT ends the process. A second SIGHUP does not end it:
  when a terminal closes, both the terminal and its shell may send a SIGHUP.
  Signals are caught only if the context is entered in the main thread. Signals
  that the process ignores from its start, as under nohup, stay ignored.

  Python runs signal handlers only between bytecode instructions, so a handler
  has to wait until a compilation ends. Until then, a thread reports the signal,
  see `_tell`.
  """

  name: str | None = None
  _handlers: Mapping[signal.Signals, Any] = {}
  _teller: threading.Thread | None = None

  def __enter__(self) -> Self:
    """In the main thread, installs handlers and starts the reporting thread."""
    # An instance may be entered again after it was left.
    self.name = None
    if threading.current_thread() is threading.main_thread():
      self._handlers = {
        number: signal.signal(number, self._catch)
        for number in STOPPING
        if signal.getsignal(number) != signal.SIG_IGN
      }

      # Python's C-level handler writes the number of each signal into this
      # pipe at once, even while XLA compiles. So the thread that reads the
      # pipe does not have to wait for a Python-level handler.
      caught, self._came = os.pipe()
      # The handler must not block if the pipe is full.
      os.set_blocking(self._came, False)
      self._before = signal.set_wakeup_fd(self._came)
      self._teller = threading.Thread(target=_tell, args=[caught], daemon=True)
      self._teller.start()
    return self

  def __exit__(self, *_: object) -> None:
    """Restores the previous handlers and stops the reporting thread."""
    for number, handler in self._handlers.items():
      signal.signal(number, handler)
    if self._teller:
      # The reading thread ends when the writing end of the pipe is closed.
      signal.set_wakeup_fd(self._before)
      os.close(self._came)
      self._teller.join()

  def _catch(self, number: int, _: object) -> None:
    """Records the first signal, and lets a second one end the process."""
    self.name = self.name or signal.Signals(number).name
    if number == signal.SIGHUP:
      _leave_terminal()
      return
    # Restore the default action, so that the next signal ends the process.
    for other in self._handlers.keys() - {signal.SIGHUP}:
      signal.signal(other, signal.SIG_DFL)

  def check(self) -> None:
    """Raises Stopped if a signal was caught."""
    if self.name:
      raise Stopped(self.name)


def _tell(caught: int) -> None:
  """Reports the first signal read from a pipe; ends the process at a second.

  Args:
    caught: the file descriptor of the pipe, from which each signal is read as a
      byte.
  """
  # After the first signal, Python's handler restores default actions, so that a
  # second signal ends the process. During a compilation, the handler cannot run
  # yet; the second signal then arrives here and must end the process directly.
  is_told = False
  with open(caught, "rb", buffering=0) as file:
    while number := file.read(1):
      # Do not report SIGHUP, because the terminal is gone.
      if number[0] not in STOPPING[:2]:
        continue
      if is_told:
        os._exit(128 + number[0])
      is_told = True

      # Do not use print, because the main thread may hold the lock of standard
      # error.
      name = signal.Signals(number[0]).name
      line = f"{name}: stops after the step or compilation in progress; {AGAIN}"
      with contextlib.suppress(OSError):  # standard error may be closed
        os.write(2, f"{line}\n".encode())


def _leave_terminal() -> None:
  """Drops later output to standard streams whose terminal has closed."""
  for file in filter(None, (sys.__stdout__, sys.__stderr__)):
    try:
      # Writing zero bytes fails only if the terminal is closed.
      os.write(file.fileno(), b"")
    except OSError:
      silence(file)


def silence(file: TextIO) -> None:
  """Redirects a file to the null device, so that later output is dropped."""
  nowhere = os.open(os.devnull, os.O_WRONLY)
  # Redirecting the descriptor also silences C++ code such as XLA, which writes
  # to it directly.
  os.dup2(nowhere, file.fileno())
  os.close(nowhere)
