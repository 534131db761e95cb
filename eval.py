"""Evaluates a run in bits per dim.

python eval.py --workdir=runs/digits

The last line is a JSON object. The workdir knows its config; any field can be
set as in training: --config.attention.backend=dense.
"""

import json

from absl import flags

from sparse_transformer import checkpoint, command, evaluate
from sparse_transformer.experiment import Experiment

flags.DEFINE_enum(
  "split", "test", ("train", "validation", "test"), "What to score."
)
flags.DEFINE_integer("step", None, "Of the checkpoint; the last by default.")
flags.DEFINE_integer(
  "min_context",
  0,
  "Positions before each scored one, but for the first window of a stream.",
)


def main(argv):
  command.check_arguments(argv)
  args = flags.FLAGS
  experiment = Experiment(args.config)
  windows = experiment.source.windows(args.split, args.min_context)
  with checkpoint.Checkpoints(args.workdir) as checkpoints:
    state = experiment.restore(checkpoints, args.step)
  result = evaluate.bits_per_dim(
    experiment.losses,
    state.ema,
    windows,
    batch_size=experiment.config.eval.batch_size,
    sharding=experiment.batch_sharding,
    name=args.split,
  )
  result.update(
    split=args.split,
    step=int(state.step),
    min_context=args.min_context,
    unit=experiment.source.unit,
  )
  print(json.dumps(result))


if __name__ == "__main__":
  command.run_on_workdir(main)
