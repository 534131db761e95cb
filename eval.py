"""Evaluates a run in bits per dim.

python eval.py --workdir=runs/digits

Prints one JSON object per line for each checkpoint and each --min_context, and
a one-sentence summary on standard error. --examples=N scores only the first N
examples. Writes the bits by position in the window into the folder
`evaluations` of the workdir, as JSON and as a picture, from which
sparse_transformer.report makes a table.

The config is read from the workdir. Any field can be overridden as in training,
for example with --config.attention.backend=dense. If the overrides can change
the score, they are recorded with it, and the score is written to separate
files. Scores are computed in float32, even for runs trained in bfloat16 or
float16, unless --config.model.dtype sets another dtype.
--config.data.path=FILE scores other data with the same vocabulary.
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
  # This import loads JAX, so mistakes in flags are reported before it.
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
  # Print each score as soon as it is known, because the next may take hours.
  overrides = cli.overrides(in_float32=True)
  for score in evaluations.evaluate_run(
    args.workdir, args.step, overrides, requests
  ):
    print(json.dumps(score.json()), flush=True)
    print(score.sentence(), file=sys.stderr, flush=True)


def _contexts(words):
  """Returns the distinct integers of --min_context, in the order given."""
  if all(re.fullmatch("-?[0-9]{1,25}", word) for word in words):
    return [*dict.fromkeys(map(int, words))]
  text = ",".join(words)
  raise ValueError(
    f"--min_context={text} must be integers separated by commas, such as 0,512"
  )


if __name__ == "__main__":
  flags.DEFINE_enum("split", "test", SPLITS, "Split to score.")
  flags.DEFINE_integer(
    "examples", None, "Scores only the first N examples; default: all.", 1
  )
  flags.DEFINE_list(
    "step",
    [],
    "Checkpoints to score: steps, all, or best (by validation during training);"
    " default: the last.",
  )
  flags.DEFINE_list(
    "min_context",
    ["0"],
    "Scores only positions that follow at least N others; several N are"
    " separated by commas.",
  )
  flags.DEFINE_list(
    "order",
    [],
    "Order in which images are read, as NAME=LABEL; see docs/data.md.",
  )
  flags.DEFINE_enum(
    "weights",
    "ema",
    ("ema", "params"),
    "Scores the averaged weights (ema) or the raw weights (params).",
  )
  cli.run(main, cli.on_workdir)
