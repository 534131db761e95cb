"""Exports the weights of a run to one file that other programs can read.

python -m sparse_transformer.export --workdir=RUN --out=NAME.safetensors

Each layer has its own arrays, such as layers.0.attention.query.kernel;
docs/export.md lists all names. The metadata contains the config without paths,
the vocabulary, the unit of losses and the step, so the file can be used alone
and on other machines: `checkpoints.exported.load` reads it, and
--config.train.init_from=FILE starts a run from it.
"""

from collections.abc import Sequence

from sparse_transformer import cli, config as config_lib
from sparse_transformer.cli import flags


def main(argv: Sequence[str]) -> None:
  """Writes the weights of a checkpoint to a file."""
  args = flags.FLAGS
  if args.out is None:
    raise ValueError("--out is missing; see --help")
  from sparse_transformer.training.checkpoints import exported
  from sparse_transformer.training.experiment import open_run

  # Check the output path before the checkpoint is read, which takes longer.
  path = exported.check_path(args.out)
  run = open_run(args.workdir, cli.overrides(), args.step)
  # Flags may change how the network is computed, but not the network itself.
  run.changes(config_lib.TO_RESUME)

  state = run.restore()
  exported.save(
    path,
    run.experiment.config,
    getattr(state, args.weights),
    step=run.step,
    weights=args.weights,
  )
  print(f"weights of {run.experiment.stage(run.step)} in {path}")


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "File to write, NAME.safetensors.")
  flags.DEFINE_string(
    "step", None, "Checkpoint to read: a step, or best; default: the last."
  )
  flags.DEFINE_enum(
    "weights",
    "ema",
    ("ema", "params"),
    "Exports the averaged weights (ema) or the raw weights (params).",
  )
  cli.run(main, cli.on_workdir)
