"""Evaluates a run in bits per dim.

python eval.py --workdir=runs/digits

Prints a JSON object for each checkpoint and each --min_context, one per line,
and a sentence about it on standard error. --examples=N scores the first N only.
Writes bits by position in the window to `evaluations` in the workdir, as JSON
and as a picture, and report.py shows them in a table. The config is
read from the workdir; any field can be overridden as in training:
--config.attention.backend=dense. A score under overrides that change it names
them, and has files of its own. Scores are computed in float32, also for runs in
bfloat16 or float16, unless --config.model.dtype names another dtype.
--config.data.path=FILE scores other data, with the same symbols.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Sequence

from sparse_transformer import cli, version
from sparse_transformer.cli import flags
from sparse_transformer.data import SPLITS


def main(argv: Sequence[str]) -> None:
  args = flags.FLAGS
  contexts = _contexts(args.min_context)
  from sparse_transformer.signals import Signals
  from sparse_transformer.training import kernel_check
  from sparse_transformer.training.checkpoints.store import Saved
  from sparse_transformer.training.evaluation import evaluations
  from sparse_transformer.training.experiment import open_run

  steps = _steps(Saved(args.workdir), args.step)
  overrides = cli.overrides(exact=True)
  runs = [open_run(args.workdir, overrides, x) for x in steps]
  experiments = {run.experiment.config: run.experiment for run in runs}
  order = tuple(args.order)
  requests = [
    evaluations.Request(args.split, x, args.weights, args.examples, order)
    for x in contexts
  ]
  for experiment in experiments.values():  # finds errors before the work starts
    kernel_check.avoid_wrong(experiment)
    for request in requests:
      request.windows(experiment.source)
  unsaved = None
  with Signals() as signals:
    for run in runs:
      # Equal ones are compiled once.
      shared = experiments[run.experiment.config]
      run = dataclasses.replace(run, experiment=shared)
      state = run.restore(with_data=True)
      for request in requests:
        command = version.command(
          step=run.step, min_context=request.min_context
        )
        named = dataclasses.replace(request, command=command)
        result = evaluations.evaluate(run, state, named, signals.check)
        print(json.dumps(result), flush=True)
        unsaved = unsaved or result.get("unsaved")
        if result.get("complete", True):
          line = evaluations.sentence(result, run.experiment)
          print(line, file=sys.stderr, flush=True)
        signals.check()
  if unsaved:
    raise OSError(f"what is printed could not be written: {unsaved}")


def _steps(saved, words):
  if words == ["all"] and (steps := saved.steps()):
    return steps
  return [*dict.fromkeys(saved.find(x) for x in words or [None])]


def _contexts(words):
  if all(re.fullmatch("-?[0-9]{1,25}", word) for word in words):
    return [*dict.fromkeys(map(int, words))]
  text = ",".join(words)
  raise ValueError(f"--min_context={text} must be integers, between commas")


if __name__ == "__main__":
  flags.DEFINE_enum("split", "test", SPLITS, "Split to score.")
  flags.DEFINE_integer(
    "examples", None, "How many examples to score, the first; or all.", 1
  )
  flags.DEFINE_list(
    "step", [], "Steps; all; or best, by validation in training; or the last."
  )
  flags.DEFINE_list(
    "min_context", ["0"], "Fewest positions before scored ones."
  )
  flags.DEFINE_list("order", [], "Of images: NAME=LABEL, see docs/data.md.")
  flags.DEFINE_enum(
    "weights", "ema", ("ema", "params"), "Averaged weights, or the step's own."
  )
  cli.run(main, cli.on_workdir)
