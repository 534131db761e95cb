"""Makes a run of the weights in a file: released ones, or those of export.

python -m sparse_transformer.convert FILE.npz --workdir=runs/released

All commands can read the run; its checkpoint is of step 0. By default, the
config is the file's own or, for a .npz of Jun et al. 2020, the one in configs/
with as many layers; --config sets another.
"""

import pathlib
import runpy
from collections.abc import Sequence

from sparse_transformer import cli, schema, version
from sparse_transformer.cli import flags

# Configs of the released networks, by their numbers of layers.
PRESETS = {32: "cifar10_15m", 48: "cifar10_150m", 128: "cifar10_58m"}


def main(argv: Sequence[str]) -> None:
  args = flags.FLAGS
  path = pathlib.Path(*argv[1:])
  if len(argv) != 2 or path.suffix not in (".npz", ".safetensors"):
    raise ValueError("give one file, NAME.npz or NAME.safetensors; see --help")
  if not args.workdir or pathlib.Path(args.workdir).exists():
    raise ValueError(f"--workdir={args.workdir or ''} must name a new folder")
  if args.weights == "params" and path.suffix != ".npz":
    raise ValueError(f"--weights=params is of a .npz; leave it out for {path}")
  config = None if args.config is None else schema.typed(args.config)
  text = f"{path}:params" if args.weights == "params" else str(path)
  from sparse_transformer.training.checkpoints import exported, released
  from sparse_transformer.training.loop import train

  changes = {"train.init_from": text, "train.steps": 0}
  if path.suffix != ".npz":
    config = config or exported.load(path).config
  else:
    config = config or _preset(path, *released.load(text))
    if config.data.name == "cifar10":
      # They were trained on most of its validation images.
      changes["data.name"] = released.SOURCE
  train(config.replace(**changes), args.workdir)


def _preset(path, weights, about):
  from sparse_transformer.training.checkpoints.released import ORDERS

  layers = len(weights.get("blocks.key.bias", ()))
  if layers not in PRESETS:
    raise ValueError(
      f"{path} has {layers} layers, and released networks have"
      f" {', '.join(map(str, PRESETS))}; say which config it has by --config"
    )
  preset = runpy.run_path(f"{version.ROOT}/configs/{PRESETS[layers]}.py")
  found = tuple(x for name, x in ORDERS.items() if name in about["starts"])
  return schema.typed(preset["get_config"]()).replace(**{"data.orders": found})


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of the new run.")
  flags.DEFINE_enum(
    "weights", "ema", ("ema", "params"), "Of a .npz: averaged weights, or raw."
  )
  cli.run(main, cli.on_config, takes_words=True)
