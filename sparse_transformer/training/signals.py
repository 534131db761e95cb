"""Signals that ask a run to stop."""

import os
import signal
import threading
from collections.abc import Sequence

from sparse_transformer.data import lazy

STOPPING = signal.SIGTERM, signal.SIGINT


class Stopped(Exception):
  """A signal ended a command after it saved its work."""


class Signals:
  """Catches the first SIGTERM or SIGINT; a second one ends the process at once.

  A context manager. The work in progress continues until it reaches a point
  where it can stop: it reads `name`, or calls `check`.

  Attributes:
    name: the signal that was caught, such as "SIGTERM"; None if none was.
  """

  name: str | None

  def __enter__(self) -> "Signals":
    self.name = None
    # While XLA compiles, no Python handler runs, but a thread does.
    reader, self._writer = os.pipe()
    os.set_blocking(self._writer, False)
    self._wakeup = signal.set_wakeup_fd(self._writer)
    threading.Thread(target=_end_at_second, args=[reader], daemon=True).start()
    self._handlers = {
      number: signal.signal(number, self._catch) for number in STOPPING
    }
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._handlers.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._wakeup)
    os.close(self._writer)

  def _catch(self, number: int, frame: object) -> None:
    del frame
    self.name = signal.Signals(number).name

  def check(self) -> None:
    """Raises Stopped if a signal was caught."""
    if self.name:
      raise Stopped(self.name)

  def checked(self, items: Sequence) -> Sequence:
    """Returns the items as a sequence that calls `check` on each access."""

    def item(i):
      self.check()
      return items[i]

    return lazy.Lazy(len(items), item)


def _end_at_second(reader: int) -> None:
  """Ends the process at the second signal, with the usual exit status.

  Args:
    reader: a file descriptor from which each signal is read as one byte.
  """
  count = 0
  with open(reader, "rb", buffering=0) as file:
    while number := file.read(1):
      count += number[0] in STOPPING
      if count == 2:
        os._exit(128 + number[0])
