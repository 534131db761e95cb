"""Runs a part in processes of its own, and records what they report."""

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

from benchmarks.accelerator.parts import Settings
from benchmarks.accelerator.results import Results

REPO = pathlib.Path(__file__).resolve().parents[2]
ENTRY_SECONDS = 300  # the most that an entry may take
EXIT_SECONDS = 30  # the most that a process may take to end
UNBOUNDED = {"train"}  # parts whose entry may take all the time of the part
START = "start"  # stands for what a process does before its first entry
COMMAND = sys.executable, "-m", "benchmarks.accelerator.child"
# All of a GPU's memory, but as it is needed: other processes find some, too.
ENVIRONMENT = {
  "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
}
# Parts that ask for the same bits twice, which GPUs give with this flag only.
EXACT = {"correctness", "determinism", "resume"}


def run_part(part: str, settings: Settings, results: Results) -> None:
  """Runs all entries of a part.

  A process that dies or takes too long is replaced by another, which
  continues with the next entry.

  Raises:
    ValueError: JAX finds no device, or a setting is invalid.
  """
  progress = _Progress(part, settings, results)
  while progress.left and progress.seconds_left() > 0:
    before = len(progress.done)
    _run_child(progress)
    if len(progress.done) == before:
      break
  for name in progress.left:
    results.record(part, name, {"skipped": f"not run: {progress.time}"})


class _Progress:
  """How far a part has come.

  Attributes:
    left: the entries that have not run; START while they are not known.
    done: those that have.
    running: the one that runs.
    time: how long the part may take, in words.
  """

  def __init__(self, part: str, settings: Settings, results: Results):
    self.part, self.settings, self.results = part, settings, results
    self.left, self.done = [START], set()
    self.time = f"the part had {settings.minutes:g} minutes"
    self._has_device = False
    self._deadline = time.monotonic() + 60 * settings.minutes
    self.start(START)

  def start(self, name: str) -> None:
    """Starts the clock of an entry."""
    self.running, self._started = name, time.monotonic()

  def handle(self, message: dict) -> None:
    """Records a line of the process."""
    if "invalid" in message:
      raise ValueError(message["invalid"])
    if "failed" in message:
      self.fail(message["failed"])
    elif "device" in message:
      if not self._has_device:
        self._has_device = True
        small = self.settings.on(message["device"]).small
        self.results.start(self.part, message["device"], small)
    elif "names" in message:
      self.left = [name for name in message["names"] if name not in self.done]
      self.running = ""
    elif "start" in message:
      self.start(message["start"])
      _say(f"{self.part}: {self.running}")
    elif "done" in message:
      self.finish(message["entry"], message["found"])
    else:
      self.results.record(self.part, message["entry"], message["found"])

  def finish(self, name: str, found: dict) -> None:
    """Records what an entry found at its end."""
    seconds = round(time.monotonic() - self._started, 1)
    self.results.record(self.part, name, found | {"seconds": seconds})
    self.left = [other for other in self.left if other != name]
    self.done.add(name)
    self.running = ""
    if "failed" in found:
      _say(f"  failed: {found['failed']}")

  def fail(self, reason: str) -> None:
    """Records why the entry that runs, or the process, has come to its end."""
    if not self._has_device:
      raise ValueError(f"JAX has no device that works: {reason}")
    self.finish(self.running or START, {"failed": reason})

  def run_out(self) -> None:
    """Records that the current entry, or the part, has run out of time."""
    if time.monotonic() < self._deadline or not self._has_device:
      self.fail("it took too long")
    else:
      self.finish(self.running or START, {"skipped": f"stopped: {self.time}"})

  def seconds_left(self) -> float:
    """Seconds that the entry that runs, or else the part, still has."""
    now = time.monotonic()
    left = self._deadline - now
    if self.running and self.part not in UNBOUNDED:
      left = min(left, self._started + ENTRY_SECONDS - now)
    return left


def _run_child(progress):
  """Runs a process until it ends, or takes too long."""
  progress.start(START)
  request = {
    "part": progress.part,
    "settings": dataclasses.asdict(progress.settings),
    "skip": sorted(progress.done),
  }
  child = subprocess.Popen(
    [*COMMAND, json.dumps(request)],
    cwd=REPO,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | ENVIRONMENT | dict(XLA_FLAGS=_flags(progress.part)),
    process_group=0,  # to end what it has started, too
  )
  lines: queue.Queue[str] = queue.Queue()  # of its output; "" is the end
  reader = threading.Thread(target=_read, args=(child.stdout, lines))
  reader.start()
  try:
    while line := lines.get(timeout=max(0, progress.seconds_left())):
      progress.handle(json.loads(line))
    # It also ends when the next entry needs a new process. A broken device may
    # keep it from ending.
    with contextlib.suppress(subprocess.TimeoutExpired):
      child.wait(EXIT_SECONDS)
    if child.returncode:
      progress.fail(f"its process ended with status {child.returncode}")
  except queue.Empty:
    progress.run_out()
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    reader.join()


def _read(file, lines):
  """Puts the lines of a file on a queue, and then ""."""
  with file:
    for line in file:
      lines.put(line)
  lines.put("")


def _say(line):
  """Prints a line of progress."""
  print(line, file=sys.stderr, flush=True)


def _flags(part):
  """The user's flags of XLA, and those that a part needs."""
  needed = "--xla_gpu_deterministic_ops=true" if part in EXACT else ""
  return f"{needed} {os.environ.get('XLA_FLAGS', '')}".strip()
