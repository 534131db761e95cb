"""Means over a stream, with errors that hold although neighbours correlate."""

import math

import numpy as np


def mean_and_error(values: np.ndarray, size: int) -> tuple[float, float | None]:
  """The mean of a row of values, and its standard error over blocks.

  The last block of `size` values may be shorter, and weighs less. The error is
  None if there are fewer than two blocks.
  """
  starts = np.arange(0, len(values), size)
  sums = np.add.reduceat(values.astype(np.float64), starts)
  counts = np.diff([*starts, len(values)])
  mean, n = sums.sum() / len(values), len(starts)
  if n < 2:
    return float(mean), None
  spread = np.sum((sums - mean * counts) ** 2) * n / (n - 1)
  return float(mean), math.sqrt(spread) / len(values)
