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


def run_part(part: str, settings: Settings, results: Results) -> None:
  """Runs all entries of a part.

  A process that dies or takes too long is replaced by another, which goes on
  with the next entry.

  Raises:
    ValueError: JAX finds no device, or a setting is invalid.
  """
  progress = _Progress(part, settings, results)
  while progress.left and progress.seconds_left() > 0:
    before = len(progress.done)
    if reason := _run_child(progress):
      progress.finish(progress.running or START, {"failed": reason})
    if len(progress.done) == before:
      break
  for name in progress.left:
    why = f"not run: the part had {settings.minutes:g} minutes"
    results.record(part, name, {"skipped": why})


class _Progress:
  """How far a part has come.

  Attributes:
    left: the entries that have not run; START while they are not known.
    done: those that have.
    running: the one that runs.
  """

  def __init__(self, part: str, settings: Settings, results: Results):
    self.part, self.settings, self.results = part, settings, results
    self.left, self.done = [START], set()
    self._deadline = time.monotonic() + 60 * settings.minutes
    self.start(START)

  def start(self, name: str) -> None:
    """Starts the clock of an entry."""
    self.running, self._started = name, time.monotonic()

  def handle(self, message: dict) -> None:
    """Records a line of the process."""
    if "invalid" in message:
      raise ValueError(message["invalid"])
    if "device" in message:
      if not self.done:  # not after a restart
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
    if self.part not in self.results.content["parts"]:
      raise ValueError(f"JAX has no device that works: {found['failed']}")
    seconds = round(time.monotonic() - self._started, 1)
    self.results.record(self.part, name, found | {"seconds": seconds})
    self.left = [other for other in self.left if other != name]
    self.done.add(name)
    self.running = ""
    if "failed" in found:
      _say(f"  failed: {found['failed']}")

  def seconds_left(self) -> float:
    """Seconds that the entry that runs, or else the part, still has."""
    now = time.monotonic()
    left = self._deadline - now
    if self.running and self.part not in UNBOUNDED:
      left = min(left, self._started + ENTRY_SECONDS - now)
    return left


def _run_child(progress):
  """Runs a process until it ends; returns what went wrong, or None."""
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
    env=os.environ | ENVIRONMENT,
    start_new_session=True,
  )
  lines: queue.Queue[str] = queue.Queue()  # of its output; "" is the end
  reader = threading.Thread(target=_read, args=(child.stdout, lines))
  reader.start()
  try:
    while line := lines.get(timeout=max(0, progress.seconds_left())):
      message = json.loads(line)
      if "failed" in message:
        return message["failed"]
      progress.handle(message)
    # It also ends when the next entry needs a new process. A broken device may
    # keep it from ending.
    with contextlib.suppress(subprocess.TimeoutExpired):
      child.wait(EXIT_SECONDS)
    if child.returncode:
      return f"its process ended with status {child.returncode}"
    return None
  except queue.Empty:
    return "it took too long"
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
