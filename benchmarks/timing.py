"""Times functions alternately, so that noise affects all of them equally."""

import statistics
import time
from collections.abc import Callable

import jax

ROUNDS = 7
MIN_SECONDS = 0.05  # minimum of a measurement; shorter functions are repeated
SLOW_SECONDS = 2.0  # a function that takes longer is not run again


def warm_up(function: Callable) -> float:
  """Returns the seconds of a call, after a first call that compiles."""
  jax.block_until_ready(function())
  return _mean(function, 1)


def _mean(function, repeats):
  """Returns the mean seconds of calls that are dispatched without waiting."""
  start = time.perf_counter()
  for _ in range(repeats):
    outputs = function()
  jax.block_until_ready(outputs)
  return (time.perf_counter() - start) / repeats


def interleave(functions: dict, warm: dict, least=MIN_SECONDS) -> dict:
  """Returns {key: median, min, max, rounds} of the times of functions.

  Each function is measured once per round.

  Args:
    functions: {key: function}. Functions need not wait for their outputs.
    warm: {key: seconds from `warm_up`}.
    least: the minimum number of seconds of a measurement.
  """
  times = {x: [warm[x]] if warm[x] > SLOW_SECONDS else [] for x in functions}
  for _ in range(ROUNDS):
    for key, function in functions.items():
      if warm[key] <= SLOW_SECONDS:
        repeats = max(1, min(500, round(least / warm[key])))
        times[key].append(_mean(function, repeats))
  return {key: spread(found) for key, found in times.items()}


def spread(times: list[float]) -> dict:
  median, rounds = statistics.median(times), len(times)
  return dict(median=median, min=min(times), max=max(times), rounds=rounds)
