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
from typing import TYPE_CHECKING, Any

from sparse_transformer import cli, tables
from sparse_transformer.cli import flags
from sparse_transformer.data import SPLITS

if TYPE_CHECKING:  # takes seconds
  from sparse_transformer.training.checkpoints.store import Checkpoints


def main(argv: Sequence[str]) -> None:
  args, found = flags.FLAGS, []
  contexts = integers("min_context", args.min_context)
  from sparse_transformer.signals import Signals
  from sparse_transformer.training.evaluation import evaluations, trained_run

  run = trained_run.open_run(args.workdir, cli.exact_config())
  experiment, checkpoints = run
  requests = [
    evaluations.Request(args.split, x, args.weights) for x in contexts
  ]
  for request in requests:  # finds errors before the work starts
    experiment.source.windows(request.split, request.min_context)
  with Signals() as signals:
    for step in _steps(checkpoints, args.step):
      try:
        state = trained_run.restore(*run, step, with_data=True)
      except (ValueError, FileNotFoundError):
        if args.step != ["all"] or step in checkpoints.steps():
          raise
        print(f"skipping step {step}, deleted meanwhile", file=sys.stderr)
        continue
      for request in requests:
        result = evaluations.evaluate(*run, state, request, signals.check)
        print(json.dumps(result), flush=True)
        signals.check()
        found.append(result)
  if not found:
    raise FileNotFoundError("all checkpoints were deleted meanwhile")
  if len(found) > 1:
    print(_table(found), file=sys.stderr)


def _steps(checkpoints: "Checkpoints", words: Sequence[str]) -> list[int]:
  """The steps that --step names, all of which are saved."""
  last = checkpoints.find(None)  # there must be one
  match words:
    case ["all"]:
      return checkpoints.steps()
    case ["best"]:
      return [checkpoints.find("best")]
  steps = integers("step", words)
  return [checkpoints.find(step) for step in steps] or [last]


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
    "Steps of checkpoints; all; or best, by validation in training; default:"
    " last.",
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
