"""Batches as a pure function of (seed, step)."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def batches(examples: Any, batch_size: int, seed: int) -> Sequence[np.ndarray]:
  """Returns an endless sequence of shuffled batches.

  A batch depends only on (seed, step), so a run can stop at any step and
  resume with the next batch. Each epoch has its own order. A batch may extend
  into the next epoch: no example is dropped.

  Args:
    examples: arrays of one shape and dtype: any object with `len` and `[]`.
    batch_size: examples per batch, at least 1.
    seed: seed of the order.

  Returns:
    `batches[step]`, for any step, of shape [batch_size, ...].
  """
  import grain

  shuffled = grain.MapDataset.source(examples).seed(seed).shuffle()
  return shuffled.repeat().batch(batch_size)
