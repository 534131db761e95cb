"""Signals; those of real runs are in test_faults.py."""

import os
import signal
import subprocess
import sys
from concurrent import futures

import pytest
import runs

from sparse_transformer.signals import Signals

BUSY = """
import signal, time
from sparse_transformer.signals import Signals
signal.signal(signal.SIGINT, signal.SIG_DFL)  # which shells may ignore
with Signals() as signals:
  print("busy", flush=True)
  while not signals.name:
    time.sleep(0.01)
  print(signals.name, flush=True)
  time.sleep(1200)
"""


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_the_process(first):
  with subprocess.Popen(
    [sys.executable, "-c", BUSY],
    cwd=runs.REPO,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout.readline() == "busy\n"
    process.send_signal(first)
    assert process.stdout.readline() == f"{first.name}\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_threads_catch_no_signals():
  stopping = signal.SIGTERM, signal.SIGINT
  handlers = [*map(signal.getsignal, stopping)]

  def work():
    with Signals() as signals:
      signals.check()

  with futures.ThreadPoolExecutor() as pool:
    pool.submit(work).result()  # raises what it raised
  assert handlers == [*map(signal.getsignal, stopping)]


def test_what_a_process_was_started_to_ignore_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
  try:
    with Signals() as signals:
      os.kill(os.getpid(), signal.SIGHUP)
      signals.check()
  finally:
    signal.signal(signal.SIGHUP, before)
