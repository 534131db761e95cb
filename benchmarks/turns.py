"""Programs that take turns, so that noise of the machine meets all of them."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from benchmarks import record

Case = tuple[str, Callable, tuple]  # name, compiled function, arguments


def seconds(
  calls: Mapping[Any, Callable],
  rounds: int,
  clock=time.perf_counter,
  between: Callable = lambda: None,
) -> dict[Any, list[float]]:
  """Seconds of functions that wait for their results, after a first call.

  `between` is called after each, and not timed.
  """
  times: dict[Any, list[float]] = {name: [] for name in calls}
  for _ in range(1 + rounds):
    for name, call in calls.items():
      start = clock()
      call()
      times[name].append(clock() - start)
      between()
  return {name: found[1:] for name, found in times.items()}


def main(
  name: str,
  description: str,
  cases: Callable[..., Iterable[Case]],
  table: Callable[[dict[str, Any]], str],
  **size: int,
) -> None:
  """`record.main` for processor times, and ratios to the first case.

  `cases` takes the size, whose flag and default are in `size`. --only=TEXT
  leaves out other cases.
  """

  def measure(rounds, only, **size):
    first, *others = cases(**size)
    chosen = [first, *(case for case in others if only in case[0])]
    return size | {"rows": _rows(chosen, rounds)}

  record.main(name, description, measure, table, rounds=7, only="", **size)


def _rows(cases, rounds):
  """Median milliseconds of each case, and the median ratio within a round."""
  calls = {
    name: lambda run=run, args=args: jax.block_until_ready(run(*args))
    for name, run, args in cases
  }
  times = seconds(calls, rounds, time.process_time)
  of_first, rows = times[cases[0][0]], []
  for name, found in times.items():
    ratios = [y / x for x, y in zip(found, of_first, strict=True)]
    milliseconds = round(1e3 * statistics.median(found), 1)
    speed_up = round(statistics.median(ratios), 2)
    rows.append(dict(case=name, milliseconds=milliseconds, speed_up=speed_up))
  return rows
