"""Signals; those of real runs are in test_faults.py."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest
from helpers import runs

from sparse_transformer.signals import Signals, Stopped

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


COMPILING = (
  BUSY.partition("  while")[0]
  + """
  import hashlib  # like a compiler, this lets no handler of Python run
  hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
)


def test_signal_is_told_while_a_compiler_runs_and_a_second_one_ends_it():
  with subprocess.Popen(
    [sys.executable, "-c", COMPILING],
    cwd=runs.REPO,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout.readline() == "busy\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGHUP)  # says nothing, and is not the first
    process.send_signal(signal.SIGTERM)
    line = process.stderr.readline()
    assert line.startswith("SIGTERM: stops after the step or compilation in")
    assert line.endswith(
      "a second SIGTERM or SIGINT ends the process at once\n"
    )
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT


def test_signal_is_told_once_and_what_reads_it_ends(capfd):
  threads = threading.active_count()
  for _ in range(2):
    with Signals() as signals:
      os.kill(os.getpid(), signal.SIGTERM)
      with pytest.raises(Stopped, match="^SIGTERM$"):
        signals.check()
    assert capfd.readouterr().err.count("SIGTERM: stops") == 1

  assert threading.active_count() == threads
  assert signal.set_wakeup_fd(-1) == -1


FORKED = """
import multiprocessing, os, signal
from sparse_transformer.signals import Signals
from sparse_transformer.training import kernel_check
def cases():
  os.kill(os.getpid(), signal.SIGTERM)
  return []
with Signals() as signals:
  fork = multiprocessing.get_context("fork")
  child = fork.Process(target=kernel_check._send, args=(None, cases))
  child.start()
  child.join()
  print(child.exitcode, signals.name)
"""


def test_signal_to_the_check_of_kernels_is_not_one_to_the_run():
  """As Ctrl-C reaches both, which would count as two."""
  done = runs.python("-c", FORKED)
  assert done.stdout == "0 None\n"
  assert done.stderr == ""


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
