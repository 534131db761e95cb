"""Checks this code on an accelerator, and measures it there.

  python -m benchmarks.accelerator [--parts=setup,attention] [--minutes=9]

The parts, in this order:
  setup: the device, its driver, versions, and the executors that it can run.
  correctness: values and gradients of all executors over the catalogue of
    patterns, against float64 on the host.
  attention: times of all executors against dense attention, of cuDNN on GPUs.
  presets: step time, memory and utilization of the configs.
  train: cifar10_15m for some minutes, with its curve.
  determinism: the same work twice gives the same bits.
  resume: an interrupted run ends with the same bits.

All end within --minutes. The most valuable entries of all parts come first:
what `auto` runs in bfloat16, then other dtypes and executors; FlexAttention,
`streamed` and `dense` are last. What an entry finds is written to --out, or
results/accelerator-<device>.json, as it comes: one that fails, ends its process
or takes too long is recorded with its error, and the others go on. The parts of
a later run replace those of an earlier one, others stay. On a CPU, or with
--small, all sizes are small.

setup, correctness and attention need JAX and NumPy only. The others also need
flax, optax, ml-collections and tqdm, resume orbax-checkpoint, and train its
data: those of tensorflow-datasets, or a .npy file of uint8 images. What is
missing is recorded like any other error.
"""

import argparse
import pathlib
import signal
import sys

from benchmarks.accelerator import summary
from benchmarks.accelerator.parts import PARTS, Settings
from benchmarks.accelerator.process import run_parts
from benchmarks.accelerator.results import Results

RESULTS = pathlib.Path(__file__).parents[1] / "results"


def parse(argv):
  flags = argparse.ArgumentParser(
    prog="python -m benchmarks.accelerator",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  names = "names, separated by commas; default: all"
  flags.add_argument("--parts", default="", help=names)
  flags.add_argument("--executors", default="", help=f"of attention: {names}")
  flags.add_argument(
    "--minutes", type=float, default=30, help="the most that all may take"
  )
  flags.add_argument(
    "--data", default="", help="of train: a .npy file, or path"
  )
  flags.add_argument("--small", action="store_true", help="small sizes")
  flags.add_argument("--out", type=pathlib.Path, help="JSON file to write")
  return flags.parse_args(argv)


def run(flags):
  """Runs the parts, and returns how many entries failed."""
  split = lambda text: tuple(filter(None, text.split(",")))
  wanted = split(flags.parts) or PARTS
  for name in wanted:
    if name not in PARTS:
      raise ValueError(f"unknown part {name!r}; known: {', '.join(PARTS)}")
  if not flags.minutes > 0:
    raise ValueError(f"--minutes={flags.minutes} must be positive")
  names = [name for name in PARTS if name in wanted]
  executors = split(flags.executors)
  settings = Settings(flags.small, executors, flags.minutes, flags.data)
  results = Results(flags.out, RESULTS)
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
