"""Trains a model with each of several values of a field, on the same budget.

python -m sparse_transformer.compare --config=configs/cifar10_small.py \\
  --vary=attention.pattern=dense,local,strided,fixed \\
  --budget=steps:500 --seeds=3 --workdir=runs/patterns

The budget of each run is a number of steps, seconds or processor seconds (of
all threads) of training. A run on a time ends when its clock has reached it,
and the decay of its learning rate follows that clock; compilation and
evaluation do not count, and nothing else should use the machine meanwhile. On a
CPU with other work, processor_seconds are fairer. A comparison sets train.steps
itself, and train.seed to 0, 1, ..., or from --first_seed on, so that a repeated
comparison is independent; it shortens optimizer.warmup_steps to a tenth of the
budget, unless that is what varies.

Each value deserves its best learning rate. With --tune=FIELD=A,B,C, each value
is first trained once with each candidate, on --tune_budget or else the same
budget, with a seed that is not compared; the best on the validation split is
used for its seeds.

Values are ranked by bits on the entire validation split, of the best of each
run's checkpoints. When all runs have ended, the best value is scored on the
test split. An error is half of the 95 % confidence interval of a mean over
seeds. --equal=keys rejects values that differ in keys per query by over 10 %.

A run is train.py and then eval.py, in processes that end with this one and in a
workdir of its own, VALUE/seedN in --workdir, or VALUE/tune/CANDIDATE. All are
checked before the first one trains; the same command resumes a comparison that
was stopped. Writes comparison.md, .png, .html, and .json, from which the others
can be made again, to --workdir. --target=BITS adds the processor seconds after
which each run's validation first had at most so many bits.

With --jobs=N, N runs take place at the same time, each on its share of the
cores of a CPU, or of the GPUs. Runs then compete for memory and caches, so of
the times only processor_seconds are fair on a CPU; seconds are rejected there.
Scores with a budget of steps are the same bit for bit on CPUs. The output of
each run is in its workdir, in output.txt.

With --task=I, only the runs with value I of --vary, from 0, take place: its
tuning and its seeds, but neither the test split nor a table, for which the same
command without it is run when all tasks have ended. docs/compare.md has a
script for Slurm.

Values are separated by commas outside brackets, or by semicolons. A value may
set other fields too: "dense with data.length=512 train.batch_size=8".
"""

import dataclasses
import itertools
import math
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from sparse_transformer import cli, version
from sparse_transformer.cli import config_flags, flags

COMMAND = "python -m sparse_transformer.compare"


def main(argv: Sequence[str]) -> None:
  """Runs those that are missing, and writes the results of all."""
  from sparse_transformer.comparison import (
    jobs,
    plan as plan_lib,
    preflight,
    record,
    results,
    trials,
  )

  cli.check_arguments(argv)
  args = flags.FLAGS
  plan = _plan(args)
  budgets = {plan.budget[0], (plan.tune_budget or plan.budget)[0]}
  among = jobs.share_machine(args.jobs, budgets)
  about, tuning = preflight.begin(plan, among), None
  if args.task is not None:
    plan = dataclasses.replace(plan, choices=[plan.choices[args.task]])
  best = dict.fromkeys(plan.choices, "")
  if plan.tuned:
    trials.train_all(plan.tuning, among)
    trials.score_all(plan.tuning, "validation", among)
    found = [trials.scored(x, "validation") for x in plan.tuning]
    tuning = record.tuning(plan.tuning, found)
    best = tuning["best"]
  # Seed by seed: a stopped comparison is about as far with every choice.
  pairs = itertools.product(plan.seeds, plan.choices)
  final = [plan_lib.Trial(plan, x, best[x], seed) for seed, x in pairs]
  trials.train_all(final, among)
  trials.score_all(final, "validation", among)
  if args.task is not None:
    print(f"done with {plan.field}={plan.choices[0]}, task {args.task}")
    return

  runs = [trials.collected(trial) for trial in final]
  about |= dict(
    target=args.target,
    unit=runs[0]["unit"],
    commit=version.commit(),
    versions=version.packages(),
    command=shlex.join([*COMMAND.split(), *sys.argv[1:]]),
  )
  first = record.make_record(about, runs)["rows"][0]["choice"]
  trials.score_all([x for x in final if x.choice == first], "test", among)
  for trial, run in zip(final, runs, strict=True):
    run["test"] = trials.scored(trial, "test")
  print(
    results.write_results(plan.root, record.make_record(about, runs, tuning))
  )
  print(f"comparison in {plan.root / 'comparison.html'}")


def _plan(args: Any) -> Any:
  """The plan that the flags describe."""
  from sparse_transformer.comparison import plan as plan_lib

  cli.require("config", "vary", "workdir")
  config, file = args.config, config_flags.get_config_filename(args["config"])
  for name in config_flags.get_override_values(args["config"]):
    plan_lib.check_may_vary(f"--config.{name}", name)
  budget = plan_lib.parse_budget(args.budget)
  field, choices = plan_lib.parse_vary(args.vary, config)
  if args.target is not None and not 0 < args.target < math.inf:
    raise ValueError(f"--target={args.target} must be bits above 0")
  if args.task is not None and not 0 <= args.task < len(choices):
    raise ValueError(
      f"--task={args.task} must be from 0 to {len(choices) - 1}: one for each"
      " value of --vary"
    )
  more: dict[str, Any] = dict(equal=args.equal)
  if args.tune:
    tuned, grid = plan_lib.parse_vary(args.tune, config, "tune")
    more |= dict(tuned=tuned, candidates=grid)
  if args.tune_budget:
    shorter = plan_lib.parse_budget(args.tune_budget, "tune_budget")
    more |= dict(tune_budget=shorter)
  preset = sys.modules["config_config"].get_config()  # of the config file
  seeds = range(args.first_seed, args.first_seed + args.seeds)
  what = file, preset, config, pathlib.Path(args.workdir)
  return plan_lib.Comparison(*what, field, choices, budget, seeds, **more)


if __name__ == "__main__":
  flags.DEFINE_string("vary", None, "A field and its values: group.name=a,b,c.")
  flags.DEFINE_string(
    "tune", None, "A field that is tuned for each value: group.name=a,b,c."
  )
  flags.DEFINE_string(
    "budget",
    "steps:500",
    "steps:N, seconds:N or processor_seconds:N.",
  )
  flags.DEFINE_string("tune_budget", None, "The budget of a run of tuning.")
  flags.DEFINE_float("target", None, "Bits whose time is reported.")
  flags.DEFINE_integer("seeds", 1, "Number of runs with each value.")
  flags.DEFINE_integer("first_seed", 0, "The lowest seed.")
  flags.DEFINE_integer(
    "jobs", 1, "Number of runs at the same time.", lower_bound=1
  )
  flags.DEFINE_integer("task", None, "The only value that is trained, from 0.")
  flags.DEFINE_enum("equal", None, ["keys"], "What values must have in common.")
  flags.DEFINE_string("workdir", None, "Folder of the comparison.")
  cli.run(main, cli.on_config)
