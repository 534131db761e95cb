"""Evaluates a run in bits per dim.

python eval.py --workdir=runs/digits

Prints a JSON object for each checkpoint and each --min_context, one per line,
and several of them as a table on standard error. Writes bits by position in the
window to `evaluations` in the workdir, as JSON and as a picture. The config is
read from the workdir; any field can be overridden as in training:
--config.attention.backend=dense. A score under overrides that change it names
them, and has files of its own. Scores are computed in float32, also those of
a run in bfloat16 or float16, unless --config.model.dtype names another dtype.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sparse_transformer import cli, tables
from sparse_transformer.cli import flags
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
  from sparse_transformer.training.evaluation.trained_run import open_run

  found = []
  with open_run(args.workdir, cli.exact_config()) as run:
    for result in run.evaluations(args.split, steps, contexts, args.weights):
      print(json.dumps(result), flush=True)
      found.append(result)
  if len(found) > 1:
    print(_table(found), file=sys.stderr)


def _table(results: Sequence[Mapping[str, Any]]) -> str:
  """Several results, as aligned columns."""
  columns = dict(step="step", min_context="min_context")
  columns |= dict(bits_per_dim=results[0]["unit"], bits_per_byte="bits/byte")
  columns |= dict(standard_error="standard error", accuracy="accuracy")
  columns |= dict(accuracy_error="standard error", tokens="tokens")
  names = [name for name in columns if name in results[0]]
  titles = [columns[name] for name in names]
  rows = [[_cell(result[name]) for name in names] for result in results]
  return tables.align([titles, *rows], right_from=0)


def _cell(x: float | None) -> str:
  if x is None:
    return "-"
  return f"{x:,}" if isinstance(x, int) else f"{x:.4f}"


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
  cli.run(main, cli.on_workdir)
