"""The lines that a run prints about itself: at its start, and at its end."""

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
  """Prints what is worth knowing about a run, before it is compiled.

  Args:
    experiment: the run's.
    workdir: its folder.
    limit: the limit of its time, if that ends it.

  Raises Unsupported if its attention cannot run here.
  """
  config = experiment.config
  source = experiment.source
  layers = experiment.model.num_layers

  # A stream has an example at each position, so that they overlap: its symbols
  # are counted.
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
  """A warning if all heads share a summary, else "".

  Source: section 4.3 of Child et al. 2019, where heads have distinct ones.
  """
  attention = config.attention
  heads = config.model.num_heads
  # In this mode, half of the heads have the blocks, and half the summaries.
  if attention.pattern == "fixed" and attention.mode == "heads":
    heads //= 2
  distinct = min(heads, attention.stride // attention.width)
  is_fixed = attention.pattern.startswith("fixed")
  if is_fixed and attention.num_summaries == 1 and distinct > 1:
    return (
      f"with attention.num_summaries=1, {heads} heads of {attention.pattern}"
      " share the same summary columns; the paper's have distinct ones, as with"
      f" attention.num_summaries={distinct}"
    )

  return ""


def _skipped_byte(model):
  """A warning if no head sees the byte above the target of an image, else "".

  A stride of exactly one row has this effect, because inputs are shifted.
  """
  if len(model.shape) != 3 or model.classifies:
    return ""

  # One query stands for all: the last channel of a pixel in the middle, which
  # has a row above and pixels on both sides.
  rows, columns, channels = model.shape
  row = columns * channels
  query = rows // 2 * row + columns // 2 * channels + channels - 1
  drawn = set(itertools.chain.from_iterable(model.patterns))
  keys = lambda p: p.keys(query, model.length)

  # Inputs are shifted by one: key k holds byte k - 1. The byte above the target
  # of the query is therefore at the key after that one row back. A head that
  # may choose it is no mistake.
  may_hold = any(query - row + 1 in keys(p.support()) for p in drawn)
  if may_hold or not any(query - row in keys(p.static_part()) for p in drawn):
    return ""
  return (
    f"no layer's keys hold the byte above the target, t-{row}: inputs are"
    f" shifted by one, so that the key {row} back holds t-{row + 1};"
    f" Strided({row}, offset=1) has it, as in attention.pattern=strided_target"
  )


def origin(start: Mapping[str, Any]) -> str:
  """A line about the weights that a run starts from.

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
  """A line about a complete run: its best validation, and what to do next.

  Args:
    experiment: the run's.
    workdir: its folder.
    config_file: the file of its config, if it was read from one.
  """
  script = os.path.relpath(version.ROOT / "eval.py")
  words = ["python", script, f"--workdir={workdir}"]

  # A config file that registers patterns or data sources of its own must be
  # named again wherever they are used.
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
