"""Lines that a run prints: what begins, from what, and how it ended."""

import os
import shlex
from collections.abc import Mapping
from typing import Any

from sparse_transformer import data, model as model_lib
from sparse_transformer.training import metrics
from sparse_transformer.training.experiment import Experiment


def start(
  experiment: Experiment, workdir: object, limit: tuple[str, float] | None
) -> str:
  """A line about a run: network, data, devices, length and folder."""
  config, source = experiment.config, experiment.source
  number, unit = len(experiment.examples), "images"
  if isinstance(source, data.Sequences):
    unit = "examples"
    if source.classes:
      unit += f" of {len(source.classes)} classes"
  elif isinstance(source, data.Stream):
    number, unit = number + source.length - 1, "symbols"
  clock, last = limit or ("steps", config.train.steps)
  devices = experiment.mesh.devices
  return (
    f"{model_lib.count_parameters(experiment.model):,} parameters;"
    f" {config.data.name}: {number:,} {unit}, {source.length:,} in a sequence,"
    f" {source.unit}; {devices.size} x {devices.flat[0].device_kind};"
    f" {last:,} {clock.replace('_', ' ')}; {workdir}"
  )


def origin(start: Mapping[str, Any]) -> str:
  """A line about the weights that a run starts from."""
  line = f"starts from {start.get('file') or start['run']}"
  if "run_step" in start:
    line += f", step {start['run_step']:,}"
  for name in "random", "changed":
    if start[name]:
      line += f"; {name}: {', '.join(start[name])}"
  return line


def end(experiment: Experiment, workdir: str | os.PathLike) -> str:
  """A line about a complete run: its best validation, and what to do next."""
  lines = [x for x in metrics.read(workdir) if x["split"] == "validation"]
  command = shlex.join(["python", "eval.py", f"--workdir={workdir}"])
  if not lines:
    return f"to evaluate: {command}"
  best = min(lines, key=lambda x: x["bits_per_dim"])
  return (
    f"best validation {best['bits_per_dim']:.4f} {experiment.source.unit}, at"
    f" step {best['step']:,}; to evaluate the best saved: {command} --step=best"
  )
