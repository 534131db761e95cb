"""Compiles the training step of all presets for devices that are not here.

  python -m benchmarks.compiled

Writes benchmarks/results/compiled.json, after each program, and prints a table.
What is there already is compiled again only with --again.
If a preset does not fit, the change that lets it fit is recorded, too. Nothing
is run: see docs/accelerators.md for what that means.
"""

import argparse
import importlib
import itertools

from benchmarks import record
from sparse_transformer import tables
from sparse_transformer.comparison import choices
from sparse_transformer.targets import advice, catalogue, compilers, rendering
from sparse_transformer.training import mesh

RESULTS = record.FOLDER / "compiled.json"
PRESETS = sorted(
  path.stem
  for path in (record.REPO / "configs").glob("*.py")
  if path.stem != "default"
)
TARGETS = "h100:1x1x1", "h100:1x1x8", "v5e:2x2"
H100, EIGHT_H100, V5E = TARGETS
SIXTEEN_V5E = "v5e:4x4"
# Presets with changes, and what they are compiled for.
VARIANTS = (
  ("enwik8 model.remat=none", H100),
  ("enwik8 attention.backend=batched", H100),
  ("text_small attention.pattern=AdaptiveSpan(224)", H100),
  ("text_small attention.pattern=AdaptiveSpan(224)", V5E),
  ("cifar10 mesh.fsdp=8", EIGHT_H100),
  ("cifar10 mesh.fsdp=2 mesh.sequence=4", EIGHT_H100),
  ("enwik8 mesh.fsdp=8", EIGHT_H100),
  ("enwik8 mesh.sequence=8", EIGHT_H100),
  ("music_3m mesh.fsdp=8", EIGHT_H100),
  ("music_3m mesh.sequence=8", EIGHT_H100),
  ("cifar10 mesh.fsdp=4 mesh.sequence=4", SIXTEEN_V5E),
  ("enwik8 mesh.fsdp=4 mesh.sequence=4", SIXTEEN_V5E),
  ("music_3m mesh.sequence=16", SIXTEEN_V5E),
)


def main() -> None:
  args = _parse()
  everything = [(p, t) for t, p in itertools.product(TARGETS, PRESETS)]
  keys = [
    (preset, target)
    for preset, target in (*everything, *VARIANTS)
    if preset.split()[0] in args.presets and target in args.targets
  ]
  results = record.measure_missing(
    RESULTS, ("preset", "target"), keys, compile_preset, args.again
  )
  print(table(results))


def _parse():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--presets", nargs="+", default=PRESETS, choices=PRESETS)
  parser.add_argument("--targets", nargs="+", default=[*TARGETS, SIXTEEN_V5E])
  parser.add_argument("--again", action="store_true")
  return parser.parse_args()


def compile_preset(preset: str, name: str) -> dict:
  """The report on a preset, with advice if it does not fit.

  A batch that is too small for the mesh gets one sequence for each part.

  Args:
    preset: name of a config, and fields to change: "enwik8 model.remat=none".
    name: what to compile for, as in --target.
  """
  target = catalogue.parse(name)
  file, *fields = preset.split()
  preset_config = importlib.import_module(f"configs.{file}").get_config()
  values = dict(field.split("=") for field in fields)
  config = choices.with_values(preset_config, **values)
  sizes, changes = mesh.sizes(config, target.num_devices), {}
  if config.train.batch_size < (fewest := mesh.num_shards(sizes)):
    config.train.batch_size = changes["train.batch_size"] = fewest
  mesh.check_batch(config, sizes)
  report = compilers.compile_for(target, config) | dict(changes=changes)
  if any(map(rendering.needed_more, report["programs"])):
    report["advice"] = advice.advise(target, config, report)
  return report


def table(results):
  """What fits, with which settings, as a Markdown table."""
  rows = [
    (
      "preset",
      "target",
      "attention",
      "changed to fit",
      "peak memory",
      "launches",
      "collectives",
      "modelled",
    )
  ]
  for report in results:
    rows.append(
      (f"`{report['preset']}`", f"`{report['target']}`", *_row(report))
    )
  return tables.markdown(rows)


def _row(report):
  final, changes = _with_what_fits(report)
  program = final["programs"][0]
  if not program["compiles"] or not program["fits"]:
    return program["executor"], "does not fit", *[""] * 4
  count, moved = (
    sum(kind[field] for kind in program["collectives"].values())
    for field in ("count", "bytes")
  )
  modelled = program["modelled"]
  return (
    program["executor"],
    changes,
    rendering.size(program["memory"]["peak"]),
    f"{program['launches']:,}",
    f"{count:,} ({rendering.size(moved)})" if count else "-",
    rendering.modelled_time(modelled) if modelled else "-",
  )


def _with_what_fits(report):
  """The report on what fits, if anything does, and how that differs."""
  tried = report.get("advice", dict(tried=[]))["tried"]
  final = next(filter(advice.fits, [report, *tried]), report)
  changes = [
    f"{k.partition('.')[2]}={v}" for k, v in final.get("changes", {}).items()
  ]
  if final["target"] != report["target"]:
    changes.append(final["target"])
  return final, ", ".join(changes) or "-"


def is_on_mesh(report: dict) -> bool:
  """Whether a report is on a mesh other than that of the preset."""
  return " mesh." in report["preset"]


def meshes(results):
  """Memory and collectives of one device, as a Markdown table."""
  rows = [
    (
      "preset",
      "mesh",
      "target",
      "changed to fit",
      "peak memory",
      "arguments",
      "collectives of a step",
    )
  ]
  for report in filter(is_on_mesh, results):
    final, changes = _with_what_fits(report)
    program = final["programs"][0]
    preset, *fields = report["preset"].split()
    axes = ", ".join(field.removeprefix("mesh.") for field in fields)
    cells = ["does not fit", "", "", ""]
    if program["fits"]:
      memory, moved = program["memory"], program["collectives"]
      cells = [
        changes,
        *(rendering.size(memory[part]) for part in ("peak", "arguments")),
        "; ".join(
          f"{found['count']:,} {kind}, {rendering.size(found['bytes'])}"
          for kind, found in moved.items()
        ),
      ]
    rows.append((f"`{preset}`", axes, f"`{report['target']}`", *cells))
  return tables.markdown(rows)


if __name__ == "__main__":
  main()
