"""Trains a model with each of several values of a field, on the same budget.

python -m sparse_transformer.compare --config=configs/cifar10_small.py \\
  --vary=attention.pattern=dense,local,strided,fixed \\
  --budget=steps:500 --seeds=3 --workdir=runs/patterns

The budget of each run is a number of steps, seconds or FLOPs of training.
Seconds are converted to steps by the measured speed of a few steps, so that
the learning rate decays as it should; compilation and evaluation do not count,
and nothing else should use the machine meanwhile. On a CPU that does other
work, too, `processor_seconds` are fairer. A comparison sets train.steps
itself, and train.seed to 0, 1, ...; it shortens optimizer.warmup_steps to a
tenth of the steps, unless that is what varies.

Each run has its own process and its own workdir, VALUE/seedN in --workdir; the
same command resumes a comparison that was stopped. Writes comparison.md, .json
and .html to --workdir.

Values are separated by commas outside brackets, or by semicolons.
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from sparse_transformer import cli, machine
from sparse_transformer.data import SPLITS


def main(argv: Sequence[str]) -> None:
  """Runs those that are missing, and writes the results of all."""
  from sparse_transformer.comparison import (
    budget,
    checks,
    choices,
    folder,
    results,
    runs,
  )

  cli.check_arguments(argv)
  args = flags.FLAGS
  cli.require("config", "vary", "workdir")
  if args.seeds < 1:
    raise ValueError(f"--seeds={args.seeds} must be at least 1")
  limit = budget.parse_budget(args.budget)
  field, values = choices.parse_vary(args.vary, args.config)
  root = pathlib.Path(args.workdir)
  about = dict(
    field=field,
    choices=values,
    budget=limit,
    seeds=args.seeds,
    split=args.split,
    machine=machine.machine(),
    config=args.config.to_dict(),
  )
  about = json.loads(json.dumps(about))  # as it will be read
  folder.check(root, about)
  checks.check(args.config, field, values, limit, args.split)
  folder.create(root, about)
  found = runs.run_all(
    args.config, root, field, values, limit, args.seeds, args.split
  )
  unit = found[values[0]][0]["unit"]
  print(results.write(root, about, results.summarize(found), unit))
  print(f"comparison in {root / 'comparison.html'}")


if __name__ == "__main__":
  flags.DEFINE_string("vary", None, "A field and its values: group.name=a,b,c.")
  flags.DEFINE_string(
    "budget", "steps:500", "steps:N, seconds:N, processor_seconds:N or flops:N."
  )
  flags.DEFINE_integer("seeds", 1, "Number of runs with each value.")
  flags.DEFINE_enum("split", "test", SPLITS, "Split to evaluate on.")
  flags.DEFINE_string("workdir", None, "Folder of the comparison.")
  cli.run_on_config(main)
