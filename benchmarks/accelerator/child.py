"""A process that runs the entries of a part, and reports them line by line.

A part is a function of a module, from settings to {name: function}, the most
valuable first. What a function returns has the key "failed" if that is a
failure, and "skipped" if it could not run here.
"""

import dataclasses
import gc
import importlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Part:
  """How the entries of a part run."""

  module: str
  minutes: float  # its share of the time
  entry_seconds: float = 60  # the most that an entry may take
  alone: bool = False  # a process for each entry, so that peak memory is its
  exact: bool = False  # asks for the same bits twice: GPUs need a flag for that


# In the order in which they run.
PARTS = {
  "setup": Part("executors", 1),
  "correctness": Part("correctness", 8, exact=True),
  "attention": Part("attention", 8),
  "presets": Part("runs", 5, entry_seconds=240, alone=True),
  "train": Part("runs", 8, entry_seconds=600, alone=True),
  "resume": Part("runs", 2, entry_seconds=300, alone=True, exact=True),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  small: bool = False  # whether to use small sizes
  executors: tuple[str, ...] = ()  # those to run; () for all
  seconds: float = 1800.0  # the most that the part may take
  data: str = ""  # of CIFAR-10: a .npy file of images, or data.path


def main() -> None:
  part, settings, skip = json.loads(sys.argv[1])
  path = pathlib.Path(os.environ["MESSAGES"])

  def say(**message):
    with path.open("a") as file:
      file.write(json.dumps(message) + "\n")

  import jax

  asked = Settings(**settings | {"executors": tuple(settings["executors"])})
  device = describe()
  device["small"] = is_small = asked.small or device["platform"] == "cpu"
  name = f"benchmarks.accelerator.{PARTS[part].module}"
  module = importlib.import_module(name)
  try:
    found = getattr(module, "of_" + part, None) or module.entries
    all_entries = found(dataclasses.replace(asked, small=is_small))
  except ValueError as error:
    say(invalid=str(error))
    return
  say(device=device, names=list(all_entries))
  for name, run in all_entries.items():
    if name in skip:
      continue
    say(start=name)
    say(entry=name, found=attempt(run))
    if PARTS[part].alone:
      return  # the rest runs in a new process
    jax.clear_caches()
    gc.collect()


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
  """What an entry finds, or why it failed; and its seconds."""
  start = time.monotonic()
  try:
    found = run()
  except Exception as error:  # whatever an entry raises; the others run on
    words = " ".join(str(error).split()) or "no message"
    # The status of XLA's errors, on all platforms.
    kind = "skipped" if "RESOURCE_EXHAUSTED" in words else "failed"
    found = {kind: f"{type(error).__name__}: {words}"[:500]}
  return found | {"seconds": round(time.monotonic() - start, 1)}


def describe() -> dict[str, Any]:
  import jax

  from sparse_transformer import machine, version
  from sparse_transformer.attention import platforms

  first = jax.local_devices()[0]
  return {
    "name": machine.device_name(),
    "number": jax.local_device_count(),
    "platform": platforms.current_platform(),
    "platform_version": first.client.platform_version,
    "driver": driver(),
    "memory": machine.free_memory(),
    "cores": os.cpu_count(),
    "python": platform.python_version(),
    "jax": jax.__version__,
    "packages": version.packages(),
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
    "commit": version.commit(),
  }


def driver() -> str | None:
  words = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
  try:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return next(iter(done.stdout.split()), None)


if __name__ == "__main__":
  main()
