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
# The file in a workdir that gets the output of one of several processes.
OUTPUT = "output.txt"
# How often running commands are looked at; short beside any run.
POLL_SECONDS = 0.05
# A program that sets its cores, and then becomes a command. A
# `preexec_fn` could set them too, but may deadlock in a process with
# threads, which JAX starts.
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
  """Divides the machine among runs that take place at the same time.

  On GPUs, each part has as many of them; on a CPU, as many cores. What remains
  after the division stays idle, so that no run is faster than another.

  Args:
    number: of parts, from --jobs.
    budgets: the kinds of budgets of the runs, see `Budget`.

  Returns:
    The parts; a single one is the whole machine, without restrictions.

  Raises:
    ValueError: the machine cannot be divided into so many parts, or the budgets
      would not be fair to runs that share it.
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
  # The wall clock also counts the time that a run waits for its neighbors.
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
      # Processes see only the devices in this variable, counted from 0.
      parts.append(MachinePart(variables={GPUS: ",".join(chosen)}))
    else:
      parts.append(MachinePart(chosen, threads))
  return parts


def _gpus():
  """The GPUs of this process, in the words of CUDA_VISIBLE_DEVICES."""
  # A user may have chosen GPUs, by number or by UUID; parts keep their names.
  indices = ",".join(map(str, range(jax.local_device_count())))
  return os.environ.get(GPUS, indices).split(",")


def _cores():
  """The numbers of the cores on which this process may run, as texts."""
  # A container or `taskset` may allow fewer cores than the machine has.
  cores: Collection[int] = range(os.cpu_count() or 1)
  if sys.platform == "linux":
    cores = sorted(os.sched_getaffinity(0))
  return [str(core) for core in cores]


def call(jobs: Sequence[Job], parts: Sequence[MachinePart] = ALONE) -> None:
  """Runs commands, as many at a time as there are parts of the machine.

  With several parts, each command writes its output to `OUTPUT`. A signal is
  forwarded to running commands. After a failure no other command starts; those
  that run may finish.

  Args:
    jobs: the commands, in the order in which they start.
    parts: of the machine; each is used by one command at a time.

  Raises:
    Stopped: a signal came, and the running commands have ended.
    OSError: a command failed, and the running ones have ended.
  """
  waiting = list(jobs)
  free = list(parts)
  # Several commands would print into each other's lines.
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

      # Waiting for one process would miss that another ends, and free parts of
      # the machine would stay idle.
      time.sleep(POLL_SECONDS)
      for process in [x for x in running if x.poll() is not None]:
        job, part = running.pop(process)
        free.append(part)
        # A run of tuning that diverges has another status than 0, but
        # is a result.
        if process.returncode and job.is_failure():
          failures.append(_reason(job, process.returncode, writes))

  # `_terminated` forwarded the signal and waited, so that all is saved by now.
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
  """Starts a job in a part of the machine, and returns its process.

  The terminal sends Ctrl-C to this process alone, which forwards it. If
  `writes`, output is appended to the file `OUTPUT` of the job's workdir.
  """
  print(job.label, flush=True)
  # CHILD needs only the standard library: -I and -S keep the user's variables
  # and site-packages out, which also makes it start faster.
  start = sys.executable, "-ISc", CHILD, str(os.getpid()), ",".join(part.cores)
  with contextlib.ExitStack() as stack:
    output = None
    if writes:
      job.workdir.mkdir(parents=True, exist_ok=True)
      # The child has its own descriptor, so this process closes the
      # file at once.
      output = stack.enter_context(atomic.appending(job.workdir / OUTPUT))
    # In a process group of its own, it gets no Ctrl-C from the terminal.
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
  # Python gives -N as the status of a process that signal N ended.
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
