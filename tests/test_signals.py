"""Signals in threads; those of real processes are in test_faults.py."""

import os
import signal
import threading

from sparse_transformer.signals import Signals


def test_threads_catch_no_signals_and_leave_no_files_open():
  handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  opened, errors = os.listdir("/proc/self/fd"), []

  def work():
    try:
      with Signals() as signals:
        signals.check()
    except ValueError as error:
      errors.append(error)

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert not errors
  assert os.listdir("/proc/self/fd") == opened
  assert handlers == (
    signal.getsignal(signal.SIGTERM),
    signal.getsignal(signal.SIGINT),
  )
