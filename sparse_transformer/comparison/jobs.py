"""Commands in processes, which end when this one does, however it ends."""

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

from sparse_transformer import atomic
from sparse_transformer.signals import END_WITH_PARENT, Signals, Stopped
from sparse_transformer.training.stopwatch import TIMES

GPUS = "CUDA_VISIBLE_DEVICES"
OUTPUT = "output.txt"  # in a workdir: what one of several processes prints
POLL_SECONDS = 0.05
# Becomes a command that uses some cores.
CHILD = f"""{END_WITH_PARENT}
parent, cores, *command = sys.argv[1:]
if cores and sys.platform == "linux":
  os.sched_setaffinity(0, {{*map(int, cores.split(","))}})
os.execv(command[0], command)
"""


class Job(NamedTuple):
  """A command that runs in a process of its own."""

  label: str  # printed when it starts
  workdir: pathlib.Path  # names it in messages
  command: Sequence[str]
  is_failure: Callable[[], bool] = lambda: True  # if its status is not 0


class Share(NamedTuple):
  """The part of the machine that a process has; the default is all of it."""

  cores: Collection[str] = ()
  variables: Mapping[str, str] = {}  # of its environment


ALONE = (Share(),)


def share_machine(number: int, budgets: Collection[str]) -> Sequence[Share]:
  """Divides the machine among --jobs=number runs with these kinds of budgets.

  Raises ValueError if it cannot be divided, or budgets would not be fair.
  """
  if number == 1:
    return ALONE
  platform, flag = jax.default_backend(), f"--jobs={number}"
  if platform not in ("cpu", "gpu"):
    raise ValueError(f"{flag}: processes cannot share a {platform.upper()}")
  if platform == "gpu":
    indices = ",".join(map(str, range(jax.local_device_count())))
    units = os.environ.get(GPUS, indices).split(",")
  elif sys.platform == "linux":
    units = [*map(str, sorted(os.sched_getaffinity(0)))]
  else:
    units = [*map(str, range(os.cpu_count() or 1))]
  if number > len(units):
    kind = "GPUs" if platform == "gpu" else "cores"
    raise ValueError(f"{flag} must be at most {len(units)}, the {kind}")
  size = len(units) // number
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
  threads = {"NPROC": os.environ.get("NPROC", str(len(units)))}
  return [Share(x, {} if {*budgets} & {*TIMES} else threads) for x in parts]


def call(jobs: Sequence[Job], among: Sequence[Share] = ALONE) -> None:
  """Runs commands, as many at a time as there are shares.

  With several shares, each command writes its output to `OUTPUT`. A signal is
  forwarded to running commands, and raises Stopped. After a failure no other
  command starts, and an OSError is raised once the running ones end.
  """
  waiting, free = [*jobs], [*among]
  running: dict[subprocess.Popen, tuple[Job, Share]] = {}
  failures: list[str] = []
  # Where it is ignored, as under some supervisors, no process has a status.
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  with Signals() as signals:
    try:
      while (running or (waiting and not failures)) and not signals.name:
        while waiting and free and not failures:
          job, share = waiting.pop(0), free.pop(0)
          running[_start(job, share, len(among) > 1)] = job, share
        time.sleep(POLL_SECONDS)
        for process in [x for x in running if x.poll() is not None]:
          job, share = running.pop(process)
          free.append(share)
          if process.returncode and job.is_failure():
            failures.append(_reason(job, process.returncode, len(among) > 1))
    finally:
      for process in running:
        process.terminate()
      for process in running:
        process.wait()
  if signals.name:
    runs = (f"the run in {x.workdir}" for x, _ in running.values())
    raise Stopped(
      f"{signals.name} in {' and '.join(runs) or 'no run'}; what it has saved"
      " is kept; run the same command to resume"
    )
  if failures:
    raise OSError(
      f"{'; '.join(failures)}; finished runs are kept; run the same command to"
      " resume"
    )


def _start(job, share, writes):
  """Starts a job; Ctrl-C is for this process alone, which forwards it."""
  print(job.label, flush=True)
  start = sys.executable, "-ISc", CHILD, str(os.getpid()), ",".join(share.cores)
  with contextlib.ExitStack() as stack:
    output = None
    if writes:
      job.workdir.mkdir(parents=True, exist_ok=True)
      output = stack.enter_context(atomic.appending(job.workdir / OUTPUT))
    return subprocess.Popen(
      [*start, *job.command],
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=output,
      env=os.environ | share.variables,
      process_group=0,
    )


def _reason(job, status, writes):
  """A phrase about a command that failed, with the last line that it wrote."""
  reason = f"it ended with status {status}"
  if status < 0:
    reason = f"{signal.Signals(-status).name} ended it"
    if status == -signal.SIGKILL:
      reason += ", as the system does when memory runs out"
  if writes:
    path = job.workdir / OUTPUT
    lines = path.read_text(errors="replace").splitlines()
    reason += f", see {path}: {lines[-1] if lines else 'it is empty'}"
  return f"the run in {job.workdir} failed: {reason}"
