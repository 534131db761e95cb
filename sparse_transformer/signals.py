"""Signals that ask a run to stop."""

import os
import pathlib
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self

STOPPING = signal.SIGTERM, signal.SIGINT
STOPPED = 128 + signal.SIGINT  # status of a command that either of them stopped


class Stopped(Exception):
  """A signal ended a command after it saved its work."""


class Signals:
  """Catches the first SIGTERM or SIGINT; a second one ends the process at once.

  A context manager. The work in progress continues until it reads `name`, or
  calls `check`. In other threads than the main one, nothing is caught.

  Attributes:
    name: the signal that was caught, such as "SIGTERM"; None if none was.
    expendable: whether the work so far can be lost, so that the first SIGTERM
      ends the process at once, but not SIGINT, which interrupts notebooks.
  """

  name: str | None = None
  expendable = False
  _handlers: Mapping[signal.Signals, Any] = {}

  def __enter__(self) -> Self:
    self.name = None
    if threading.current_thread() is not threading.main_thread():
      return self
    # While XLA compiles, no Python handler runs, but a thread does.
    reader, self._writer = os.pipe()
    os.set_blocking(self._writer, False)
    self._wakeup = signal.set_wakeup_fd(self._writer)
    threading.Thread(target=self._watch, args=[reader], daemon=True).start()
    self._handlers = {
      number: signal.signal(number, self._catch) for number in STOPPING
    }
    return self

  def __exit__(self, *_: object) -> None:
    if self._handlers:
      for number, handler in self._handlers.items():
        signal.signal(number, handler)
      signal.set_wakeup_fd(self._wakeup)
      os.close(self._writer)

  def _catch(self, number: int, frame: object) -> None:
    del frame
    self.name = signal.Signals(number).name

  def _watch(self, reader: int) -> None:
    """Ends the process at the second signal, or earlier if it is expendable."""
    count = 0
    with open(reader, "rb", buffering=0) as file:
      while byte := file.read(1):
        number = byte[0]
        count += number in STOPPING
        if self.expendable and number == signal.SIGTERM:
          program = pathlib.Path(sys.argv[0]).name
          line = (
            f"{program}: stopped: SIGTERM before the first step, with nothing"
            " to save; run the same command again\n"
          )
          os.write(2, line.encode())  # print may wait for the main thread
          os._exit(STOPPED)
        if count == 2:
          os._exit(128 + number)

  def check(self) -> None:
    """Raises Stopped if a signal was caught."""
    if self.name:
      raise Stopped(self.name)
