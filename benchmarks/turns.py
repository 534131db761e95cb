"""Programs that take turns, so that noise of the machine meets all of them."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Case = tuple[str, Callable, tuple]  # name, compiled function, arguments


def measure(cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
  """Processor times of programs, and ratios to the first one; prints them.

  Args:
    cases: the programs.
    rounds: how often each runs, after it was compiled.

  Returns:
    For each case its name, the median time in milliseconds, and the median of
    the first case's time divided by its own, of the same round.
  """
  times: dict[str, list[float]] = {name: [] for name, *_ in cases}
  for i in range(-1, rounds):
    for name, function, arguments in cases:
      start = time.process_time()
      jax.block_until_ready(function(*arguments))
      if i >= 0:
        times[name].append(1e3 * (time.process_time() - start))
  of_first = times[cases[0][0]]
  rows = []
  for name, found in times.items():
    ratios = [y / x for x, y in zip(found, of_first, strict=True)]
    row = dict(
      case=name,
      milliseconds=round(statistics.median(found), 1),
      speed_up=round(statistics.median(ratios), 2),
    )
    print("{case}: {milliseconds:.0f} ms, {speed_up:.2f}".format(**row))
    rows.append(row)
  return rows
