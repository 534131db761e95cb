"""Compiles the training step of all presets for absent devices.

  python -m benchmarks.compiled

Compiles those that benchmarks/results/compiled.json lacks, or with --only=TEXT
those whose names contain the text again, and writes them there after each
program, with the commit. Nothing is run, see docs/accelerators.md.
"""

import importlib
import itertools
from collections.abc import Iterable

from ml_collections import ConfigDict

from benchmarks import record
from sparse_transformer import config as config_lib, tables, version
from sparse_transformer.targets import compilers, hardware
from sparse_transformer.training.distributed import mesh

CONFIGS = {path.stem for path in (record.REPO / "configs").glob("*.py")}
# These cannot be built without their data, which give classes and shapes.
PRESETS = sorted(CONFIGS - {"default", "lra_text", "video"})
TARGETS = "h100:1x1x1", "h100:1x1x8", "v5e:2x2"
H100, EIGHT_H100, V5E = TARGETS
# Presets with changes, and what they are compiled for.
VARIANTS = (
  # As many micro-batches as it takes to fit.
  ("imagenet64 train.accumulation=2", H100),
  ("imagenet64 train.accumulation=4", V5E),
  ("imagenet64_300m train.accumulation=4", H100),
  ("music_3m train.accumulation=2", H100),
  ("enwik8 model.remat=none", H100),
  ("cifar10 mesh.fsdp=2 mesh.sequence=4", EIGHT_H100),
  ("enwik8 mesh.fsdp=8", EIGHT_H100),
  ("enwik8 mesh.sequence=8", EIGHT_H100),
)


def config_of(preset: str) -> ConfigDict:
  """The config of a preset: its name and fields to change, "a x.y=1"."""
  file, *fields = preset.split()
  config = importlib.import_module(f"configs.{file}").get_config()
  return config_lib.with_values(config, **dict(x.split("=") for x in fields))


def compile_preset(preset: str, name: str) -> dict:
  """The report on a preset for a target.

  A batch that is too small for the mesh gets one sequence for each part.
  """
  target, config = hardware.parse(name), config_of(preset)
  sizes, changes = mesh.sizes(config, target.num_devices), {}
  if config.train.batch_size < (fewest := mesh.num_shards(sizes)):
    config.train.batch_size = changes["train.batch_size"] = fewest
  mesh.check_batch(config, sizes)
  report = compilers.compile_for(target, config)
  about = dict(preset=preset, target=name, commit=version.commit())
  return about | report | dict(changes=changes)


def table(results: Iterable[dict]) -> str:
  """The programs that do not fit a device's memory."""
  rows = [("preset", "target", "peak memory", "commit")]
  for report in results:
    (program,) = report["programs"]
    if not program.get("fits"):
      peak = program.get("memory", {}).get("peak")
      names = f"`{report['preset']}`", f"`{report['target']}`"
      size = tables.size(peak) if peak else "not known"
      rows.append((*names, size, report["commit"]))
  return tables.markdown(rows)


def main() -> None:
  flags = record.parser(__doc__)
  flags.add_argument("--only", default="", help="rows with this text")
  only = flags.parse_args().only
  path = record.path("compiled")
  found = {(x["preset"], x["target"]): x for x in record.read("compiled")}
  everything = [(p, t) for t, p in itertools.product(TARGETS, PRESETS)]
  for key in (*everything, *VARIANTS):
    if (only in " ".join(key)) if only else (key not in found):
      found[key] = compile_preset(*key)
      record.write(path, [found[key] for key in sorted(found)])
  print(table(found.values()))


if __name__ == "__main__":
  main()
