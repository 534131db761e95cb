"""Writes the weights of a run to one file, which other programs can read.

python -m sparse_transformer.export --workdir=RUN --out=NAME.safetensors

Layers have separate arrays, such as layers.0.attention.query.kernel;
docs/export.md lists all names. The metadata has the config without paths, the
vocabulary, the unit of losses and the step, so the file suffices, also on other
machines: `checkpoints.exported.load` reads it, and a run with
--config.train.init_from=FILE starts from it.
"""

from collections.abc import Sequence

from sparse_transformer import cli, config as config_lib
from sparse_transformer.cli import flags


def main(argv: Sequence[str]) -> None:
  """Writes the weights of a checkpoint into a file."""
  args = flags.FLAGS
  if args.out is None:
    raise ValueError("--out is missing; see --help")
  from sparse_transformer.training.checkpoints import exported
  from sparse_transformer.training.experiment import open_run

  # A path that cannot be written is found before the checkpoint is read.
  path = exported.check_path(args.out)
  run = open_run(args.workdir, cli.overrides(), args.step)
  # Flags may change how a network is computed, but not which one it is.
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
  flags.DEFINE_string("out", None, "The file, NAME.safetensors.")
  flags.DEFINE_string("step", None, "Checkpoint: a step, or best; or the last.")
  flags.DEFINE_enum(
    "weights", "ema", ("ema", "params"), "Averaged weights, or the step's own."
  )
  cli.run(main, cli.on_workdir)
