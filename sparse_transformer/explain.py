"""Reports what an experiment costs and what its positions see.

python -m sparse_transformer.explain --config=configs/cifar10.py

Prints tables: attention by pattern; what positions see through the network;
FLOPs, memory traffic and memory of a training step; the cache for decoding.
--json prints the same as one JSON object. Draws the patterns into --out. Reads
no data and trains nothing.
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from sparse_transformer import cli


def main(argv: Sequence[str]) -> None:
  cli.check_arguments(argv)
  cli.require("config")
  from sparse_transformer.training import explanation
  from sparse_transformer.training.experiment import Experiment

  args = flags.FLAGS
  model = Experiment(args.config).model
  report = explanation.explain(args.config, model)
  name = pathlib.Path(config_flags.get_config_filename(args["config"])).stem
  folder = args.out or f"explain/{name}"
  report["pictures"] = explanation.draw(folder, model)
  if args.json:
    print(json.dumps(report))
  else:
    print(explanation.render(report))
    print(f"\npictures in {folder}")


if __name__ == "__main__":
  flags.DEFINE_string(
    "out", None, "Folder of the pictures; default: explain/<config>."
  )
  flags.DEFINE_bool("json", False, "Prints one JSON object instead of tables.")
  cli.run_on_config(main)
