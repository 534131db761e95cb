"""Checks this code on an accelerator, and measures it there.

  python -m benchmarks.accelerator [--parts=setup,attention] [--minutes=9]

See docs/accelerators.md for the parts: setup, correctness, attention, presets,
train, determinism and resume. All end within --minutes, the most valuable
entries of all parts first. What an entry finds is written to --out, or
results/accelerator-<device>.json, as it comes; the parts of a later run replace
those of an earlier one, others stay. On a CPU, or with --small, all sizes are
small. What is missing, such as a package, is recorded like any other error.
"""

import signal
import sys

from benchmarks import record
from benchmarks.accelerator import summary
from benchmarks.accelerator.parts import PARTS, Settings
from benchmarks.accelerator.process import Results, run_parts


def parse(argv):
  split = lambda text: tuple(filter(None, text.split(",")))
  names = "names, separated by commas; default: all"
  flags = record.parser(__doc__)
  flags.prog = "python -m benchmarks.accelerator"
  flags.add_argument("--parts", type=split, default=(), help=names)
  flags.add_argument(
    "--executors", type=split, default=(), help=f"of attention: {names}"
  )
  flags.add_argument(
    "--minutes", type=float, default=30, help="the most that all may take"
  )
  flags.add_argument(
    "--data", default="", help="of train: a .npy file, or path"
  )
  flags.add_argument("--small", action="store_true", help="small sizes")
  return flags.parse_args(argv)


def run(flags):
  """Runs the parts, and returns how many entries failed."""
  if unknown := [name for name in flags.parts if name not in PARTS]:
    raise ValueError(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
  if not flags.minutes > 0:
    raise ValueError(f"--minutes={flags.minutes} must be positive")
  names = [name for name in PARTS if name in (flags.parts or PARTS)]
  settings = Settings(flags.small, flags.executors, flags.minutes, flags.data)
  results = Results(flags.out, record.FOLDER)
  run_parts(names, settings, results)
  print(f"{summary.text(results.content)}\n\nresults in {results.path}")
  return summary.failures(results.content, names)


def main(argv=None):
  flags = parse(argv)
  # So that the process of the part ends as well.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    failed = run(flags)
  except KeyboardInterrupt:
    sys.exit("accelerator: stopped; what was found so far is written")
  except (ValueError, OSError) as error:
    sys.exit(f"accelerator: {error}")
  if failed:
    sys.exit(f"accelerator: {failed} entries failed, see above")


if __name__ == "__main__":
  main()
