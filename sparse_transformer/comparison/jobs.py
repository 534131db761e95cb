"""Commands in processes, which end when this one does, however it ends."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import NamedTuple

import jax

from sparse_transformer import atomic
from sparse_transformer.signals import END_WITH_PARENT, Signals, Stopped
from sparse_transformer.training.stopwatch import TIMES

GPUS = "CUDA_VISIBLE_DEVICES"
# The file in a workdir with what one of several processes prints.
OUTPUT = "output.txt"
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


class MachinePart(NamedTuple):
  """The part of the machine that a process has; the default is all of it."""

  cores: Collection[str] = ()
  variables: Mapping[str, str] = {}  # of its environment


ALONE = (MachinePart(),)


def divide_machine(number: int, budgets: Set[str]) -> Sequence[MachinePart]:
  """Divides the machine among --jobs=number runs with these kinds of budgets.

  Raises ValueError if it cannot be divided, or budgets would not be fair.
  """
  if number == 1:
    return ALONE
  flag = f"--jobs={number}"
  platform = jax.default_backend()
  if platform not in ("cpu", "gpu"):
    raise ValueError(f"{flag}: processes cannot share a {platform.upper()}")

  units = _gpus() if platform == "gpu" else _cores()
  if number > len(units):
    kind = "GPUs" if platform == "gpu" else "cores"
    raise ValueError(f"{flag} must be at most {len(units)}, the {kind}")
  if platform == "cpu" and "seconds" in budgets:
    raise ValueError(
      f"{flag}: runs that share a CPU slow each other down, so seconds are not"
      " a fair budget; use processor_seconds or steps"
    )

  # XLA's threads divide sums among them. As many threads as without --jobs give
  # the same bits; where a clock ends runs, there are none to keep.
  threads = {"NPROC": os.environ.get("NPROC", str(len(units)))}
  if not budgets.isdisjoint(TIMES):
    threads = {}
  size = len(units) // number
  parts = []
  for start in range(0, number * size, size):
    chosen = units[start : start + size]
    if platform == "gpu":
      parts.append(MachinePart(variables={GPUS: ",".join(chosen)}))
    else:
      parts.append(MachinePart(chosen, threads))
  return parts


def _gpus():
  indices = ",".join(map(str, range(jax.local_device_count())))
  return os.environ.get(GPUS, indices).split(",")


def _cores():
  cores: Collection[int] = range(os.cpu_count() or 1)
  if sys.platform == "linux":
    cores = sorted(os.sched_getaffinity(0))
  return [str(core) for core in cores]


def call(jobs: Sequence[Job], parts: Sequence[MachinePart] = ALONE) -> None:
  """Runs commands, as many at a time as there are parts of the machine.

  With several parts, each command writes its output to `OUTPUT`. A signal is
  forwarded to running commands, and raises Stopped. After a failure no other
  command starts, and an OSError is raised once the running ones end.
  """
  waiting = [*jobs]
  free = [*parts]
  writes = len(parts) > 1
  running: dict[subprocess.Popen, tuple[Job, MachinePart]] = {}
  failures: list[str] = []
  # Where it is ignored, as under some supervisors, no process has a status.
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  with Signals() as signals, _terminated(running):
    while (running or (waiting and not failures)) and not signals.name:
      while waiting and free and not failures:
        job = waiting.pop(0)
        part = free.pop(0)
        running[_start(job, part, writes)] = job, part

      time.sleep(POLL_SECONDS)
      for process in [x for x in running if x.poll() is not None]:
        job, part = running.pop(process)
        free.append(part)
        if process.returncode and job.is_failure():
          failures.append(_reason(job, process.returncode, writes))

  if signals.name:
    runs = [f"the run in {job.workdir}" for job, _ in running.values()]
    raise Stopped(
      f"{signals.name} in {' and '.join(runs) or 'no run'}; what it has saved"
      " is kept; run the same command to resume"
    )
  if failures:
    raise OSError(
      f"{'; '.join(failures)}; finished runs are kept; run the same command to"
      " resume"
    )


@contextlib.contextmanager
def _terminated(processes):
  """Ends processes, so that none outlives this one."""
  try:
    yield
  finally:
    for process in processes:
      process.terminate()
    for process in processes:
      process.wait()


def _start(job, part, writes):
  """Starts a job; Ctrl-C is for this process alone, which forwards it."""
  print(job.label, flush=True)
  start = sys.executable, "-ISc", CHILD, str(os.getpid()), ",".join(part.cores)
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
      env=os.environ | part.variables,
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
