"""Trains a model from a config file.

python train.py --config=configs/digits.py --workdir=runs/digits

Any field of the config can be set: --config.attention.pattern=fixed. Started
again in the same workdir, a run goes on from its last checkpoint. SIGTERM and
SIGINT make it save and end with status 130; a second one ends it at once.
--replay=STEP computes the batch of a step from the checkpoint before it, and
writes nothing.
"""

from absl import flags

from sparse_transformer import cli
from sparse_transformer.training.loop import replay, train


def main(argv):
  cli.check_arguments(argv)
  args = flags.FLAGS
  cli.require("config", "workdir")
  if args.replay is None:
    train(args.config, args.workdir)
  elif args.replay < 1:
    raise ValueError(f"--replay={args.replay} must be a step, from 1")
  else:
    replay(args.config, args.workdir, args.replay)


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder the run writes into.")
  flags.DEFINE_integer("replay", None, "Computes the batch of that step.")
  cli.run_on_config(main)
