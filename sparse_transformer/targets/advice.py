"""What to change if a program does not fit, checked by compiling it."""

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer.targets import catalogue
from sparse_transformer.targets.catalogue import Target
from sparse_transformer.targets.compilers import compile_for
from sparse_transformer.training import mesh

MARGIN = 0.95  # of the memory that an estimate may take

Report = dict[str, Any]


def fits(report: Report) -> bool:
  """Whether all programs of a report compile and fit."""
  return all(program["fits"] for program in report["programs"])


def advise(target: Target, config: ConfigDict, report: Report) -> Report:
  """Compiles with other settings, and on more devices, until it fits.

  Args:
    target: the devices on which it does not fit.
    config: the experiment's config.
    report: what `compile_for` said of them.

  Returns:
    `tried`, a report for each attempt, with its target and the fields that
    were changed; `found`, whether the last one fits.
  """
  tried: list[Report] = []
  for where, changes in _attempts(target, config, report, tried):
    changed = config.copy_and_resolve_references()
    for name, value in changes.items():
      group, _, field = name.partition(".")
      changed[group][field] = value
    result = compile_for(where, changed, report["part"])
    tried.append(result | dict(changes=changes))
    if fits(result):
      return dict(tried=tried, found=True)
  return dict(tried=tried, found=False)


def _attempts(
  target: Target, config: ConfigDict, report: Report, tried: list[Report]
) -> Iterator[tuple[Target, dict[str, Any]]]:
  """What to try next, given what was tried: memory for time, then devices."""
  changes: dict[str, Any] = {}
  if report["part"] == "step" and config.model.remat != "block":
    changes["model.remat"] = "block"
    yield target, dict(changes)
  for micro in _accumulations(target, config, tried[-1] if tried else report):
    yield target, changes | {"train.accumulation": micro}
  while larger := catalogue.larger(target):
    target = larger
    try:
      mesh.check_batch(config, mesh.sizes(config, target.num_devices))
    except ValueError:
      continue
    yield target, dict(changes)


def _accumulations(
  target: Target, config: ConfigDict, report: Report
) -> list[int]:
  """The numbers of micro-batches to try: the estimate, and the largest."""
  now = config.train.accumulation
  sizes = mesh.sizes(config, target.num_devices)
  most = config.train.batch_size // mesh.num_shards(sizes)
  possible = [micro for micro in range(now + 1, most + 1) if not most % micro]
  needed, fixed = _needed(report)
  enough = [
    micro
    for micro in possible
    if fixed + (needed - fixed) * now / micro <= MARGIN * target.memory
  ]
  return list(dict.fromkeys([*enough[:1], *possible[-1:]]))


def _needed(report: Report) -> tuple[int, int]:
  """Bytes of the largest program, and those that do not depend on the batch.

  The latter are a step's arguments, which are mostly its state.
  """

  def of(program):
    if "memory" not in program:
      return program.get("needed", 0), 0
    fixed = program["memory"]["arguments"] if report["part"] == "step" else 0
    return program["memory"]["peak"], fixed

  return max(map(of, report["programs"]))
