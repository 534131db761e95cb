"""Signals in threads; those of real processes are in test_faults.py."""

import os
import signal
import threading

from sparse_transformer.signals import Signals


def test_threads_catch_no_signals_and_leave_no_files_open():
  handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  errors, leaves_none = [], []

  def work():
    try:
      with Signals() as signals:
        signals.check()
    except ValueError as error:
      errors.append(error)

  for _ in range(5):  # other threads may open and close files meanwhile
    opened = os.listdir("/proc/self/fd")
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    leaves_none.append(os.listdir("/proc/self/fd") == opened)
  assert not errors and any(leaves_none)
  assert handlers == (
    signal.getsignal(signal.SIGTERM),
    signal.getsignal(signal.SIGINT),
  )


def test_what_a_process_was_started_to_ignore_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
  try:
    with Signals() as signals:
      os.kill(os.getpid(), signal.SIGHUP)
      signals.check()
  finally:
    signal.signal(signal.SIGHUP, before)
