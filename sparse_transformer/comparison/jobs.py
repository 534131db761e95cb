"""Runs commands in processes, and ends them when this process ends."""

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
# The file in a workdir to which a process writes its output if there are
# several.
OUTPUT = "output.txt"
# Seconds between checks of running commands, short compared with any run.
POLL_SECONDS = 0.05
# A program that sets its cores, and then executes a command. It is used instead
# of `preexec_fn`, which may deadlock in a process with threads, such as those
# of JAX.
CHILD = f"""{END_WITH_PARENT}
parent, cores, *command = sys.argv[1:]
if cores and sys.platform == "linux":
  os.sched_setaffinity(0, {{*map(int, cores.split(","))}})
os.execv(command[0], command)
"""


class Job(NamedTuple):
  """A command that runs in a separate process."""

  label: str  # printed when the command starts
  workdir: pathlib.Path  # identifies the command in messages
  command: Sequence[str]
  # If the exit status is not 0, returns whether this is a failure.
  is_failure: Callable[[], bool] = lambda: True


class MachinePart(NamedTuple):
  """The part of the machine that a process uses; by default, all of it."""

  cores: Collection[str] = ()
  variables: Mapping[str, str] = {}  # environment variables


ALONE = (MachinePart(),)


def divide_machine(number: int, budgets: Set[str]) -> Sequence[MachinePart]:
  """Divides the machine among runs that train in parallel.

  All parts have equally many GPUs or, on a CPU, equally many cores. Any GPUs or
  cores that are left over stay idle, so that no run is faster than another.

  Args:
    number: the number of parts, from --jobs.
    budgets: the kinds of budgets of the runs, see `Budget`.

  Returns:
    The parts. A single part is the whole machine, without restrictions.

  Raises:
    ValueError: the machine cannot be divided into this number of parts, or the
      budgets would be unfair to runs that share the machine.
  """
  if number == 1:
    return ALONE
  flag = f"--jobs={number}"
  platform = jax.default_backend()
  if platform not in ("cpu", "gpu"):
    raise ValueError(
      f"{flag}: processes cannot share a {platform.upper()}; use --jobs=1"
    )

  units = _gpus() if platform == "gpu" else _cores()
  if number > len(units):
    kind = "GPUs" if platform == "gpu" else "cores"
    raise ValueError(
      f"{flag} must be at most {len(units)}, the number of {kind}"
    )
  # Elapsed time includes the time that a run waits for other runs.
  if platform == "cpu" and "seconds" in budgets:
    raise ValueError(
      f"{flag}: runs that share a CPU slow each other down, so seconds are not"
      " a fair budget; use processor_seconds or steps"
    )

  # The rounding of sums depends on the number of XLA's threads. So use as many
  # threads as without --jobs, to get bitwise-identical results. If a clock ends
  # runs, results vary anyway.
  threads = {"NPROC": os.environ.get("NPROC", str(len(units)))}
  if not budgets.isdisjoint(TIMES):
    threads = {}

  size = len(units) // number
  parts = []
  for start in range(0, number * size, size):
    chosen = units[start : start + size]
    if platform == "gpu":
      # Processes see only the devices in this variable, counted from 0.
      parts.append(MachinePart(variables={GPUS: ",".join(chosen)}))
    else:
      parts.append(MachinePart(chosen, threads))
  return parts


def _gpus():
  """Returns the GPUs of this process, named as in CUDA_VISIBLE_DEVICES."""
  # A user may have selected GPUs by index or by UUID, so keep these names.
  indices = ",".join(map(str, range(jax.local_device_count())))
  return os.environ.get(GPUS, indices).split(",")


def _cores():
  """Returns the indices of the cores on which this process may run, as text."""
  # A container or `taskset` may allow fewer cores than the machine has.
  cores: Collection[int] = range(os.cpu_count() or 1)
  if sys.platform == "linux":
    cores = sorted(os.sched_getaffinity(0))
  return [str(core) for core in cores]


def call(jobs: Sequence[Job], parts: Sequence[MachinePart] = ALONE) -> None:
  """Runs commands, as many in parallel as there are parts of the machine.

  With several parts, each command writes its output to the file `OUTPUT`. A
  signal is forwarded to running commands. After a failure, no further command
  starts, but running commands may finish.

  Args:
    jobs: the commands, in the order in which they start.
    parts: the parts of the machine, each used by one command at a time.

  Raises:
    Stopped: a signal was caught, and all running commands have ended.
    OSError: a command failed, and all running commands have ended.
  """
  waiting = list(jobs)
  free = list(parts)
  # If several commands run, their lines of output would be mixed.
  writes = len(parts) > 1
  running: dict[subprocess.Popen, tuple[Job, MachinePart]] = {}
  failures: list[str] = []
  # If SIGCHLD is ignored, as under some supervisors, the exit status of a
  # process is lost.
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)

  with Signals() as signals, _terminated(running):
    while (running or (waiting and not failures)) and not signals.name:
      while waiting and free and not failures:
        job = waiting.pop(0)
        part = free.pop(0)
        running[_start(job, part, writes)] = job, part

      # Poll all processes. If this waited for one process, it would not notice
      # that another has ended, and part of the machine would stay idle.
      time.sleep(POLL_SECONDS)
      for process in [x for x in running if x.poll() is not None]:
        job, part = running.pop(process)
        free.append(part)
        # A tuning run that diverges has a status other than 0, but it is a
        # valid result.
        if process.returncode and job.is_failure():
          failures.append(_reason(job, process.returncode, writes))

  # `_terminated` has forwarded the signal and waited, so all runs are saved.
  if signals.name:
    runs = [str(job.workdir) for job, _ in running.values()]
    raise Stopped(
      f"{signals.name} ended {' and '.join(runs) or 'no run'}; saved steps are"
      " kept; run the same command to resume"
    )
  if failures:
    raise OSError(
      f"{'; '.join(failures)}; finished runs are kept; run the same command to"
      " resume"
    )


@contextlib.contextmanager
def _terminated(processes):
  """Terminates processes at the end of the context, and waits for them."""
  try:
    yield
  finally:
    for process in processes:
      process.terminate()
    for process in processes:
      process.wait()


def _start(job, part, writes):
  """Starts a job in a part of the machine, and returns its process.

  If `writes`, output is appended to the file `OUTPUT` in the workdir of the
  job.
  """
  print(job.label, flush=True)
  # CHILD needs only the standard library. -I and -S ignore the user's variables
  # and site-packages, which also makes it start faster.
  start = sys.executable, "-ISc", CHILD, str(os.getpid()), ",".join(part.cores)
  with contextlib.ExitStack() as stack:
    output = None
    if writes:
      job.workdir.mkdir(parents=True, exist_ok=True)
      # This process can close the file at once, because the child has its own
      # descriptor.
      output = stack.enter_context(atomic.appending(job.workdir / OUTPUT))
    # With a separate process group, the child does not get Ctrl-C from the
    # terminal. Only this process does, and forwards it.
    return subprocess.Popen(
      [*start, *job.command],
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=output,
      env=os.environ | part.variables,
      process_group=0,
    )


def _reason(job, status, writes):
  """Returns why a command failed, and the last line of any output file."""
  # In Python, the status of a process that signal N ended is -N.
  reason = f"it ended with status {status}"
  if status < 0:
    reason = f"{signal.Signals(-status).name} ended it"
    if status == -signal.SIGKILL:
      reason += ", perhaps because the machine ran out of memory"
  if writes:
    path = job.workdir / OUTPUT
    lines = path.read_text(errors="replace").splitlines()
    reason += f", see {path}: {lines[-1] if lines else 'it is empty'}"
  return f"the run in {job.workdir} failed: {reason}"
