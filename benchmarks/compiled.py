"""Compiles the presets for absent devices.

  python -m benchmarks.compiled

Compiles training steps for benchmarks/results/compiled.json, and attention for
kernels.json, once for presets that use the same kernels. Only missing rows are
compiled or, with --only=TEXT, the rows that contain this text. Nothing is run,
see docs/backends.md.
"""

import importlib
import itertools
import os
import pathlib
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from unittest import mock

from benchmarks import record
from sparse_transformer import config as config_lib, schema, tables, version
from sparse_transformer.attention import platforms, registry
from sparse_transformer.targets import compilers, hardware
from sparse_transformer.training import costs
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.experiment import Experiment

sys.path.insert(0, str(record.REPO / "tests"))

from helpers import assembly

CONFIGS = {path.stem for path in (record.REPO / "configs").glob("*.py")}
# The other configs cannot be built without their data, which define classes and
# shapes.
PRESETS = sorted(CONFIGS - {"default", "lra_text", "video"})
TARGETS = "h100:1x1x1", "h100:1x1x8", "v5e:2x2"
H100, EIGHT_H100, V5E = TARGETS
# (preset with changed fields, target).
VARIANTS = (
  # With enough micro-batches to fit in memory.
  ("imagenet64 train.accumulation=2", H100),
  ("imagenet64 train.accumulation=4", V5E),
  ("imagenet64_300m train.accumulation=4", H100),
  ("music_3m train.accumulation=2", H100),
  ("enwik8 model.remat=none", H100),
  ("cifar10 mesh.fsdp=2 mesh.sequence=4", EIGHT_H100),
  ("enwik8 mesh.fsdp=8", EIGHT_H100),
  ("enwik8 mesh.sequence=8", EIGHT_H100),
)
# A GPU of each compute capability, and head widths that no preset uses.
GPUS = "a100", "a10", "rtx4090", "h100", "b200", "rtxpro6000"
WIDTHS = ("enwik8_strided model.width=256", "enwik8_strided model.width=1024")


def config_of(preset: str) -> schema.Config:
  """Returns the config of a preset, a name and fields to change, "a x.y=1"."""
  file, *fields = preset.split()
  config = importlib.import_module(f"configs.{file}").get_config()
  return config_lib.with_texts(config, dict(x.split("=") for x in fields))


def changes_for(config: schema.Config, num_devices: int) -> dict[str, int]:
  """Returns fields to change so that the batch is large enough for the mesh."""
  fewest = mesh.num_shards(mesh.sizes(config, num_devices))
  is_small = config.train.batch_size < fewest
  return {"train.batch_size": fewest} if is_small else {}


def compile_preset(preset: str, name: str) -> dict:
  """Returns the report on a preset, with a batch large enough for the mesh."""
  target, config = hardware.parse(name), config_of(preset)
  # Use the same rematerialization in all rows that do not set it, so that they
  # can be compared.
  if config.model.remat == "auto":
    config = config.replace(**{"model.remat": "block"})
  changes = changes_for(config, target.num_devices)
  config = config.replace(**changes)
  mesh.check_batch(config, mesh.sizes(config, target.num_devices))
  report = compilers.compile_for(target, config)
  about = dict(preset=preset, target=name, commit=version.commit())
  return about | report | dict(changes=changes)


def kinds(name: str) -> dict[str, list[str]]:
  """Returns {description of the backend on a GPU: presets that use it}."""
  target, found = hardware.parse(name), {}
  with platforms.targeting("cuda", target.capability):
    for preset in (*PRESETS, *WIDTHS):
      experiment, kind = Experiment(config_of(preset)), []
      for request in costs.attention_requests(
        experiment.config, experiment.model
      ):
        backend = registry.resolve("auto", request)
        widths = f"{request.qk_width} and {request.value_width}"
        words = " with ".join([request.dtype, *request.features.asked])
        kind.append(f"{backend}, {widths}, group {request.group}, {words}")
      found.setdefault(" or ".join(dict.fromkeys(kind)), []).append(preset)
  return found


def compile_kernels(preset: str, name: str) -> dict:
  """Returns the resources of a preset's attention kernels on a GPU."""
  with tempfile.TemporaryDirectory() as folder:
    with mock.patch.dict(os.environ, assembly.variables(folder)):
      inputs = hardware.parse(name), config_of(preset)
      found = compilers.compile_for(*inputs, "attention")
    kernels = assembly.kernels(pathlib.Path(folder))
  most = lambda key: max((x[key] for x in kernels.values()), default=0)
  return dict(
    commit=version.commit(),
    compiles=all(x["compiles"] for x in found["programs"]),
    spilled_bytes=most("spilled_bytes"),
    registers=most("registers"),
    shared_bytes=most("shared_bytes"),
  )


def kernel_table(results: Iterable[dict]) -> str:
  """Returns a table of kernels that spill registers or do not compile."""
  results, bad = list(results), {}
  for x in results:
    if x["spilled_bytes"] or not x["compiles"]:
      what = f"{x['spilled_bytes']:,} B" if x["compiles"] else "fails"
      names = ", ".join(f"`{y}`" for y in x["presets"])
      bad.setdefault((x["kind"], names), []).append(f"{x['target']} {what}")
  gpus = ", ".join(dict.fromkeys(x["target"] for x in results))
  number = len({y for x in results for y in x["presets"]} - {*WIDTHS})
  text = (
    f"The attention of {number} presets, and attention with other widths of"
    f" heads, was compiled for {gpus}. It spills no registers"
  )
  if not bad:
    return f"{text}."
  rows = [("backend, widths K and E", "presets", "spilled registers")]
  rows += [(*key, ", ".join(found)) for key, found in bad.items()]
  text = textwrap.fill(f"{text}, with these exceptions:", 100)
  return f"{text}\n\n{tables.markdown(rows)}"


def table(results: Iterable[dict]) -> str:
  """Returns a table of the programs that do not fit in a device's memory."""
  rows = [("preset", "target", "peak memory", "commit")]
  for report in results:
    (program,) = report["programs"]
    if not program.get("fits"):
      peak = program.get("memory", {}).get("peak")
      names = f"`{report['preset']}`", f"`{report['target']}`"
      size = tables.size(peak) if peak else "not known"
      rows.append((*names, size, report["commit"]))
  return tables.markdown(rows)


def record_steps(only: str) -> None:
  """Compiles training steps, and prints those that do not fit in memory."""
  path = record.path("compiled")
  found = {(x["preset"], x["target"]): x for x in record.read("compiled")}
  everything = [(p, t) for t, p in itertools.product(TARGETS, PRESETS)]
  for key in (*everything, *VARIANTS):
    if only in " ".join(key) if only else key not in found:
      found[key] = compile_preset(*key)
      record.write(path, [found[key] for key in sorted(found)])
  print(table(found.values()))


def record_kernels(only: str) -> None:
  """Compiles attention, and prints where it spills registers."""
  path = record.path("kernels")
  rows = record.read("kernels") if path.exists() else []
  old = {(x["kind"], x["target"]): x for x in rows}
  wanted = {
    (kind, gpu): presets for gpu in GPUS for kind, presets in kinds(gpu).items()
  }
  new = {key: old[key] for key in wanted if key in old}
  for key, presets in wanted.items():
    about = dict(kind=key[0], target=key[1], presets=presets)
    if only in " ".join((*key, *presets)) if only else key not in old:
      new[key] = about | compile_kernels(presets[0], key[1])
      record.write(path, [*new.values()])
    elif key in new:
      new[key] |= about  # the presets may have changed
  record.write(path, [*new.values()])
  print(kernel_table(new.values()))


def main() -> None:
  flags = record.parser(__doc__)
  flags.add_argument("--only", default="", help="compiles rows with this text")
  only = flags.parse_args().only
  record_steps(only)
  record_kernels(only)


if __name__ == "__main__":
  main()
