"""Evaluates a run in bits per dim.

python eval.py --workdir=runs/digits

Prints a JSON object for each checkpoint and each --min_context, one per line.
Writes bits by position in the window to `evaluations` in the workdir, as JSON
and as a picture. The config is read from the workdir; any field can be
overridden as in training: --config.attention.backend=dense.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Literal

from absl import flags

from sparse_transformer import cli
from sparse_transformer.data import SPLITS


def main(argv: Sequence[str]) -> None:
  cli.check_arguments(argv)
  args = flags.FLAGS
  steps: Sequence[int | None] | Literal["best"]
  match args.step:
    case ["all"]:
      steps = []
    case ["best"]:
      steps = "best"
    case words:
      steps = integers("step", words) or [None]
  contexts = integers("min_context", args.min_context)
  from sparse_transformer.training.scoring import score_run

  scored = score_run(
    args.config,
    args.workdir,
    split=args.split,
    steps=steps,
    contexts=contexts,
    weights=args.weights,
  )
  # If nobody reads the output, the generator must not be left to the end of
  # the process, where its checkpoints can no longer be closed.
  with contextlib.closing(scored) as results:
    for result in results:
      print(json.dumps(result), flush=True)


def integers(flag: str, words: Sequence[str]) -> list[int]:
  """The value of a flag that lists different integers."""
  try:
    numbers = [int(word) for word in words]
  except ValueError:
    numbers = None
  if numbers is None or len(set(numbers)) < len(numbers):
    raise ValueError(
      f"--{flag}={','.join(words)} must be integers, each of them once,"
      " separated by commas"
    )
  return numbers


if __name__ == "__main__":
  flags.DEFINE_enum("split", "test", SPLITS, "Split to score.")
  flags.DEFINE_list(
    "step",
    [],
    "Steps of checkpoints; all; or best: the one that scores best on the whole"
    " validation split; default: last.",
  )
  flags.DEFINE_list(
    "min_context",
    ["0"],
    "Minimum numbers of positions before a scored one; the first window of a"
    " stream has none.",
  )
  flags.DEFINE_enum(
    "weights", "ema", ("ema", "params"), "Averaged weights, or the step's own."
  )
  cli.run_on_workdir(main)
