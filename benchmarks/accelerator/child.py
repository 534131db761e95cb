"""A process that runs the entries of a part, and reports the result of each.

A part is a function in a module that maps settings to entries, {name:
function}, with the most valuable entries first. The result of an entry includes
the key "failed" if the entry failed, and "skipped" if it cannot run here.
"""

import dataclasses
import gc
import importlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax

from sparse_transformer import machine, version
from sparse_transformer.attention import Unsupported, platforms


@dataclasses.dataclass(frozen=True)
class Part:
  """How the entries of a part run."""

  module: str
  minutes: float  # determines the part's share of the time
  entry_seconds: float = 60  # time limit of an entry
  # Whether each entry has its own process, to measure its own peak memory.
  alone: bool = False
  # Whether results must be bitwise-reproducible, which requires a flag on GPUs.
  exact: bool = False


# Parts run in this order. The most informative ones are first.
PARTS = {
  "setup": Part("backends", 1),
  "profile": Part("steps", 6, entry_seconds=240, alone=True),
  "presets": Part("steps", 5, entry_seconds=240, alone=True),
  "attention": Part("attention", 6),
  "variants": Part("steps", 5, entry_seconds=240, alone=True),
  "correctness": Part("correctness", 6, exact=True),
  "train": Part("runs", 6, entry_seconds=math.inf, alone=True),
  "resume": Part("runs", 2, entry_seconds=300, alone=True, exact=True),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  small: bool = False  # whether to use small sizes
  backends: Sequence[str] = ()  # the backends to run; () for all
  seconds: float = 1800.0  # time limit of the part
  data: str = ""  # CIFAR-10: its data.path, or .npy files of images


def main() -> None:
  part, settings, skip = json.loads(sys.argv[2])
  connection = Connection(int(sys.argv[1]), readable=False)
  say = lambda **message: connection.send(message)
  asked, device = Settings(**settings), describe()
  device["small"] = is_small = asked.small or device["platform"] == "cpu"
  name = f"benchmarks.accelerator.{PARTS[part].module}"
  try:
    module = importlib.import_module(name)
    found = getattr(module, "of_" + part, None) or module.entries
    all_entries = found(dataclasses.replace(asked, small=is_small))
  except (ValueError, ImportError) as error:
    say(invalid=str(error))
    return
  say(device=device, names=list(all_entries))
  for name, run in all_entries.items():
    if name in skip:
      continue
    say(start=name)
    result = attempt(run)
    say(entry=name, found=result)
    # A failure may leave the device in a bad state, so a new process runs the
    # remaining entries.
    if PARTS[part].alone or "failed" in result:
      return
    jax.clear_caches()
    gc.collect()


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
  """Returns the result of an entry or why it failed, and its seconds."""
  start = time.monotonic()
  try:
    found = run()
  # Catch any error, so that other entries still run.
  except Exception as error:
    words = " ".join(str(error).split()) or "no message"
    # XLA uses the same status for kernels that are too large, on all platforms.
    is_large = re.search("shared memory|vmem", words, re.IGNORECASE)
    lacks_memory = "RESOURCE_EXHAUSTED" in words and not is_large
    is_unable = lacks_memory or isinstance(error, Unsupported)
    kind = "skipped" if is_unable else "failed"
    found = {kind: f"{type(error).__name__}: {words}"[:500]}
  return found | {"seconds": round(time.monotonic() - start, 1)}


def describe() -> dict[str, Any]:
  return {
    "name": machine.device_name(),
    "number": jax.local_device_count(),
    "platform": platforms.current_platform(),
    "platform_version": jax.local_devices()[0].client.platform_version,
    "python": platform.python_version(),
    "packages": version.packages(),
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


if __name__ == "__main__":
  main()
