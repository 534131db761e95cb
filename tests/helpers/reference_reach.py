"""What positions see through all layers, as products of matrices."""

import numpy as np


def reach(layers, n):
  """Returns the inputs that each position sees through all layers.

  This includes the residual stream: every position keeps what it has.

  Args:
    layers: the patterns of each layer's heads.
    n: positions.

  Returns:
    Booleans [n, n], one row for each position.
  """
  seen = np.eye(n, dtype=bool)
  for heads in layers:
    before = seen
    for pattern in heads:
      seen = seen | (pattern.matrix(n) @ before)
  return seen
