"""Writes the record of a trained run or a comparison, for the pages in docs.

python -m benchmarks.run --workdir=runs/digits --config=configs/digits.py
python -m benchmarks.run --workdir=runs/cifar10_keys

The record of a run contains the commit and machine of this process, so write it
directly after the run. The file is benchmarks/results/<workdir>.json.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags
from ml_collections import config_flags

from benchmarks import record
from sparse_transformer import atomic, cli, config as config_lib, model, schema
from sparse_transformer.comparison import record as comparison
from sparse_transformer.training import metrics
from sparse_transformer.training.experiment import Experiment

PART = 64  # positions over which bits by position are averaged


def main(argv: Sequence[str]) -> None:
  args = flags.FLAGS
  workdir = pathlib.Path(args.workdir or "")
  out = pathlib.Path(args.out or record.FOLDER / f"{workdir.name}.json")
  if (workdir / "comparison.json").exists():
    found = atomic.read_json(workdir / "comparison.json")
    about, data = found["about"], found["about"]["config"]["data"]
    about["command"] = record.without_folders(about["command"])
    data["path"] = record.without_folders(data["path"])
    found["evaluations"] = [*evaluated(workdir)]
    comparison.write_record(out, found)
    return
  cli.require("config", "workdir")
  config = config_lib.read_config(workdir)
  preset = config_flags.get_config_filename(args["config"])
  words = [f"--config={preset}", f"--workdir=runs/{workdir.name}"]
  words += config_lib.overrides(args.config, config)
  content = record.about("python train.py", words) | describe(workdir, config)
  record.write(out, content)


def evaluated(workdir: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the scores of a comparison's runs, including those on other data."""
  for path in sorted(workdir.glob("*/seed*/evaluations/*.json")):
    found = atomic.read_json(path)
    other = found.get("overrides", {}).get("data.path", "")
    known = [x for x in found["by_position"] if x is not None]
    parts = np.array_split(known, -(-len(known) // PART))
    yield dict(
      pattern=config_lib.read_config(path.parents[1]).attention.pattern,
      seed=path.parent.parent.name,
      split=found["split"],
      data=record.without_folders(other),
      length=len(found["by_position"]),
      examples=found["examples"],
      bits_per_dim=found["bits_per_dim"],
      by_position=[float(x.mean()) for x in parts],
    )


def describe(workdir: pathlib.Path, config: schema.Config) -> dict[str, Any]:
  paths = sorted((workdir / "evaluations").glob("*.json"))
  results = [x for x in map(atomic.read_json, paths) if not x.get("overrides")]
  if not results:
    raise FileNotFoundError(f"{workdir} has no evaluations; run eval.py first")
  for x in results:
    x["command"] = record.without_folders(x.get("command", ""))
  lines = metrics.read(workdir)
  fields = "step", "bits_per_dim", *metrics.TIMES
  most = {
    name: max((x[name] for x in lines if name in x), default=None)
    for name in ("step", *metrics.TIMES)
  }
  path = record.without_folders(config.data.path)
  return dict(
    seed=config.train.seed,
    parameters=model.count_parameters(Experiment(config).model),
    steps=most.pop("step") or 0,
    **most,
    evaluations=[
      {k: v for k, v in x.items() if not isinstance(v, (list, dict))}
      for x in results
    ],
    validation=[
      {name: line[name] for name in fields if name in line}
      for line in lines
      if line["split"] == "validation"
    ],
    config=config.replace(**{"data.path": path}).to_dict(),
  )


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of the run or comparison.")
  flags.DEFINE_string("out", None, "File to which the record is written.")
  cli.run(main, cli.on_config)
