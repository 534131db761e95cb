"""Signals that ask a command to stop."""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self, TextIO

STOPPING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
STOPPED = 128 + signal.SIGINT  # status of a command that one of them stopped

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
  """

  name: str | None = None
  _handlers: Mapping[signal.Signals, Any] = {}

  def __enter__(self) -> Self:
    self.name = None
    if threading.current_thread() is threading.main_thread():
      self._handlers = {
        number: signal.signal(number, self._catch)
        for number in STOPPING
        if signal.getsignal(number) != signal.SIG_IGN
      }
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._handlers.items():
      signal.signal(number, handler)

  def _catch(self, number: int, _: object) -> None:
    self.name = self.name or signal.Signals(number).name
    if number == signal.SIGHUP:
      _leave_terminal()
      return
    for other in self._handlers.keys() - {signal.SIGHUP}:
      signal.signal(other, signal.SIG_DFL)

  def check(self) -> None:
    """Raises Stopped if a signal was caught."""
    if self.name:
      raise Stopped(self.name)


def _leave_terminal() -> None:
  """Drops what is printed from now on where a closed terminal would fail."""
  for file in filter(None, (sys.__stdout__, sys.__stderr__)):
    try:
      os.write(file.fileno(), b"")
    except OSError:
      silence(file)


def silence(file: TextIO) -> None:
  """Drops what is written to a file from now on."""
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, file.fileno())
  os.close(nowhere)
