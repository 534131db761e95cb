"""Reports what an experiment costs and what its positions see.

python -m sparse_transformer.explain --config=configs/cifar10.py

Prints tables: attention by pattern; what positions see through the network;
FLOPs, memory traffic and memory of a training step; the cache for decoding.
--json prints the same as one JSON object. Draws the patterns into --out. Reads
no data and trains nothing.

python -m sparse_transformer.explain --config=configs/cifar10.py --target=h100

Instead compiles the training step, or with --part=attention only its attention,
for devices that are not here: whether it compiles and fits, what it launches,
and what to change if it does not fit. --target=list lists the devices.
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from sparse_transformer import cli


def main(argv: Sequence[str]) -> None:
  cli.check_arguments(argv)
  args = flags.FLAGS
  if args.target is None:
    cli.require("config")
    if args["part"].present:
      raise ValueError("--part is a part of what --target compiles; name one")
    _explain(args)
  elif args.target == "list":
    from sparse_transformer.targets import catalogue

    print(catalogue.describe())
  else:
    cli.require("config", "target")
    _compile(args)


def _explain(args):
  """Prints the tables, and draws the patterns."""
  from sparse_transformer.training import cautions, explanation
  from sparse_transformer.training.experiment import Experiment

  model = Experiment(args.config).model
  cautions.report(args.config)
  report = explanation.explain(args.config, model)
  name = pathlib.Path(config_flags.get_config_filename(args["config"])).stem
  folder = args.out or f"explain/{name}"
  report["pictures"] = explanation.draw(folder, model)
  if args.json:
    print(json.dumps(report))
  else:
    print(explanation.render(report))
    print(f"\npictures in {folder}")


def _compile(args):
  """Prints what the compiler for a target has made of the experiment."""
  from sparse_transformer.targets import (
    advice,
    catalogue,
    compilers,
    rendering,
  )
  from sparse_transformer.training.experiment import Experiment, check_batch

  target = catalogue.parse(args.target)
  Experiment(args.config)  # checks the config
  check_batch(args.config, target.num_devices)
  report = compilers.compile_for(target, args.config, args.part)
  if any(map(rendering.needed_more, report["programs"])):
    report["advice"] = advice.advise(target, args.config, report)
  print(json.dumps(report) if args.json else rendering.render(report))


if __name__ == "__main__":
  flags.DEFINE_string(
    "out", None, "Folder of the pictures; default: explain/<config>."
  )
  flags.DEFINE_bool("json", False, "Prints one JSON object instead of tables.")
  flags.DEFINE_string(
    "target",
    None,
    "Devices that are not here to compile for: h100, h100:1x1x8, v5e:2x2; list"
    " prints them all.",
  )
  flags.DEFINE_enum(
    "part",
    "step",
    ["step", "attention"],
    "What to compile for the target: the training step or, by itself, the"
    " attention of each distinct layer.",
  )
  cli.run_on_config(main)
