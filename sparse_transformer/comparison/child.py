"""Work in a separate process, whose memory is freed when it ends."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from sparse_transformer import cli
from sparse_transformer.signals import Signals, Stopped


def call(task: str, function: Callable[..., None], *inputs: Any) -> None:
  """Calls a function in a new process, to which signals are forwarded.

  Args:
    task: what it does, for messages.
    function: a function of a module.
    *inputs: its arguments, which are pickled.

  Raises:
    Stopped: after a signal.
    OSError: the function failed.
  """
  context = multiprocessing.get_context("spawn")
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(
    target=_call_and_exit, args=(sender, function, *inputs)
  )
  with Signals() as signals:
    # Until the process handles signals itself, Ctrl-C is for this one alone.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.start()
    signal.signal(signal.SIGINT, handler)
    while process.is_alive() and not signals.name:
      process.join(0.1)
    if process.is_alive():
      process.terminate()
      process.join()
  if signals.name:
    raise Stopped(
      f"{signals.name} in {task}; what it has saved is kept; run the same"
      " command to resume"
    )
  if process.exitcode:
    reason = f"it ended with status {process.exitcode}"
    if receiver.poll():
      reason = receiver.recv()
    raise OSError(
      f"{task} failed: {reason}; finished runs are kept; run the same command"
      " to resume"
    )


def _call_and_exit(sender, function, *inputs):
  # In a separate group, so that Ctrl-C cannot act as a second signal.
  os.setpgrp()
  try:
    function(*inputs)
  except Stopped:
    sys.exit(cli.STOPPED)
  except Exception as error:
    if (reason := cli.describe(error)) is None:
      raise
    sender.send(reason)
    sys.exit(1)
