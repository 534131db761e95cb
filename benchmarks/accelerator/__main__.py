"""Tests this code on an accelerator, and measures its speed there.

  python -m benchmarks.accelerator [--parts=setup,attention] [--minutes=9]

docs/performance.md explains the parts. Each part runs in its own process. If an
entry fails, hangs or crashes the process, a new process runs the remaining
entries.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import record
from benchmarks.accelerator import summary
from benchmarks.accelerator.child import PARTS, Settings
from sparse_transformer import atomic, version

# Lets JAX use almost all of a GPU's memory, allocated only as needed.
ENVIRONMENT = {
  "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
}
# Makes results bitwise-reproducible.
EXACT = "--xla_gpu_deterministic_ops=true"
START_SECONDS, EXIT_SECONDS = 60, 30  # before the first entry, after the last
CHILD = sys.executable, "-m", "benchmarks.accelerator.child"


def main(argv: list[str] | None = None) -> None:
  args = parse(argv)
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    failed = run(args)
  except KeyboardInterrupt:
    sys.exit("accelerator: stopped; the results so far are saved")
  except (ValueError, OSError) as error:
    sys.exit(f"accelerator: {error}")
  if failed:
    sys.exit(f"accelerator: {failed} entries failed, see above")


def parse(argv):
  split = lambda text: tuple(filter(None, text.split(",")))
  flags = record.parser(__doc__)
  flags.prog = "python -m benchmarks.accelerator"
  names = "names, separated by commas; default: all"
  flags.add_argument("--parts", type=split, default=(), help=names)
  flags.add_argument("--backends", type=split, default=(), help=names)
  flags.add_argument(
    "--minutes", type=float, default=30, help="time limit for all parts"
  )
  flags.add_argument(
    "--data", default="", help="CIFAR-10, as a folder or a .npy file"
  )
  flags.add_argument("--small", action="store_true", help="uses small sizes")
  return flags.parse_args(argv)


def run(args) -> int:
  if unknown := [name for name in args.parts if name not in PARTS]:
    raise ValueError(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
  if not args.minutes > 0:
    raise ValueError(f"--minutes={args.minutes} must be positive")
  names = [name for name in PARTS if name in (args.parts or PARTS)]
  end, path, content = time.monotonic() + 60 * args.minutes, args.out, {}
  for i, name in enumerate(names):
    # A part may also use the time that earlier parts did not need.
    weights = [PARTS[x].minutes for x in names[i:]]
    left = end - time.monotonic()
    seconds = max(left * weights[0] / sum(weights), min(left, START_SECONDS))
    settings = Settings(args.small, args.backends, seconds, args.data)
    for device, entries in run_part(name, settings):
      words = "accelerator", device["name"], *args.backends
      title = " ".join(words) + " small" * device["small"]
      path = path or record.path(record.slug(title))
      content = content or _read(path)
      # Read the commit first, because writing the record changes the checkout.
      device |= {"commit": version.commit()}
      content[name] = {"device": device, "entries": entries}
      record.write(path, content)
  if not content:
    raise ValueError(
      f"JAX did not start within --minutes={args.minutes:g}; set a larger limit"
    )
  print(f"{summary.text(content)}\nresults in {path}")
  return summary.failures(content, names)


def _read(path):
  found = atomic.read_json(path, dict) if path.exists() else {}
  if not found.keys() <= PARTS.keys():
    raise ValueError(
      f"{path} contains something else; set another file with --out"
    )
  return found


def run_part(
  part: str, settings: Settings
) -> Iterator[tuple[dict[str, Any], dict[str, dict]]]:
  """Yields (the device, the results of all entries so far) after each result.

  Raises:
    ValueError: JAX finds no device, or a setting is invalid.
  """
  end, entries = time.monotonic() + settings.seconds, {}
  device: dict[str, Any] = {}
  names: list[str] | None = None
  late = {"skipped": "its part had no time left"}
  while time.monotonic() < end and (names is None or {*names} - {*entries}):
    before = len(entries)
    # XLA reads its flags once, when a process starts. An entry with flags is
    # therefore the first of its process.
    following = next((x for x in names or () if x not in entries), "")
    flags = [x for x in following.split() if x.startswith("--xla")]
    running = following if flags else None
    for message in _messages(part, settings, sorted(entries), end, flags):
      match message:
        case {"invalid": reason}:
          raise ValueError(reason)
        case {"device": first, "names": names}:
          device = device or first  # without the flags of a single entry
        case {"start": running}:
          print(f"{part}: {running}", file=sys.stderr, flush=True)
        case {"entry": name, "found": found}:
          entries[name], running = found, None
        case {"ended": _} if time.monotonic() >= end:
          break  # running out of time is not a failure
        case {"ended": reason} if not device:
          raise ValueError(
            f"JAX has no device that works ({reason}); install its packages,"
            " or set JAX_PLATFORMS=cpu"
          )
        case {"ended": reason} if running:
          entries[running] = {"failed": reason}
        case {"ended": reason} if len(entries) == before:
          late = {"skipped": f"before any entry, {reason}"}
      yield device, entries
    if len(entries) == before:
      break  # the process ended before its first entry, and would do so again
  if names is not None:
    yield device, dict.fromkeys(names, late) | entries


def _messages(part, settings, skip, end, flags):
  """Yields the messages of a process, and finally how it ended."""
  request = json.dumps([part, dataclasses.asdict(settings), skip])
  exact = [EXACT] if PARTS[part].exact else []
  flags = " ".join([*exact, os.environ.get("XLA_FLAGS", ""), *flags]).strip()
  reader, writer = multiprocessing.Pipe(duplex=False)
  child = subprocess.Popen(
    [*CHILD, str(writer.fileno()), request],
    cwd=record.REPO,
    env=os.environ | ENVIRONMENT | {"XLA_FLAGS": flags},
    pass_fds=[writer.fileno()],
    process_group=0,
  )
  writer.close()  # so that reading ends when the process does
  try:
    while reader.poll(min(PARTS[part].entry_seconds, end - time.monotonic())):
      yield reader.recv()
    yield {"ended": "it took too long"}
  except (EOFError, OSError):
    with contextlib.suppress(subprocess.TimeoutExpired):
      child.wait(EXIT_SECONDS)
    yield {"ended": f"its process ended with {child.poll()}"}
  finally:
    if child.poll() is None:
      os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    reader.close()


if __name__ == "__main__":
  main()
