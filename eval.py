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

import json
import re
import sys
from collections.abc import Sequence

from sparse_transformer import cli
from sparse_transformer.cli import flags
from sparse_transformer.data import SPLITS


def main(argv: Sequence[str]) -> None:
  """Scores checkpoints of a run, and prints each score as JSON."""
  args = flags.FLAGS
  contexts = _contexts(args.min_context)
  # JAX loads here, after mistakes in flags are found.
  from sparse_transformer.training.evaluation import evaluations

  requests = [
    evaluations.ScoreRequest(
      split=args.split,
      min_context=context,
      weights=args.weights,
      examples=args.examples,
      order=tuple(args.order),
    )
    for context in contexts
  ]
  # Each score is printed when it is known: others may take hours.
  overrides = cli.overrides(in_float32=True)
  for score in evaluations.evaluate_run(
    args.workdir, args.step, overrides, requests
  ):
    print(json.dumps(score.json()), flush=True)
    print(score.sentence(), file=sys.stderr, flush=True)


def _contexts(words):
  """The integers of --min_context, each once, in their order."""
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
  flags.DEFINE_list(
    "order", [], "Permutations of images: NAME=LABEL, see docs/data.md."
  )
  flags.DEFINE_enum(
    "weights", "ema", ("ema", "params"), "Averaged weights, or the step's own."
  )
  cli.run(main, cli.on_workdir)
