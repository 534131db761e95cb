"""The curves of the runs in a record: read off, and averaged over seeds.

Seeds may be validated at different times. Between two validations a curve is a
straight line, so that it can be read off anywhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# The axes: what bits can be drawn against, and its name.
LABELS = {
  "processor_seconds": "processor seconds of training",
  "seconds": "seconds of training",
  "tokens": "tokens",
  "steps": "steps",
}
Run = Mapping[str, Any]


def time_of(record: Mapping[str, Any]) -> str:
  """The time that matters: processor time if the budget is in it."""
  kind = record["about"]["budget"][0]
  return kind if kind == "processor_seconds" else "seconds"


def axes(record: Mapping[str, Any]) -> list[str]:
  """The axes along which the curves of a record differ.

  Time, if all runs know it; tokens, unless all steps have equally many; steps.
  """
  runs, time = record["runs"], time_of(record)
  timed = all(time in run["curve"] for run in runs)
  sized = len({run["tokens_per_step"] for run in runs}) > 1
  return [time] * timed + ["tokens"] * sized + ["steps"]


def points(run: Run, axis: str) -> tuple[np.ndarray, np.ndarray]:
  """The curve of a run as (x, bits), x ascending."""
  curve = run["curve"]
  if axis == "tokens":
    x = np.array(curve["steps"], float) * run["tokens_per_step"]
  else:
    x = np.array(curve[axis], float)
  return x, np.array(curve["bits_per_dim"], float)


def at(run: Run, axis: str, x: float) -> float:
  """The bits of a run at x, between the first and the last validation."""
  return float(np.interp(x, *points(run, axis)))


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
  """Mean and range of the curves of several seeds.

  At all x at which one of the seeds was validated, and which lie within the
  curves of all.

  Returns:
    (x, mean, lowest, highest).
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
