"""Counts of the bytes that follow a context: the simplest model of text.

The distribution of a byte after a context of n bytes is interpolated with that
after the last n - 1 of them, and so on (Witten and Bell 1991, method C):

  p_n = (count of the byte + kinds * p_(n-1)) / (count of all bytes + kinds)

Both counts are of bytes after the context in the training split, and `kinds` is
the number of different bytes among them. This has no parameter to choose. A
context that does not occur in the training split changes nothing.

Axes: B windows, L bytes in each, C contexts, J pairs of a context and a byte.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# The longest contexts. With the byte after it, such a context fills 64 bits.
MOST = 7


class Order(NamedTuple):
  """Counts of the bytes after contexts of one length.

  Contexts, and contexts followed by a byte, are integers. Both are sorted.
  """

  context_C: np.ndarray
  total_C: np.ndarray  # how many bytes follow
  kinds_C: np.ndarray  # how many different bytes follow
  pair_J: np.ndarray
  count_J: np.ndarray


def count(windows: Sequence[np.ndarray], most: int = MOST) -> list[Order]:
  """Counts the bytes after contexts of 0 to `most` bytes.

  Args:
    windows: arrays uint8 [B, L]. Contexts do not reach beyond a window; zeros
      are assumed before it.
    most: length of the longest contexts, at most 7.

  Returns:
    The counts for each length of a context, the shortest first.
  """
  orders = []
  for length in range(most + 1):
    pairs = [_pairs(contexts(x, length), x).ravel() for x in windows]
    pair_J, count_J = np.unique(np.concatenate(pairs), return_counts=True)
    context_C, first_C, kinds_C = np.unique(
      pair_J >> 8, return_index=True, return_counts=True
    )
    total_C = np.add.reduceat(count_J, first_C)
    orders.append(Order(context_C, total_C, kinds_C, pair_J, count_J))
  return orders


def probability(
  orders: Sequence[Order], window_BL: np.ndarray, next_BL: np.ndarray
) -> np.ndarray:
  """Returns the probability of a byte at each position of windows.

  Args:
    orders: the result of `count`.
    window_BL: the windows, uint8 [B, L].
    next_BL: a byte for each position, given those before it in the window.

  Returns:
    Probabilities in float64 [B, L].
  """
  p_BL = np.full(window_BL.shape, 1 / 256)
  for length, order in enumerate(orders):
    context_BL = contexts(window_BL, length)
    pair_BL = _pairs(context_BL, next_BL)
    count_BL = _look_up(order.pair_J, order.count_J, pair_BL)
    total_BL = _look_up(order.context_C, order.total_C, context_BL)
    kinds_BL = _look_up(order.context_C, order.kinds_C, context_BL)

    mixed_BL = count_BL + kinds_BL * p_BL
    weight_BL = np.maximum(total_BL + kinds_BL, 1)
    p_BL = np.where(total_BL > 0, mixed_BL / weight_BL, p_BL)
  return p_BL


def bits(orders: Sequence[Order], windows: Sequence[np.ndarray]) -> float:
  """Returns the mean bits of the bytes of windows, arrays uint8 [B, L]."""
  found = [-np.log2(probability(orders, x, x)).ravel() for x in windows]
  return float(np.concatenate(found).mean())


def windows_of(symbols: np.ndarray, length: int) -> list[np.ndarray]:
  """Returns all whole windows of a split, and what remains as a shorter one.

  Args:
    symbols: the bytes of a split, uint8 [n].
    length: the number of bytes of a window.
  """
  end = len(symbols) // length * length
  parts = symbols[:end].reshape(-1, length), symbols[None, end:]
  return [part for part in parts if part.size]


def contexts(window_BL: np.ndarray, length: int) -> np.ndarray:
  """Returns the last `length` bytes before each byte as integers, uint64."""
  padded_BL = np.pad(window_BL.astype(np.uint64), [(0, 0), (length, 0)])
  context_BL = np.zeros(window_BL.shape, np.uint64)
  for i in range(length):
    context_BL = (context_BL << 8) + padded_BL[:, i : i + window_BL.shape[1]]
  return context_BL


def _pairs(context_BL, next_BL):
  return (context_BL << 8) + next_BL.astype(np.uint64)


def _look_up(keys, values, wanted):
  """Returns the values of the wanted keys, and 0 for those that are absent."""
  index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[index] == wanted, values[index], 0)
