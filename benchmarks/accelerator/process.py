"""Runs parts in separate processes until a deadline, and records results."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import record
from benchmarks.accelerator.parts import PARTS, Settings, schedule
from sparse_transformer import atomic

# The most that a process may take before its first entry, between two, and to
# end: the check of a broken device may hang as well.
IDLE_SECONDS = 60
IDLE = "", "start"  # stands for what runs then
COMMAND = sys.executable, "-m", "benchmarks.accelerator.child"
# All of a GPU's memory, but as it is needed, so that other processes find some.
ENVIRONMENT = {
  "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
}


class Results:
  """What the parts found on one device, in a file, complete after every entry.

  Without a path, the file is named after the device, in `folder`. `content` is
  {"device": ..., "parts": {part: {"entries": {name: found}}}}.
  """

  def __init__(self, path: pathlib.Path | None, folder: pathlib.Path):
    self.path, self._folder = path, folder
    self.content: dict[str, Any] = {"device": {}, "parts": {}}
    if path:
      self._open()

  def start(self, part: str, device: dict[str, Any], small: bool) -> None:
    """Replaces what an earlier run of a part found."""
    if self.path is None:
      name = record.slug(device["name"]) + "-small" * small
      self.path = self._folder / f"accelerator-{name}.json"
      self._open()
    self.content["device"] = device
    about = {key: device[key] for key in ("commit", "jax", "xla_flags")}
    self.content["parts"][part] = about | {"small": small, "entries": {}}
    record.write(self.path, self.content)

  def record(self, part: str, entry: str, found: dict[str, Any]) -> None:
    """Adds to what an entry found."""
    entries = self.content["parts"][part]["entries"]
    entries[entry] = entries.get(entry, {}) | found
    record.write(self.path, self.content)

  def _open(self) -> None:
    if self.path.exists():
      found = atomic.read_json(self.path)
      if not isinstance(found, dict) or not {"device", "parts"} <= set(found):
        raise ValueError(
          f"{self.path} holds something else; name another file with --out"
        )
      self.content = found
    record.write(self.path, self.content)  # fails now rather than after a part


def run_parts(parts: Sequence[str], settings: Settings, results: Results):
  """Runs all entries of some parts until the time is over.

  A process that dies or takes too long is replaced by another, which continues
  with the next entry. Without a device, or if a setting is invalid, it raises
  ValueError.
  """
  progress = _Progress(settings, results)
  for some, ranks in schedule(parts):
    progress.left = [IDLE]
    while progress.left and progress.minutes_left() > 0:
      before = len(progress.done)
      _run_child(progress, some, ranks)
      if len(progress.done) == before:
        break  # a process that ends before its first entry would always do so
    for part, name in progress.left:
      for each in (part,) if part else some:
        progress.record_rest(each, name)


class _Progress:
  """How far the run has come; entries are pairs (part, name)."""

  def __init__(self, settings: Settings, results: Results):
    self.settings, self.results = settings, results
    self.left: list[tuple[str, str]] = []  # [IDLE] while they are unknown
    self.done: set[tuple[str, str]] = set()
    self.started: set[str] = set()  # parts of which there are results
    self.device: dict = {}  # what JAX runs on, once that is known
    self.time = f"the run had {settings.minutes:g} minutes"
    self.trouble = ""  # why the last process ended between two entries
    self._deadline = time.monotonic() + 60 * settings.minutes
    self.start(IDLE)

  def start(self, entry: tuple[str, str]) -> None:
    self.running, self._started = entry, time.monotonic()

  def handle(self, message: dict) -> None:
    if "invalid" in message:
      raise ValueError(message["invalid"])
    if "failed" in message:
      self.fail(message["failed"])
    elif "device" in message:
      self.device = message["device"]
    elif "names" in message:
      names = map(tuple, message["names"])
      self.left = [entry for entry in names if entry not in self.done]
      for part, _ in self.left:
        self._start_part(part)
      self.start(IDLE)
    elif "start" in message:
      self.start(tuple(message["start"]))
      _say(": ".join(self.running))
    elif "done" in message:
      self.finish(tuple(message["entry"]), message["found"])
    else:
      self.results.record(*message["entry"], message["found"])

  def _start_part(self, part):
    if part not in self.started:
      self.started.add(part)
      small = self.settings.on(self.device).small
      self.results.start(part, self.device, small)

  def finish(self, entry: tuple[str, str], found: dict) -> None:
    seconds = round(time.monotonic() - self._started, 1)
    self.results.record(*entry, found | {"seconds": seconds})
    self.left = [other for other in self.left if other != entry]
    self.done.add(entry)
    self.start(IDLE)
    if "failed" in found:
      _say(f"  failed: {found['failed']}")

  def fail(self, reason: str) -> None:
    """Records why the entry that runs, or the process, has come to its end."""
    if not self.device:
      raise ValueError(
        f"JAX has no device that works ({reason}); install its packages for the"
        " device, or set JAX_PLATFORMS=cpu"
      )
    if self.running != IDLE:
      self.finish(self.running, {"failed": reason})
    else:
      self.trouble = reason
      _say(f"  between entries: {reason}")

  def run_out(self) -> None:
    """Records that the current entry, or the run, is out of time."""
    if time.monotonic() < self._deadline or not self.device:
      self.fail("it took too long")
    elif self.running != IDLE:
      self.finish(self.running, {"skipped": f"stopped: {self.time}"})

  def record_rest(self, part: str, name: str) -> None:
    """Records why an entry has not run; a part may not even have started."""
    if not self.device:
      raise ValueError("the process ended before it named a device")
    if self.minutes_left() > 0:
      found = {"failed": self.trouble or "its process ended"}
      self._start_part(part)
    else:
      found = {"skipped": f"not run: {self.time}"}
    if part in self.started:
      self.results.record(part, name, found)
    else:
      _say(f"{part}: {found['skipped']}")

  def seconds_left(self) -> float:
    """Seconds that what runs still has, 0 if it is late."""
    now, (part, _) = time.monotonic(), self.running
    most = PARTS[part].seconds if part else IDLE_SECONDS
    return max(0, min(self._deadline, self._started + most) - now)

  def minutes_left(self) -> float:
    return (self._deadline - time.monotonic()) / 60


def _run_child(progress, parts, ranks):
  """Runs a process until it ends, or takes too long."""
  progress.start(IDLE)
  settings = dataclasses.asdict(progress.settings)
  settings["minutes"] = progress.minutes_left()
  request = dict(parts=parts, ranks=ranks, settings=settings)
  request["skip"] = sorted(progress.done)
  flags = os.environ.get("XLA_FLAGS", "")
  if any(PARTS[part].exact for part in parts):
    flags = f"--xla_gpu_deterministic_ops=true {flags}"
  lines: queue.Queue[str] = queue.Queue()  # of its output; "" is the end
  with subprocess.Popen(
    [*COMMAND, json.dumps(request)],
    cwd=record.REPO,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | ENVIRONMENT | {"XLA_FLAGS": flags.strip()},
    process_group=0,  # to end also what it has started
  ) as child:
    output = itertools.chain(child.stdout, [""])
    reader = threading.Thread(target=lambda: [*map(lines.put, output)])
    reader.start()
    try:
      while line := lines.get(timeout=progress.seconds_left()):
        if line.endswith("\n"):  # or else it was cut by the end of the process
          progress.handle(json.loads(line))
      # It also ends when the next entry needs a new process. A broken device
      # may keep it from ending.
      with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(progress.seconds_left())
      if child.returncode:
        progress.fail(f"its process ended with status {child.returncode}")
    except queue.Empty:
      progress.run_out()
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
      reader.join()


def _say(line):
  print(line, file=sys.stderr, flush=True)
