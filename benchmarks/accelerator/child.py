"""The process of a part: runs its entries, and reports them line by line.

The request is an argument, in JSON. Each line that it writes to what was
standard output is an object with one of the keys

  device: what JAX runs on.
  names: the entries of the part.
  start: the entry that starts.
  found: what `entry` found so far; with `done`, at its end.
  invalid: what is wrong with a setting.
  failed: why the part cannot run.
"""

import gc
import importlib
import json
import os
import sys

from benchmarks.accelerator.parts import PARTS, Settings


def main():
  request = json.loads(sys.argv[1])
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # libraries print to standard output, too

  def say(**values):
    print(json.dumps(values), file=answers, flush=True)

  from benchmarks.accelerator import setup

  part, settings = request["part"], Settings(**request["settings"])
  try:
    device = setup.device()
    say(device=device)
    module = importlib.import_module(f"benchmarks.accelerator.{part}")
    entries = module.entries(settings.on(device))
  except ValueError as error:
    say(invalid=str(error))
    return
  except Exception as error:
    say(failed=one_line(error))
    return
  say(names=list(entries))
  for name, run in entries.items():
    if name in request["skip"]:
      continue
    say(start=name)
    record = lambda found, entry=name: say(entry=entry, found=found)
    found = attempt(run, record)
    say(entry=name, found=found, done=True)
    if PARTS[part] or ("failed" in found and not setup.device_works()):
      return  # the rest runs in a new process
    forget()


def attempt(run, record):
  """What an entry finds, or why it failed."""
  try:
    return run(record)
  except Exception as error:
    # The status of XLA's errors, on all platforms.
    no_memory = "RESOURCE_EXHAUSTED" in str(error)
    return {"skipped" if no_memory else "failed": one_line(error)}


def forget():
  """Drops compiled programs and arrays."""
  import jax

  jax.clear_caches()
  gc.collect()


def one_line(error):
  """An error as a line of bounded length."""
  words = " ".join(str(error).split()) or "no message"
  return f"{type(error).__name__}: {words}"[:500]


if __name__ == "__main__":
  main()
