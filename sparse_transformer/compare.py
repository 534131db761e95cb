"""Compares values of a config field by training a model with each of them.

python -m sparse_transformer.compare --config=configs/cifar10_small.py \\
  --vary=attention.pattern=dense,local,strided,fixed \\
  --tune=optimizer.learning_rate=0.003,0.01,0.03 \\
  --budget=steps:500 --seeds=3 --workdir=runs/patterns

Values are separated by commas outside brackets, or by semicolons. A value may
also set other fields: "dense with data.length=512 train.batch_size=8".

All runs have the same budget. It sets train.steps, and limits
optimizer.warmup_steps to a tenth of the steps unless --vary or --tune sets
optimizer.warmup_steps. Seeds are counted from --first_seed. Values are ranked
by the bits of each run's best checkpoint on the entire validation split. The
best value is then scored on the test split.

Each run is trained in the same way as by train.py, and scored in the same way
as by eval.py. Its folder in --workdir is VALUE/seedN or VALUE/tune/CANDIDATE.
To resume a comparison that was stopped, repeat the command. docs/compare.md
explains tuning, uncertainties and parallel jobs.
"""

import pathlib
import sys
from collections.abc import Sequence

from sparse_transformer import cli, schema, version
from sparse_transformer.cli import config_flags, flags


def main(argv: Sequence[str]) -> None:
  """Trains, scores and records the runs of a comparison, or resumes them."""
  plan = _plan(flags.FLAGS)

  from sparse_transformer.comparison import jobs, preflight, record, trials

  budgets = {plan.budget.kind}
  if plan.tune_budget:
    budgets.add(plan.tune_budget.kind)

  parts = jobs.divide_machine(flags.FLAGS.jobs, budgets)
  preflight.begin(plan, len(parts))

  # Candidates are chosen on the validation split, with a seed that is not used
  # in the comparison itself.
  tuning = None
  if plan.tune:
    trials.run_all(plan.tuning, parts)
    scores = [trials.scored(trial, "validation") for trial in plan.tuning]
    tuning = record.tuning(plan.tuning, scores)

  final = plan.final(tuning["best"] if tuning else {})
  trials.run_all(final, parts)

  runs = [trials.collected(trial) for trial in final]
  provenance = plan.about() | dict(
    unit=runs[0]["unit"],
    commit=" and ".join(dict.fromkeys(run["commit"] for run in runs)),
    versions=version.packages(),
    command=version.command(),
  )

  # Only the winner is scored on the test split. Scoring all choices and
  # reporting the best would select on the test split.
  best = record.make_record(provenance, runs)["rows"][0]["choice"]
  trials.score_all([x for x in final if x.choice == best], "test", parts)
  for trial, run in zip(final, runs, strict=True):
    if trial.choice == best:
      run["test"] = trials.scored(trial, "test")

  # Make the record again, because the runs now include test scores.
  made = record.make_record(provenance, runs, tuning)
  print(record.render(made))
  record.write_results(plan.root, made)
  print(
    f"comparison in {plan.root / 'comparison.md'}, its curves in comparison.png"
  )


def _plan(args):
  """Returns the comparison that the flags describe, or raises ValueError."""
  cli.require("config", "vary", "workdir")
  # This import loads JAX, which takes seconds, so missing flags are reported
  # before it.
  from sparse_transformer.comparison import plan as plan_lib

  vary = plan_lib.parse_axis(args.vary, "vary")
  tune = plan_lib.parse_axis(args.tune, "tune") if args.tune else None
  budget = plan_lib.parse_budget(args.budget, "budget")
  tune_budget = None
  if args.tune_budget:
    tune_budget = plan_lib.parse_budget(args.tune_budget, "tune_budget")
  return plan_lib.Comparison(
    file=config_flags.get_config_filename(args["config"]),
    # ml_collections imports the config file as this module.
    preset=sys.modules["config_config"].get_config(),
    config=schema.typed(args.config),
    root=pathlib.Path(args.workdir),
    vary=vary,
    budget=budget,
    seeds=range(args.first_seed, args.first_seed + args.seeds),
    tune=tune,
    tune_budget=tune_budget,
    equal_keys=args.equal == "keys",
  )


if __name__ == "__main__":
  flags.DEFINE_string(
    "vary", None, "The field to compare and its values, as group.name=a,b,c."
  )
  flags.DEFINE_string(
    "tune",
    None,
    "A field to tune for each value, and its candidates, as group.name=a,b,c.",
  )
  flags.DEFINE_string(
    "budget",
    "steps:500",
    "Budget of each run: steps:N, seconds:N or processor_seconds:N.",
  )
  flags.DEFINE_string(
    "tune_budget", None, "Budget of each tuning run; default: --budget."
  )
  flags.DEFINE_integer("seeds", 1, "Number of runs with each value.", 1, 999)
  flags.DEFINE_integer("first_seed", 0, "The lowest seed.", 0)
  flags.DEFINE_integer("jobs", 1, "Number of runs that train in parallel.", 1)
  flags.DEFINE_enum(
    "equal",
    None,
    ["keys"],
    "keys: rejects values whose mean keys per query differ by more than 10 %.",
  )
  flags.DEFINE_string("workdir", None, "Folder of the comparison.")
  cli.run(main, cli.on_config)
