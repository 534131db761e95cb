"""Makes a run of the weights in a file: released ones, or those of export.

python -m sparse_transformer.convert FILE.safetensors --workdir=runs/converted

All commands can read the run; its checkpoint is of step 0. Trains nothing, and
needs no data. The config is the file's own or, for a .npz of Jun et al. 2020,
the one in configs/ with as many layers; --config=FILE sets another. Its fields
can be overridden: --config.data.path=DIR says where later commands find the
data.
"""

import pathlib
import runpy
from collections.abc import Sequence

from sparse_transformer import cli, schema, version
from sparse_transformer.cli import config_flags, flags

# Configs of the released networks, by their numbers of layers.
PRESETS = {32: "cifar10_15m", 48: "cifar10_150m", 128: "cifar10_58m"}


def main(argv: Sequence[str]) -> None:
  """Makes a run, at step 0, from a file of weights."""
  args = flags.FLAGS
  path = pathlib.Path(*argv[1:])
  if len(argv) != 2 or path.suffix not in (".npz", ".safetensors"):
    raise ValueError("give one file, NAME.npz or NAME.safetensors; see --help")
  if not args.workdir or pathlib.Path(args.workdir).exists():
    raise ValueError(f"--workdir={args.workdir or ''} must name a new folder")
  is_raw = args.weights == "params"
  if is_raw and path.suffix != ".npz":
    raise ValueError(
      f"--weights=params applies only to .npz files; leave it out for {path}"
    )
  schema.typed(args.config)
  # Mistakes in flags are found by now, before JAX loads.
  from sparse_transformer.training import workdir as workdir_lib
  from sparse_transformer.training.checkpoints import exported, released
  from sparse_transformer.training.experiment import Experiment

  workdir_lib.check_folder(args.workdir, workdir_lib.COMPARISON, "a comparison")

  # The config is that of a flag, or of the file, or the paper's.
  text = f"{path}:params" if is_raw else str(path)
  file = None if path.suffix == ".npz" else exported.load(path)
  # A run keeps a copy of its config file, if it has one.
  config_file = None
  if args["config"].present:
    config = schema.typed(args.config)
    config_file = config_flags.get_config_filename(args["config"])
  elif file:
    config = file.config.replace(**cli.overrides())
  else:
    weights, provenance = released.load(text)
    config = _preset(path, weights, provenance["starts"])
    config = config.replace(**cli.overrides())

  # Released networks were trained on most of our validation images.
  changes = {"train.init_from": text, "train.steps": 0}
  if not file and config.data.name == "cifar10":
    changes["data.name"] = released.SOURCE
  experiment = Experiment(config.replace(**changes))
  # Images must be there to know their size, unless the file says it.
  try:
    _ = experiment.source
  except FileNotFoundError:
    experiment = Experiment(experiment.config, shared=file and file.source)
  _write(experiment, pathlib.Path(args.workdir), config_file)


def _write(experiment, workdir, config_file):
  """Writes what a run has that trains no step: a checkpoint, metrics, a config.

  Args:
    experiment: its `train.init_from` names the file of weights.
    workdir: a new folder.
    config_file: copied into the workdir; None if there is none.
  """
  from sparse_transformer.training import banner, loop, metrics, warm_start
  from sparse_transformer.training.checkpoints import store

  state, start = warm_start.first_state(experiment)
  assert start  # it says what is in the file
  provenance = store.provenance(
    experiment.config, experiment.source, has_data=False
  )

  with (
    store.Saver(workdir, keep=1, provenance=provenance) as saver,
    metrics.Writer(workdir, -1) as writer,
  ):
    saver.save(state, start.get("bits"))
    writer.write(0, "start", **start)
  loop.write_run(experiment, workdir, config_file)
  print(banner.origin(start))
  print(banner.end(experiment, workdir, config_file))


def _preset(path, weights, starts):
  """The config of a released network, with the orders of images that it knows.

  Args:
    path: the file, for errors.
    weights: its arrays by name.
    starts: the names of arrays with embeddings of scans.
  """
  from sparse_transformer.training.checkpoints.released import ORDERS

  layers = len(weights.get("blocks.key.bias", ()))
  if layers not in PRESETS:
    raise ValueError(
      f"{path} has {layers} layers, and released networks have"
      f" {', '.join(map(str, PRESETS))}; say which config it has by --config"
    )
  # Files in configs/ are run, not imported: they are outside of the package.
  module = runpy.run_path(f"{version.ROOT}/configs/{PRESETS[layers]}.py")
  # A released network has embeddings of the scans that it was trained with.
  orders = [order for name, order in ORDERS.items() if name in starts]
  config = schema.typed(module["get_config"]())
  return config.replace(**{"data.orders": orders})


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of the new run.")
  flags.DEFINE_enum(
    "weights", "ema", ("ema", "params"), "Of a .npz: averaged weights, or raw."
  )
  cli.run(main, cli.on_file, takes_words=True)
