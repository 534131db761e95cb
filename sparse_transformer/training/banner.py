"""The lines that a run prints about itself at its start and its end."""

import itertools
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from sparse_transformer import data, model as model_lib, patterns, version
from sparse_transformer.attention import registry
from sparse_transformer.training import costs, metrics
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.stopwatch import Limit


def introduce(
  experiment: Experiment, workdir: object, limit: Limit | None
) -> None:
  """Prints a summary of a run before its training step is compiled.

  Args:
    experiment: the experiment of the run.
    workdir: the folder of the run.
    limit: the time limit of the run, or None.

  Raises Unsupported if no backend can run its attention on these devices.
  """
  config = experiment.config
  source = experiment.source
  layers = experiment.model.num_layers

  # In a stream, an example starts at each position, so examples overlap.
  # Therefore print its number of symbols instead.
  amount = f"{len(experiment.examples):,} examples"
  if isinstance(source, data.Stream):
    amount = f"{len(experiment.examples) + source.length - 1:,} symbols"
  print(
    f"{model_lib.count_parameters(experiment.model):,} parameters,"
    f" {layers} layer{'s' * (layers > 1)} of width {config.model.width},"
    f" {config.attention.pattern}; {config.data.name}: {amount},"
    f" {source.length:,} in a sequence, {source.unit}"
  )

  clock, last = limit or ("steps", config.train.steps)
  batch = config.train.batch_size
  devices = experiment.mesh.devices
  hardware = f"{devices.size} x {devices.flat[0].device_kind}"
  for axis, size in experiment.mesh.shape.items():
    if size > 1:
      hardware += f", {size} along {axis}"
  print(
    f"{last:,} {clock.replace('_', ' ')}, {batch} sequences or"
    f" {batch * source.length:,} tokens in a step; {hardware};"
    f" commit {version.commit() or 'unknown'}; {workdir}"
  )
  warn(experiment)
  requests = costs.attention_requests(config, experiment.model)
  chosen = registry.explain_choice(experiment.model.backend, *requests)
  print(f"attention by {chosen}", flush=True)


def warn(experiment: Experiment) -> None:
  """Prints a line on standard error for settings that may be a mistake."""
  doubts = _shared_summaries(experiment.config), _skipped_byte(experiment.model)
  for doubt in filter(None, doubts):
    print(f"warning: {doubt}", file=sys.stderr)


def _shared_summaries(config):
  """Returns a warning if all heads share the same summary columns, else "".

  Source: Child et al. 2019, section 4.3, where heads have distinct columns.
  """
  attention = config.attention
  heads = config.model.num_heads
  # In this mode, half of the heads attend within blocks, and the other half
  # attend to summary columns.
  if attention.pattern == "fixed" and attention.mode == "heads":
    heads //= 2
  distinct = min(heads, attention.stride // attention.width)
  is_fixed = attention.pattern.startswith("fixed")
  if is_fixed and attention.num_summaries == 1 and distinct > 1:
    return (
      f"with attention.num_summaries=1, {heads} heads of {attention.pattern}"
      " share the same summary columns; the paper's heads have distinct ones,"
      f" as with attention.num_summaries={distinct}"
    )

  return ""


def _skipped_byte(model):
  """Returns a warning if no head sees the byte above the target, else "".

  The warning applies only to images. If the stride is exactly one row, a
  strided head sees the byte before the one above, because inputs are shifted by
  one position.
  """
  if len(model.shape) != 3 or model.classifies:
    return ""

  # One query represents all: the last channel of a pixel in the middle, with a
  # row above it and pixels on both sides.
  rows, columns, channels = model.shape
  row = columns * channels
  query = rows // 2 * row + columns // 2 * channels + channels - 1
  drawn = set(itertools.chain.from_iterable(model.patterns))
  keys = lambda p: p.keys(query, model.length)

  # Inputs are shifted by one, so key k holds byte k - 1. The byte above the
  # query's target is therefore held by the key at query - row + 1. If a
  # content-based pattern may choose this key, there is no warning.
  may_hold = any(query - row + 1 in keys(p.support()) for p in drawn)
  if may_hold or not any(query - row in keys(p.static_part()) for p in drawn):
    return ""
  return (
    f"no layer's keys hold the byte above the target, t-{row}, because inputs"
    f" are shifted by one: the key {row} positions back holds t-{row + 1}; use"
    f" Strided({row}, offset=1), as in attention.pattern=strided_target"
  )


def origin(start: Mapping[str, Any]) -> str:
  """Returns a line about the weights from which a run starts.

  Args:
    start: the description of these weights, from `warm_start.first_state`.
  """
  line = f"starts from {start.get('file') or start['run']}"
  if "run_step" in start:
    line += f", step {start['run_step']:,}"
  for name in "random", "changed", "attention":
    if start[name]:
      line += f"; {name}: {', '.join(start[name])}"

  return line


def end(
  experiment: Experiment,
  workdir: str | os.PathLike,
  config_file: str | os.PathLike | None,
) -> str:
  """Returns the last line of a run: its best validation loss and a command.

  Args:
    experiment: the experiment of the run.
    workdir: the folder of the run.
    config_file: the file that defined the config, or None.
  """
  script = os.path.relpath(version.ROOT / "eval.py")
  words = ["python", script, f"--workdir={workdir}"]

  # If the config file registers patterns or data sources, each command that
  # uses them must name the file again.
  known = patterns.CATALOGUE | patterns.CONTENT | data.SOURCES
  ours = all(x.__module__.startswith("sparse_") for x in known.values())
  if config_file and not ours:
    words.append(f"--config={config_file}")
  command = shlex.join(words)

  lines = [x for x in metrics.read(workdir) if x["split"] == "validation"]
  if not lines:
    return f"to evaluate: {command}"

  best = min(lines, key=lambda x: x["bits_per_dim"])
  return (
    f"best validation {best['bits_per_dim']:.4f} {experiment.source.unit}, at"
    f" step {best['step']:,}; to evaluate the best saved: {command} --step=best"
  )
