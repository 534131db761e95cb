"""The processes of runs: one after the other, or several at the same time.

Each of several has an equal share of the machine: of the cores of a CPU, or of
the GPUs. Their output goes to OUTPUT in the folder of each run.
"""

import multiprocessing
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple

import jax

from sparse_transformer import cli
from sparse_transformer.signals import STOPPED, Signals, Stopped
from sparse_transformer.training import metrics

OUTPUT = "output.txt"
GPUS = "CUDA_VISIBLE_DEVICES"


class Task(NamedTuple):
  """A call of a function, which is found by its name; inputs are pickled."""

  label: str  # printed when it starts
  workdir: pathlib.Path  # of the run; names it in messages
  function: Callable[..., None]
  inputs: tuple[Any, ...]


class Share(NamedTuple):
  """The part of the machine that a process has; the default is all of it."""

  cores: Collection[int] = ()
  variables: Mapping[str, str] = {}  # of its environment


ALONE = (Share(),)


def shares(number: int, budgets: Collection[str]) -> Sequence[Share]:
  """Divides the machine among processes.

  Args:
    number: how many there are at the same time, from --jobs.
    budgets: the kinds of the budgets of runs.

  Raises:
    ValueError: the machine cannot be divided, or the budgets would not be fair.
  """
  if number == 1:
    return ALONE
  platform = jax.default_backend()
  if platform not in ("cpu", "gpu"):
    raise ValueError(
      f"--jobs={number}: processes cannot share a {platform.upper()}; leave it"
      " out"
    )
  gpus = [*map(str, range(jax.local_device_count()))]
  if GPUS in os.environ:
    gpus = os.environ[GPUS].split(",")
  cores = [*range(os.cpu_count() or 1)]
  if hasattr(os, "sched_getaffinity"):  # Linux
    cores = sorted(os.sched_getaffinity(0))
  found = gpus if platform == "gpu" else cores
  if number > len(found):
    kind = "GPUs" if platform == "gpu" else "cores"
    raise ValueError(
      f"--jobs={number} must be at most {len(found)}, the {kind}"
    )
  size = len(found) // number
  starts = range(0, number * size, size)
  if platform == "gpu":
    return [Share((), {GPUS: ",".join(gpus[i : i + size])}) for i in starts]
  if "seconds" in budgets:
    raise ValueError(
      f"--jobs={number}: runs that share a CPU slow each other down, so seconds"
      " are not a fair budget; use processor_seconds, steps or flops"
    )
  # XLA's threads divide sums among them. As many threads as without --jobs give
  # the same bits; where a clock ends runs, there are none to keep.
  exact = not {*budgets} & {*metrics.TIMES}
  variables = {"NPROC": os.environ.get("NPROC", str(len(cores)))}
  return [
    Share(cores[i : i + size], variables if exact else {}) for i in starts
  ]


def devices(share: Share) -> tuple[jax.Device, ...] | None:
  """As many devices as a share has; None for all."""
  if GPUS not in share.variables:
    return None
  return tuple(jax.local_devices()[: share.variables[GPUS].count(",") + 1])


class _Job(NamedTuple):
  task: Task
  share: Share
  process: Any
  output: pathlib.Path | None  # where its output goes
  receiver: Any  # of the reason if it fails


def call(tasks: Sequence[Task], among: Sequence[Share] = ALONE) -> None:
  """Calls functions in new processes, whose memory is freed when they end.

  As many at a time as there are shares. Signals are forwarded to all. After a
  failure, the others that are running go on to their end.

  Raises:
    Stopped: after a signal.
    OSError: a function failed.
  """
  waiting, free = [*tasks], [*among]
  running: list[_Job] = []
  failures: list[str] = []
  with Signals() as signals:
    try:
      while running or (waiting and not failures):
        while waiting and free and not failures and not signals.name:
          share = free.pop(0)
          running.append(_start(waiting.pop(0), share, len(among) > 1))
        connection.wait([job.process.sentinel for job in running], 0.1)
        if signals.name:
          break
        for job in [x for x in running if not x.process.is_alive()]:
          running.remove(job)
          free.append(job.share)
          failures += _failure(job)
    finally:
      for job in running:
        job.process.terminate()
      for job in running:
        job.process.join()
  if signals.name:
    places = " and ".join(f"the run in {job.task.workdir}" for job in running)
    raise Stopped(
      f"{signals.name} in {places or 'no run'}; what it has saved is kept; run"
      " the same command to resume"
    )
  if failures:
    raise OSError(
      f"{'; '.join(failures)}; finished runs are kept; run the same command to"
      " resume"
    )


def _start(task, share, to_file):
  context = multiprocessing.get_context("spawn")
  receiver, sender = context.Pipe(duplex=False)
  output = task.workdir / OUTPUT if to_file else None
  inputs = sender, share, output, task.function, *task.inputs
  process = context.Process(target=_call_and_exit, args=inputs)
  print(task.label, flush=True)
  # Until the process handles signals itself, Ctrl-C is for this one alone.
  handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
  process.start()
  sender.close()  # the other end is the only one, and ends with the process
  signal.signal(signal.SIGINT, handler)
  return _Job(task, share, process, output, receiver)


def _failure(job):
  """A phrase about a process that failed; none if it did not."""
  if job.process.exitcode:
    reason = f"it ended with status {job.process.exitcode}"
    try:
      reason = job.receiver.recv()
    except EOFError:  # it was killed, or has a bug
      reason += f", see {job.output}" if job.output else ""
    yield f"the run in {job.task.workdir} failed: {reason}"


def _call_and_exit(sender, share, output, function, *inputs):
  # In a separate group, so that Ctrl-C cannot act as a second signal.
  os.setpgrp()
  # JAX has not yet looked for its devices.
  os.environ.update(share.variables)
  if share.cores and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, share.cores)
  try:
    if output:
      output.parent.mkdir(parents=True, exist_ok=True)
      with output.open("a") as file:
        for stream in sys.stdout, sys.stderr:
          os.dup2(file.fileno(), stream.fileno())
    function(*inputs)
  except Stopped:
    sys.exit(STOPPED)
  except Exception as error:
    if (reason := cli.describe(error)) is None:
      raise
    sender.send(reason)
    sys.exit(1)
