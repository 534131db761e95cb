"""Signals that ask a command to stop."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self, TextIO

# What `kill` and clusters send, Ctrl-C, and what comes when a terminal closes.
STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
AGAIN = "a second SIGTERM or SIGINT ends the process at once"
# The status of a command that one of them stopped.
STOPPED = 128 + signal.SIGINT

# A program that Linux ends with its parent, the process argv[1], begins so.
END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
  PR_SET_PDEATHSIG = 1
  ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != int(sys.argv[1]):  # it ended before that
    sys.exit(1)
"""


class Stopped(Exception):
  """A signal ended a command after it saved its work."""


class Signals:
  """Catches SIGTERM, SIGINT and SIGHUP, which comes when a terminal closes.

  A context manager. The work in progress continues until it reads `name`, the
  signal that was caught, or calls `check`. A second SIGTERM or SIGINT ends the
  process; a second SIGHUP does not, since both the terminal and its shell may
  send one. Only the main thread catches signals, and none that the process was
  started to ignore, as by nohup.

  Python calls handlers between two of its instructions, thus not before a
  compilation ends. Meanwhile, a thread says that a signal came, see `_tell`.
  """

  name: str | None = None
  _handlers: Mapping[signal.Signals, Any] = {}
  _teller: threading.Thread | None = None

  def __enter__(self) -> Self:
    """Installs handlers and, in the main thread, starts the one that tells."""
    # One instance may be entered several times, one after the other.
    self.name = None
    if threading.current_thread() is threading.main_thread():
      self._handlers = {
        number: signal.signal(number, self._catch)
        for number in STOPPING
        if signal.getsignal(number) != signal.SIG_IGN
      }

      # Python's C handler writes each signal's number into this pipe at
      # once, even while XLA compiles; the thread at the other end needs no
      # handler of Python.
      caught, self._came = os.pipe()
      # A handler must never wait for a full pipe.
      os.set_blocking(self._came, False)
      self._before = signal.set_wakeup_fd(self._came)
      self._teller = threading.Thread(target=_tell, args=[caught], daemon=True)
      self._teller.start()
    return self

  def __exit__(self, *_: object) -> None:
    """Puts the handlers back that were there before."""
    for number, handler in self._handlers.items():
      signal.signal(number, handler)
    if self._teller:
      # Closing one end of the pipe ends the thread that reads the other.
      signal.set_wakeup_fd(self._before)
      os.close(self._came)
      self._teller.join()

  def _catch(self, number: int, _: object) -> None:
    """Notes the first signal, and lets a second one end the process."""
    self.name = self.name or signal.Signals(number).name
    if number == signal.SIGHUP:
      _leave_terminal()
      return
    # The next one then has its default action: it ends the process.
    for other in self._handlers.keys() - {signal.SIGHUP}:
      signal.signal(other, signal.SIG_DFL)

  def check(self) -> None:
    """Raises Stopped if a signal was caught."""
    if self.name:
      raise Stopped(self.name)


def _tell(caught: int) -> None:
  """Says of the first signal in a pipe what it does; a second ends the process.

  It comes here only if Python could not handle the first one yet.
  """
  # The handler of the first signal runs only once Python does, so that a second
  # one comes here while both wait: it must end the process without it.
  is_told = False
  with open(caught, "rb", buffering=0) as file:
    while number := file.read(1):
      if number[0] not in STOPPING[:2]:  # not SIGHUP, as nobody would read it
        continue
      if is_told:
        os._exit(128 + number[0])
      is_told = True

      # Not by print: the main thread may hold the lock of standard error.
      name = signal.Signals(number[0]).name
      line = f"{name}: stops after the step or compilation in progress; {AGAIN}"
      with contextlib.suppress(OSError):  # without a terminal
        os.write(2, f"{line}\n".encode())


def _leave_terminal() -> None:
  """Drops what is printed from now on where a closed terminal would fail."""
  for file in filter(None, (sys.__stdout__, sys.__stderr__)):
    try:
      # Writing nothing fails only if the terminal is gone.
      os.write(file.fileno(), b"")
    except OSError:
      silence(file)


def silence(file: TextIO) -> None:
  """Drops what is written to a file from now on."""
  nowhere = os.open(os.devnull, os.O_WRONLY)
  # C++ code, as of XLA, writes to the same number, and is silenced as well.
  os.dup2(nowhere, file.fileno())
  os.close(nowhere)
