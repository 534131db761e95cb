"""Evaluates a run in bits per dim.

python eval.py --workdir=runs/digits

Prints a JSON object for each checkpoint and --min_context that is asked for,
each in a line. Bits by position in the window go to evaluations/ in the
workdir, as JSON and as a picture. The workdir knows its config; any field can
be set as in training: --config.attention.backend=dense.
"""

import json
import pathlib

import numpy as np
from absl import flags

from sparse_transformer import cli, data
from sparse_transformer.figures import plots
from sparse_transformer.training import (
  checkpoint,
  evaluate,
  signals as signals_lib,
)
from sparse_transformer.training.experiment import Experiment

flags.DEFINE_enum(
  "split", "test", ("train", "validation", "test"), "What to score."
)
flags.DEFINE_list(
  "step", [], "Of the checkpoints, or all; the last by default."
)
flags.DEFINE_list(
  "min_context",
  ["0"],
  "Positions before each scored one, but for the first window of a stream.",
)
flags.DEFINE_enum(
  "weights", "ema", ("ema", "params"), "Averaged, or as trained last."
)


def chosen_steps(checkpoints, words):
  """The steps that --step names."""
  if words == ["all"]:
    return checkpoints.steps() or [None]
  return integers("step", words) or [None]


def integers(name, words):
  try:
    return [int(word) for word in words]
  except ValueError:
    raise ValueError(
      f"--{name}={','.join(words)} must be numbers, with commas between them"
    ) from None


def score(experiment, state, split, min_context, weights, signals):
  """(what eval.py prints, bits by position) of one checkpoint.

  A stopped evaluation prints what it had.
  """
  source, config = experiment.source, experiment.config.eval
  about = dict(
    split=split,
    step=int(state.step),
    min_context=min_context,
    weights=weights,
    unit=source.unit,
  )
  tally = evaluate.Tally(source.length)
  try:
    evaluate.bits_per_dim(
      experiment.losses,
      getattr(state, weights),
      signals.checked(source.windows(split, min_context)),
      batch_size=config.batch_size,
      sharding=experiment.batch_sharding,
      name=split,
      tally=tally,
    )
  except signals_lib.Stopped:
    print(json.dumps(tally.summary() | about | dict(complete=False)))
    raise
  result = tally.summary() | about
  if isinstance(source, data.Images) and source.shape[2] > 1:
    result["by_channel"] = tally.by_channel(source.shape[2]).tolist()
  return result, tally.by_position()


def save(folder, result, bits_L):
  """Writes bits by position of a result: JSON and a picture."""
  folder = pathlib.Path(folder) / "evaluations"
  folder.mkdir(exist_ok=True)
  stem = "{split}-step{step}-context{min_context}-{weights}".format(**result)
  bits = [None if np.isnan(x) else round(float(x), 6) for x in bits_L]
  text = json.dumps(result | dict(by_position=bits))
  (folder / f"{stem}.json").write_text(text + "\n")
  plots.save_positions(folder / f"{stem}.png", bits_L, result)


def main(argv):
  cli.check_arguments(argv)
  args = flags.FLAGS
  experiment = Experiment(args.config)
  contexts = integers("min_context", args.min_context)
  for min_context in contexts:  # mistakes are found before the work
    experiment.source.windows(args.split, min_context)
  with (
    signals_lib.Signals() as signals,
    checkpoint.Checkpoints(args.workdir) as checkpoints,
  ):
    for step in chosen_steps(checkpoints, args.step):
      state = experiment.restore(checkpoints, step)
      for min_context in contexts:
        result, bits_L = score(
          experiment, state, args.split, min_context, args.weights, signals
        )
        save(args.workdir, result, bits_L)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
  cli.run_on_workdir(main)
