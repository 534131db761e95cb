"""Compiles the training step of all presets for devices that are not here.

python benchmarks/compiled.py

Writes benchmarks/results/compiled.json, after each program, and prints a table.
What is there already is compiled again only with --again.
If a preset does not fit, the change that lets it fit is recorded, too. Nothing
is run: see docs/accelerators.md for what that means.
"""

import argparse
import importlib
import json
import pathlib
import sys

REPO = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

from sparse_transformer import atomic, tables  # noqa: E402
from sparse_transformer.targets import (  # noqa: E402
  advice,
  catalogue,
  compilers,
  rendering,
)
from sparse_transformer.training.experiment import check_batch  # noqa: E402

RESULTS = REPO / "benchmarks" / "results" / "compiled.json"
PRESETS = sorted(
  path.stem
  for path in (REPO / "configs").glob("*.py")
  if path.stem != "default"
)
TARGETS = "h100:1x1x1", "h100:1x1x8", "v5e:2x2"


def main() -> None:
  args = _parse()
  results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
  for target in args.targets:
    for preset in args.presets:
      known = [r for r in results if _key(r) == (preset, target)]
      if known and not args.again:
        continue
      report = compile_preset(preset, catalogue.parse(target))
      results = [r for r in results if r not in known] + [report]
      results.sort(key=_key)
      atomic.write_text(RESULTS, json.dumps(results, indent=1) + "\n")
  print(table(results))


def _parse():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--presets", nargs="+", default=PRESETS, choices=PRESETS)
  parser.add_argument("--targets", nargs="+", default=TARGETS)
  parser.add_argument("--again", action="store_true")
  return parser.parse_args()


def _key(report):
  return report["preset"], report["target"]


def compile_preset(preset, target):
  """The report on a preset, with advice if it does not fit.

  A batch that is too small for the devices is made as large as they are many.
  """
  config = importlib.import_module(f"configs.{preset}").get_config()
  train = config.train
  changes = {}
  if train.batch_size < target.num_devices:
    train.batch_size = changes["train.batch_size"] = target.num_devices
  check_batch(config, target.num_devices)
  report = compilers.compile_for(target, config) | dict(changes=changes)
  if any(map(rendering.needed_more, report["programs"])):
    report["advice"] = advice.advise(target, config, report)
  return dict(preset=preset, **report)


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
  tried = report.get("advice", dict(tried=[]))["tried"]
  final = next(filter(advice.fits, [report, *tried]), report)
  program = final["programs"][0]
  if not program["compiles"] or not program["fits"]:
    return program["executor"], "does not fit", *[""] * 4
  changes = [
    f"{k.partition('.')[2]}={v}" for k, v in final.get("changes", {}).items()
  ]
  if final["target"] != report["target"]:
    changes.append(final["target"])
  count, moved = (
    sum(kind[field] for kind in program["collectives"].values())
    for field in ("count", "bytes")
  )
  modelled = program["modelled"] or {}
  seconds = modelled.get("seconds")
  return (
    program["executor"],
    ", ".join(changes) or "-",
    rendering.size(program["memory"]["peak"]),
    f"{program['launches']:,}",
    f"{count:,} ({rendering.size(moved)})" if count else "-",
    f"{seconds * 1e3:,.4g} ms" if seconds else "-",
  )


if __name__ == "__main__":
  main()
