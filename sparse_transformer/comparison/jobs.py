"""Commands in processes: one after the other, or several at the same time.

Each of several has an equal share of the machine: of the cores of a CPU, or of
the GPUs. However this process ends, so do they.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import jax

from sparse_transformer.comparison import child
from sparse_transformer.signals import Signals, Stopped
from sparse_transformer.training.stopwatch import TIMES

GPUS = "CUDA_VISIBLE_DEVICES"
POLL_SECONDS = 0.05


class Job(NamedTuple):
  """A command that runs in a process of its own."""

  label: str  # printed when it starts
  workdir: pathlib.Path  # names it in messages
  command: Sequence[str]
  output: pathlib.Path | None = None  # to which what it prints is added
  is_failure: Callable[[], bool] = lambda: True  # if its status is not 0


class Share(NamedTuple):
  """The part of the machine that a process has; the default is all of it."""

  cores: Collection[int] = ()
  variables: Mapping[str, str] = {}  # of its environment


ALONE = (Share(),)


def share_machine(number: int, budgets: Collection[str]) -> Sequence[Share]:
  """Divides the machine among processes that run at the same time.

  Args:
    number: how many there are, from --jobs.
    budgets: the kinds of the budgets of runs.

  Raises:
    ValueError: the machine cannot be divided, or the budgets would not be fair.
  """
  if number == 1:
    return ALONE
  platform = jax.default_backend()
  if platform == "gpu":
    indices = ",".join(map(str, range(jax.local_device_count())))
    units = os.environ.get(GPUS, indices).split(",")
  elif sys.platform == "linux":
    units = [*map(str, sorted(os.sched_getaffinity(0)))]
  else:
    units = [*map(str, range(os.cpu_count() or 1))]
  size, flag = len(units) // number, f"--jobs={number}"
  if platform not in ("cpu", "gpu"):
    raise ValueError(f"{flag}: processes cannot share a {platform.upper()}")
  if not size:
    kind = "GPUs" if platform == "gpu" else "cores"
    raise ValueError(f"{flag} must be at most {len(units)}, the {kind}")
  parts = [units[i * size :][:size] for i in range(number)]
  if platform == "gpu":
    return [Share(variables={GPUS: ",".join(part)}) for part in parts]
  if "seconds" in budgets:
    raise ValueError(
      f"{flag}: runs that share a CPU slow each other down, so seconds are not"
      " a fair budget; use processor_seconds or steps"
    )
  # XLA's threads divide sums among them. As many threads as without --jobs give
  # the same bits; where a clock ends runs, there are none to keep.
  exact = not {*budgets} & {*TIMES}
  variables = {"NPROC": os.environ.get("NPROC", str(len(units)))}
  return [Share([*map(int, x)], variables if exact else {}) for x in parts]


class _Running(NamedTuple):
  job: Job
  share: Share
  process: subprocess.Popen


def call(jobs: Sequence[Job], among: Sequence[Share] = ALONE) -> None:
  """Runs commands, as many at a time as there are shares.

  A signal is forwarded to those that are running. After a failure they go on to
  their end, and no other starts.

  Raises:
    Stopped: after a signal.
    OSError: a command failed.
  """
  waiting, free = [*jobs], [*among]
  running: list[_Running] = []
  failures: list[str] = []
  # Where it is ignored, as under some supervisors, no process has a status.
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  with Signals() as signals:
    try:
      while (running or (waiting and not failures)) and not signals.name:
        while waiting and free and not failures:
          running.append(_start(waiting.pop(0), free.pop(0)))
        time.sleep(POLL_SECONDS)
        for one in [x for x in running if x.process.poll() is not None]:
          running.remove(one)
          free.append(one.share)
          if one.process.returncode and one.job.is_failure():
            failures.append(_reason(one.job, one.process.returncode))
    finally:
      for one in running:
        one.process.terminate()
      for one in running:
        one.process.wait()
  if signals.name:
    places = " and ".join(f"the run in {x.job.workdir}" for x in running)
    raise Stopped(
      f"{signals.name} in {places or 'no run'}; what it has saved is kept; run"
      " the same command to resume"
    )
  if failures:
    raise OSError(
      f"{'; '.join(failures)}; finished runs are kept; run the same command to"
      " resume"
    )


def _start(job, share):
  """Starts a job; Ctrl-C is for this process alone, which forwards it."""
  print(job.label, flush=True)
  cores = ",".join(map(str, share.cores))
  start = sys.executable, "-IS", child.__file__, str(os.getpid()), cores
  if job.output:
    job.output.parent.mkdir(parents=True, exist_ok=True)
  with job.output.open("a") if job.output else contextlib.nullcontext() as file:
    process = subprocess.Popen(
      [*start, *job.command],
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=file,
      env=os.environ | share.variables,
      process_group=0,
    )
  return _Running(job, share, process)


def _reason(job, status):
  """A phrase about a command that failed, with the last line that it wrote."""
  reason = f"it ended with status {status}"
  if status < 0:
    reason = f"{signal.Signals(-status).name} ended it"
  if job.output:
    lines = job.output.read_text(errors="replace").split("\n")
    last = next(filter(None, reversed(lines)), "it printed nothing")
    reason += f", see {job.output}: {last}"
  return f"the run in {job.workdir} failed: {reason}"
