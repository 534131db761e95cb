"""Signals that ask a run to stop."""

import os
import signal
import threading

from sparse_transformer.data import lazy

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

    return lazy.Lazy(len(items), item)


def _end_at_second(reader):
  """Ends the process at the second signal, whose number is read, as a shell
  says it: status 128 and the number."""
  count = 0
  with open(reader, "rb", buffering=0) as file:
    while number := file.read(1):
      count += number[0] in STOPPING
      if count == 2:
        os._exit(128 + number[0])
