"""A process that runs entries of some parts, and reports them line by line.

The request is an argument, in JSON. Each line that it writes to what was
standard output is an object with one of the keys

  device: what JAX runs on.
  names: the entries, as pairs (part, entry), in the order in which they run.
  start: the entry that starts, such a pair.
  found: what `entry` found so far; with `done`, at its end.
  invalid: what is wrong with a setting.
  failed: why nothing can run.
"""

import functools
import gc
import json
import pkgutil
import sys

from benchmarks import worker
from benchmarks.accelerator.parts import PARTS, Settings

START = "start"  # the entry of a part that does not even say what it has


def main():
  request, say = json.loads(sys.argv[1]), worker.answers()

  import jax

  from benchmarks.accelerator import setup

  try:
    device = setup.device()
    say(device=device)
    settings = Settings(**request["settings"]).on(device)
    entries = find(request["parts"], request["ranks"], settings)
  except ValueError as error:
    say(invalid=str(error))
    return
  except Exception as error:
    say(failed=one_line(error))
    return
  say(names=list(entries))
  for entry in map(tuple, request["skip"]):
    entries.pop(entry, None)
  for entry, run in entries.items():
    say(start=entry)
    record = lambda found, entry=entry: say(entry=entry, found=found)
    found = attempt(run, record)
    say(entry=entry, found=found, done=True)
    if PARTS[entry[0]].alone:
      return  # the rest runs in a new process
    if "failed" in found and not setup.device_works():
      return  # so that the next entry does not fail for this one's reason
    jax.clear_caches()
    gc.collect()


def find(parts, ranks, settings):
  """{(part, entry): function}, by rank; one that fails for a part that does."""

  def fail(error, record):
    raise error

  found, broken = {}, set()
  for rank in ranks:
    for part in parts:
      try:
        entries = entries_of(part, settings, rank)
      except ValueError:
        raise
      except Exception as error:  # a package is missing, for example
        run = functools.partial(fail, error)
        entries = {} if part in broken else {START: run}
        broken.add(part)
      found |= {(part, name): run for name, run in entries.items()}
  return found


def entries_of(part, settings, rank):
  name = PARTS[part].entries.replace(".", ":")
  return pkgutil.resolve_name(f"benchmarks.accelerator.{name}")(settings, rank)


def attempt(run, record):
  """What an entry finds, or why it failed."""
  try:
    return run(record)
  except Exception as error:
    # The status of XLA's errors, on all platforms.
    no_memory = "RESOURCE_EXHAUSTED" in str(error)
    return {"skipped" if no_memory else "failed": one_line(error)}


def one_line(error):
  words = " ".join(str(error).split()) or "no message"
  return f"{type(error).__name__}: {words}"[:500]


if __name__ == "__main__":
  main()
