"""Markov models of order k: counts of the training split, interpolated.

They predict each symbol of a split from the k before it:

  (n(context, symbol) + b p) / (n(context) + b),

where p is the prediction of order k - 1; below order 0 it is uniform. Every
order has its own b, a power of 2 that is chosen on the validation split, from
order 0 upwards. The first k symbols of a split have fewer before them: a lower
order predicts them. Errors are over blocks of 16,384 symbols.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.stats

ORDERS = range(7)
AMOUNTS = [2.0**i for i in range(-10, 15)]
SCORED = "validation", "test"
BLOCK = 16_384  # symbols; of the errors, as in eval.py
Splits = Mapping[str, np.ndarray]


def score(splits: Splits, size: int) -> list[dict[str, Any]]:
  """Bits per symbol of each order, if there are `size` different symbols."""
  scored, rows = {split: splits[split] for split in SCORED}, []
  lower = {split: np.full(len(x), 1 / size) for split, x in scored.items()}
  for order in ORDERS:
    found = count(splits["train"], scored, order, size)
    amount, lower = best(found, lower)
    bits = means({x: -np.log2(y) for x, y in lower.items()}, BLOCK)
    about = dict(model=f"order {order}", sees=f"{order}", amount=amount)
    rows.append(about | bits)
  return rows


def count(
  train: np.ndarray, scored: Splits, order: int, size: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """n(context, symbol) and n(context) of all but a split's first symbols."""

  def words(symbols):  # a number for each symbol and the `order` before it
    found = np.zeros(len(symbols) - order, np.int64)
    for i in range(order + 1):
      found = found * size + symbols[i : i + len(found)]
    return found

  known, counts = np.unique(words(train), return_counts=True)
  contexts, starts = np.unique(known // size, return_index=True)
  sums, found = np.add.reduceat(counts, starts), {}
  for split, symbols in scored.items():
    wanted = words(symbols)
    of_context = _look_up(contexts, sums, wanted // size)
    found[split] = _look_up(known, counts, wanted), of_context
  return found


def _look_up(keys, values, wanted):
  """The values at ascending keys; 0 for keys that are missing."""
  places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[places] == wanted, values[places], 0)


def best(
  found: Mapping[str, tuple[np.ndarray, np.ndarray]], lower: Splits
) -> tuple[float, dict[str, np.ndarray]]:
  """The best amount of smoothing on the validation split, and predictions.

  What `count` has found is smoothed towards `lower`.
  """

  def smooth(split, amount):
    of_symbol, of_context = found[split]
    p = lower[split].copy()
    rest = p[len(p) - len(of_symbol) :]
    rest[:] = (of_symbol + amount * rest) / (of_context + amount)
    return p

  amount = max(AMOUNTS, key=lambda x: np.log(smooth("validation", x)).sum())
  return amount, {split: smooth(split, amount) for split in lower}


def means(bits: Splits, size: int) -> dict[str, Any]:
  """Mean bits of each split, and the error of the test split's over blocks."""
  validation, test = (mean_and_error(bits[split], size) for split in SCORED)
  return dict(validation=validation[0], test=test[0], standard_error=test[1])


def mean_and_error(values: np.ndarray, size: int) -> tuple[float, float | None]:
  """The mean of a row of values, and its standard error over whole blocks."""
  blocks = values[: len(values) // size * size].reshape(-1, size)
  means = blocks.mean(1, np.float64)
  error = float(scipy.stats.sem(means)) if len(means) > 1 else None
  return float(values.mean(dtype=np.float64)), error
