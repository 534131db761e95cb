"""The record of a comparison: the source of its tables and figures.

comparison.json has the fields below. A field that is unknown is null; a mean is
an object {"mean", "error"}, half of the 95 % confidence interval of the mean
over seeds; the error is null for a single seed.

about
  field, choices           what varies, its values as given
  seeds, first_seed        number of runs of each, the lowest seed
  budget                   [kind, amount] of each run
  tune                     [field, candidates] of what is tuned for each choice
  tune_budget              [kind, amount] of a run of tuning; null if `budget`
  target                   bits whose time is asked for
  unit                     unit of all bits: "bits/dim", "bits/byte", ...
  config                   config of the experiment
  machine, commit, versions, command
                           where, and with what, the results were written
equal                      {axis: x}, for the axes that the budget does not
                           limit: the largest x that all runs have reached;
                           without those where a run had no validation by then
tuning                     null, or the grid: one run of each choice with each
                           candidate, of the next seed, which is not compared
  scores                   {choice: {candidate: bits on the validation split}};
                           null if training diverged
  best                     {choice: the candidate with the fewest bits}
rows                       one for each choice, the best on validation first
  choice, seeds
  validation               mean bits, see the runs
  values                   bits of each seed
  accuracy                 mean accuracy on validation; null without labels
  time_to_target           processor seconds of each seed at its first
                           validation of at most `target` bits; null if never
  gap                      mean minus the mean of the first choice, with the
                           error of Welch's t; null for the first choice
  equal                    {axis: mean bits there, read off the curves}
  test                     mean bits of the first row; null in all others
  keys, steps, seconds, processor_seconds, tokens_per_processor_second, flops
                           means over the seeds
  peak_bytes, parameters   maxima over the seeds
runs                       one for each choice and seed
  choice, seed, unit
  steps, tokens_per_step, flops, parameters, peak_bytes
  keys                     per query, the mean over heads and layers
  seconds                  of training, without compilation, validation, saving
  processor_seconds        the same, of processor time
  best_step                of the kept checkpoints, the best on validation
  validation, test         its score on a whole split: {"bits_per_dim",
                           "standard_error", "tokens", ...}; test is null
                           except for the best choice
  curve                    of validations during training, of as many sequences
                           as eval.sequences says; lists of equal length:
                           {"steps", "seconds", "processor_seconds",
                           "bits_per_dim"}
  train                    the same of training batches, at most MAX_TRAIN

An axis is one of `LABELS`.
"""

import json
import math
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special

from sparse_transformer import atomic
from sparse_transformer.training import metrics

Record = dict[str, Any]
Run = dict[str, Any]

# The axes: what bits can be drawn against, and its name.
LABELS = {
  "processor_seconds": "processor seconds of training",
  "seconds": "seconds of training",
  "tokens": "tokens",
  "steps": "steps",
}
MAX_TRAIN = 200  # points of a curve of training
# Columns of a curve: the field of a line of metrics, and the digits kept.
COLUMNS = dict(
  steps=("step", 0),
  seconds=("seconds", 2),
  processor_seconds=("processor_seconds", 2),
  bits_per_dim=("bits_per_dim", 5),
)


def curve(lines: Sequence[Mapping], split: str, most: int | None = None) -> Run:
  """The curve of a run, from the lines of its metrics: {column: values}.

  Of more points than `most`, evenly spaced ones are kept, and the last.
  """
  lines = [line for line in lines if line["split"] == split]
  every = math.ceil(len(lines) / most) if most and lines else 1
  lines = lines[::-1][::every][::-1]
  return {
    column: [round(line[name], digits or None) for line in lines]
    for column, (name, digits) in COLUMNS.items()
  }


def tuning(scores: Mapping[str, Mapping[str, float | None]]) -> dict:
  """The part of a record about a grid."""
  best = {
    choice: min((x, c) for c, x in of.items() if x is not None)[1]
    for choice, of in scores.items()
  }
  return dict(scores=scores, best=best)


def at_edge(candidates: Sequence[str], best: str) -> bool:
  """Returns whether the best of a grid of numbers is the lowest or highest."""
  try:
    numbers = [*map(float, candidates)]
  except ValueError:
    return False
  return float(best) in (min(numbers), max(numbers))


def make(
  about: Mapping[str, Any], runs: Sequence[Run], grid: dict | None = None
) -> Record:
  """The record of finished runs; `about`, `runs`, `tuning` as described."""
  record: Record = dict(about=dict(about), equal={}, tuning=grid)
  record |= dict(rows=[], runs=list(runs))
  record["equal"] = {
    axis: x
    for axis in axes(record)
    if axis != about["budget"][0]
    and (x := largest_common(runs, axis)) is not None
  }
  rows = [_row(record, choice) for choice in about["choices"]]
  record["rows"] = sorted(rows, key=lambda row: row["validation"]["mean"])
  return record


def best_choice(runs: Sequence[Run]) -> str:
  """The choice with the lowest mean bits on the validation split."""
  choices = dict.fromkeys(run["choice"] for run in runs)
  return min(choices, key=lambda x: mean(_bits(of_choice(runs, x)))["mean"])


def of_choice(runs: Sequence[Run], choice: str) -> list[Run]:
  """The runs with a value of the field, by seed."""
  found = [run for run in runs if run["choice"] == choice]
  return sorted(found, key=lambda run: run["seed"])


def _row(record, choice):
  """The row of a choice."""
  first = record["about"]["choices"][0]
  runs, others = (of_choice(record["runs"], x) for x in (choice, first))
  tested = [run["test"]["bits_per_dim"] for run in runs if run["test"]]
  right = [run["validation"].get("accuracy") for run in runs]
  rates = [
    run["steps"] * run["tokens_per_step"] / run["processor_seconds"]
    for run in runs
    if run["processor_seconds"]
  ]
  names = "keys", "steps", *metrics.TIMES, "flops"
  return dict(
    choice=choice,
    seeds=len(runs),
    validation=mean(_bits(runs)),
    values=_bits(runs),
    accuracy=mean(right) if None not in right else None,
    time_to_target=[time_to(run, record["about"]["target"]) for run in runs],
    gap=mean(_bits(runs), _bits(others)) if choice != first else None,
    equal={
      axis: mean([float(np.interp(x, *points(run, axis))) for run in runs])
      for axis, x in record["equal"].items()
    },
    test=mean(tested) if tested else None,
    **{name: _mean_of_known(run.get(name) for run in runs) for name in names},
    tokens_per_processor_second=statistics.fmean(rates) if rates else None,
    peak_bytes=max(run["peak_bytes"] for run in runs),
    parameters=max(run["parameters"] for run in runs),
  )


def _bits(runs):
  return [run["validation"]["bits_per_dim"] for run in runs]


def mean(
  values: Sequence[float], minus: Sequence[float] = ()
) -> dict[str, Any]:
  """The mean of values, minus that of others, and its error.

  The error is half of the 95 % confidence interval, from Student's t with the
  degrees of freedom of Welch; None if there is a single value.

  >>> mean([1.0, 2.0, 3.0])["error"]  # 4.303 standard errors
  2.484...
  """
  groups = [x for x in (values, minus) if x]
  center = statistics.fmean(values) - (statistics.fmean(minus) if minus else 0)
  if min(map(len, groups)) < 2:
    return dict(mean=center, error=None)
  squares = [statistics.variance(x) / len(x) for x in groups]
  total = sum(squares)
  parts = [x**2 / (len(y) - 1) for x, y in zip(squares, groups, strict=True)]
  freedom = total**2 / sum(parts) if total else 1
  error = math.sqrt(total) * float(special.stdtrit(freedom, 0.975))
  return dict(mean=center, error=error)


def _mean_of_known(values):
  known = [value for value in values if value is not None]
  return statistics.fmean(known) if known else None


def read(path: pathlib.Path) -> Record:
  """Reads a record, also of an older version; raises as `read_json` does."""
  found = read_json(path, "about", "runs")
  about = dict(target=None, first_seed=0, tune_budget=None) | found["about"]
  return make(about, found["runs"], found.get("tuning"))


def read_json(path: pathlib.Path, *fields: str) -> dict[str, Any]:
  """Reads an object that has certain fields from a file of a comparison.

  Raises:
    ValueError: the file has no object with these fields.
    OSError: the file cannot be read.
  """
  try:
    content = atomic.read_json(path)
    if not (isinstance(content, dict) and {*fields} <= {*content}):
      raise ValueError(
        f"{path} cannot be read: expected an object with {', '.join(fields)}"
      )
  except ValueError as error:
    raise ValueError(f"{error}; delete it: compare writes it again") from None
  return content


def write(path: pathlib.Path, record: Record) -> None:
  """Writes a record, its lists of numbers on one line each."""
  text = json.dumps(record, indent=1)
  text = re.sub(r"\[\n[^\[\]{}]*\]", lambda x: " ".join(x[0].split()), text)
  atomic.write_text(path, text + "\n")


# The curves of the runs: read off, and averaged over seeds. Seeds may be
# validated at different times; between two validations a curve is a straight
# line.


def time_of(record: Mapping[str, Any]) -> str:
  """The time that matters: processor time, unless the budget is in seconds."""
  kind = record["about"]["budget"][0]
  return kind if kind == "seconds" else "processor_seconds"


def axes(record: Mapping[str, Any]) -> list[str]:
  """The axes along which the curves of a record differ.

  Time; tokens, unless all steps have the same number; steps.
  """
  sized = len({run["tokens_per_step"] for run in record["runs"]}) > 1
  return [time_of(record), *["tokens"] * sized, "steps"]


def points(run: Run, axis: str) -> tuple[np.ndarray, np.ndarray]:
  """The curve of a run as (x, bits), x ascending."""
  curve = run["curve"]
  if axis == "tokens":
    x = np.array(curve["steps"], float) * run["tokens_per_step"]
  else:
    x = np.array(curve[axis], float)
  return x, np.array(curve["bits_per_dim"], float)


def time_to(run: Run, target: float | None) -> float | None:
  """Processor seconds at the first validation of at most `target` bits."""
  if target is None:
    return None
  curve = zip(*points(run, "processor_seconds"), strict=True)
  return next((float(x) for x, y in curve if y <= target), None)


def largest_common(runs: Iterable[Run], axis: str) -> float | None:
  """The largest x that all runs have reached.

  None if one of them had no validation until then: its bits are unknown.
  """
  xs = [points(run, axis)[0] for run in runs]
  last = min(max(x, default=0) for x in xs)
  return last if all(len(x) and x[0] <= last for x in xs) else None


def over_seeds(
  runs: Sequence[Run], axis: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """(x, mean, lowest, highest) of the curves of several seeds.

  At all x, within the curves of all seeds, at which one of them was validated.
  """
  curves = [points(run, axis) for run in runs]
  first = max(x[0] for x, _ in curves)
  last = min(x[-1] for x, _ in curves)
  x = np.unique(np.concatenate([x for x, _ in curves]))
  x = x[(first <= x) & (x <= last)]
  if not len(x):  # single validations, at different times
    x = np.array([last])
  bits = np.stack([np.interp(x, *curve) for curve in curves])
  return x, bits.mean(0), bits.min(0), bits.max(0)
