"""Trains a model from a config file.

python train.py --config=configs/digits.py --workdir=runs/digits

Any field of the config can be overridden: --config.attention.pattern=fixed.
Restarted with the same workdir, it resumes from the last checkpoint. SIGTERM
and SIGINT make it save a checkpoint and exit with status 130; a second signal
ends it at once. --replay=STEP recomputes the batch of a step, from the last
checkpoint before it, and writes nothing.
"""

from collections.abc import Sequence

from absl import flags

from sparse_transformer import cli


def main(argv: Sequence[str]) -> None:
  cli.check_arguments(argv)
  cli.require("config", "workdir")
  from sparse_transformer.training.loop import replay, train

  args = flags.FLAGS
  if args.replay is None:
    train(args.config, args.workdir)
  else:
    replay(args.config, args.workdir, args.replay)


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder that the run writes to.")
  flags.DEFINE_integer(
    "replay", None, "Step whose batch to recompute.", lower_bound=1
  )
  cli.run_on_config(main)
