"""Times of functions that take turns, so that noise meets all of them."""

import statistics
import time
from collections.abc import Callable

import jax

ROUNDS = 7
MIN_SECONDS = 0.05  # of a measurement: shorter functions are repeated
SLOW_SECONDS = 2.0  # a function that takes longer is run once


def warm_up(function: Callable) -> float:
  """Seconds of a call, after one that compiles."""
  jax.block_until_ready(function())
  return _mean(function, 1)


def _mean(function, repeats):
  """Seconds of a call: the mean of several that are dispatched at once."""
  start = time.perf_counter()
  for _ in range(repeats):
    outputs = function()
  jax.block_until_ready(outputs)
  return (time.perf_counter() - start) / repeats


def interleave(functions: dict, warm: dict, least=MIN_SECONDS) -> dict:
  """{key: median, min, max, rounds} of functions, one run of each per round.

  `functions` do not wait for their outputs; `warm` has their seconds from
  `warm_up`. A measurement takes `least` seconds at least.
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
