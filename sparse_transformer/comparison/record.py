"""The record of a comparison: the source of its tables and figures.

docs/compare.md says what comparison.json has.
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
from sparse_transformer.comparison.plan import Trial
from sparse_transformer.training.stopwatch import TIMES

Record = dict[str, Any]
Run = dict[str, Any]

# The columns of a curve, and the fields of the lines of metrics.
COLUMNS = {"steps": "step"} | {x: x for x in (*TIMES, "bits_per_dim")}


def curve(lines: Iterable[Mapping]) -> Run:
  """The validations in the lines of a run's metrics: {column: values}."""
  lines = [line for line in lines if line["split"] == "validation"]
  return {x: [round(line[y], 5) for line in lines] for x, y in COLUMNS.items()}


def tuning(trials: Iterable[Trial], found: Iterable[dict | None]) -> dict:
  """The part of a record about a grid, from the scores of its runs."""
  scores: dict[str, dict[str, float | None]] = {}
  for trial, score in zip(trials, found, strict=True):
    bits = score["bits_per_dim"] if score else None
    scores.setdefault(trial.choice, {})[trial.candidate] = bits
  best = {}
  for choice, of_choice in scores.items():
    known = [(x, c) for c, x in of_choice.items() if x is not None]
    if not known:
      raise ValueError(
        f"--tune: with {choice}, training diverged with every value of --tune;"
        " give other values"
      )
    best[choice] = min(known)[1]
  return dict(scores=scores, best=best)


def make_record(
  about: Mapping[str, Any], runs: Sequence[Run], grid: dict | None = None
) -> Record:
  """The record of finished runs; `about`, `runs`, `tuning` as described."""
  rows = [_row(about, runs, choice) for choice in about["choices"]]
  rows.sort(key=lambda row: row["validation"]["mean"])
  return dict(about={**about}, tuning=grid, rows=rows, runs=[*runs])


def time_of(about: Mapping[str, Any]) -> str:
  """The time that matters to a comparison."""
  is_timed = about["budget"][0] == "seconds"
  return "seconds" if is_timed else "processor_seconds"


def of_choice(runs: Sequence[Run], choice: str) -> list[Run]:
  """The runs with a value of the field, by seed."""
  found = [run for run in runs if run["choice"] == choice]
  return sorted(found, key=lambda run: run["seed"])


def _row(about, runs, choice):
  first = about["choices"][0]
  runs, others = of_choice(runs, choice), of_choice(runs, first)
  bits, base = (
    [run["validation"]["bits_per_dim"] for run in x] for x in (runs, others)
  )
  right = [run["validation"].get("accuracy") for run in runs]
  tested = [run["test"]["bits_per_dim"] for run in runs if run["test"]]
  means = "keys", "steps", *TIMES
  return dict(
    choice=choice,
    seeds=len(runs),
    validation=mean(bits),
    values=bits,
    accuracy=mean(right) if None not in right else None,
    gap=mean(bits, base) if choice != first else None,
    test=mean(tested) if tested else None,
    **{x: statistics.fmean(run[x] for run in runs) for x in means},
    peak_bytes=max(run["peak_bytes"] for run in runs),
    parameters=max(run["parameters"] for run in runs),
  )


def mean(
  values: Sequence[float], minus: Sequence[float] = ()
) -> dict[str, Any]:
  """The mean of values minus the mean of others, and its error.

  The error is half of the 95 % confidence interval, from Student's t with the
  degrees of freedom of Welch; None if there is a single value.
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


def write_record(path: pathlib.Path, record: Record) -> None:
  """Writes a record, its lists of numbers on one line each."""
  text = json.dumps(record, indent=1)
  text = re.sub(r"\[\n[^\[\]{}]*\]", lambda x: " ".join(x[0].split()), text)
  atomic.write_text(path, text + "\n")


def over_seeds(runs: Sequence[Run], axis: str) -> tuple[np.ndarray, ...]:
  """(x, mean, lowest, highest) of the curves of several seeds.

  x are the points within all curves at which any seed was validated. Between
  its points, each with a larger x than the last, a curve is straight.
  """
  names = axis, "bits_per_dim"
  curves = [np.array([run["curve"][x] for x in names], float) for run in runs]
  first = max(x[0] for x, _ in curves)
  last = min(x[-1] for x, _ in curves)
  x = np.unique(np.concatenate([x for x, _ in curves]))
  x = x[(first <= x) & (x <= last)]
  if not len(x):  # single validations, at different times
    x = np.array([last])
  bits = np.stack([np.interp(x, *curve) for curve in curves])
  return x, bits.mean(0), bits.min(0), bits.max(0)
