"""Scores Markov models of order k on the splits of a config's data.

python -m benchmarks.markov --config=configs/genome.py --config.data.path=FILE

A baseline for models of DNA: counts of the training split predict each base
from the k before it. Two ways to smooth counts n(context, base):

  add: (n(context, base) + a) / (n(context) + 4 a).
  interpolated: (n(context, base) + b p) / (n(context) + b), where p is the
    prediction of the next lower order; order 0 has p = 1/4. Every order has its
    own b.

4 a and b are powers of 2, chosen on the validation split; b from order 0
upwards. Each is also done with counts of both strands: of the training split
and of its reverse complement. The first k bases of a split have fewer bases
before them: "add" predicts them uniformly, "interpolated" by a lower order.
Errors are over blocks of 16,384 bases. Writes benchmarks/results/markov.json.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import blocks, record
from sparse_transformer import data

ORDERS = 2, 4, 8, 12
AMOUNTS = [2.0**i for i in range(-10, 15)]
SCORED = "validation", "test"
BLOCK = 16_384  # bases; of the errors, as in eval.py
Splits = dict[str, np.ndarray]


def score(source: data.Source) -> dict[str, Any]:
  """Bits per base of each order and smoothing, with one strand and both."""
  if source.unit != "bits/base":
    raise ValueError(
      f"data of {source.unit} are not DNA; use a config of fasta"
    )
  splits = source.load()
  forward = splits["train"]
  strands = [forward, 3 - forward[::-1]]  # A, C, G, T are 0, 1, 2, 3
  rows = [
    dict(strands=number, **row)
    for number in (1, 2)
    for row in _rows(strands[:number], splits, source.vocab_size)
  ]
  symbols = {split: len(splits[split]) for split in data.SPLITS}
  return dict(rows=rows, symbols=symbols)


def _rows(strands, splits, size):
  """The scores of models that count `size` different symbols in strands."""
  lower = {split: np.full(len(splits[split]), 1 / size) for split in SCORED}
  for order in range(max(ORDERS) + 1):
    counts = Counts(strands, order, size)
    found = {split: counts(splits[split]) for split in SCORED}
    amount, lower = best(found, lower)
    if order in ORDERS:
      uniform = {split: np.full_like(p, 1 / size) for split, p in lower.items()}
      about = dict(order=order, contexts=len(counts.contexts))
      yield about | dict(smoothing="interpolated", amount=amount) | bits(lower)
      amount, added = best(found, uniform)
      about |= dict(smoothing="add", amount=amount / size)
      yield about | bits(added)


class Counts:
  """Counts of each of `size` symbols in strands, after `order` others."""

  def __init__(self, strands: Sequence[np.ndarray], order: int, size: int):
    self._order, self._size = order, size
    words = np.concatenate([self._words(strand) for strand in strands])
    self._known, self._counts = np.unique(words, return_counts=True)
    # Those that occur, as numbers in ascending order.
    self.contexts, starts = np.unique(self._known // size, return_index=True)
    self._sums = np.add.reduceat(self._counts, starts)

  def __call__(self, symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """n(context, symbol) and n(context) of all symbols but the first k."""
    words = self._words(symbols)
    return (
      _look_up(self._known, self._counts, words),
      _look_up(self.contexts, self._sums, words // self._size),
    )

  def _words(self, symbols):
    """A number for each symbol and the `order` before it."""
    size = len(symbols) - self._order
    words = np.zeros(size, np.int64)
    for i in range(self._order + 1):
      words = words * self._size + symbols[i : i + size]
    return words


def _look_up(keys, values, wanted):
  """The values at ascending keys; 0 for keys that are missing."""
  places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[places] == wanted, values[places], 0)


def best(
  found: dict[str, tuple[np.ndarray, np.ndarray]], lower: Splits
) -> tuple[float, Splits]:
  """The best amount of smoothing on the validation split, and predictions.

  `found` are n(context, symbol) and n(context) by split, as `Counts` returns;
  they are smoothed towards `lower`.
  """

  def smooth(split, amount):
    of_symbol, of_context = found[split]
    p = lower[split].copy()
    rest = p[len(p) - len(of_symbol) :]
    rest[:] = (of_symbol + amount * rest) / (of_context + amount)
    return p

  loss = lambda amount: -np.log(smooth("validation", amount)).sum()
  amount = min(AMOUNTS, key=loss)
  return amount, {split: smooth(split, amount) for split in lower}


def bits(predictions: Splits) -> dict[str, Any]:
  """Bits per symbol of each split, and the error of the test split's."""
  validation, test = (
    blocks.mean_and_error(-np.log2(predictions[split]), BLOCK)
    for split in SCORED
  )
  return dict(validation=validation[0], test=test[0], standard_error=test[1])


if __name__ == "__main__":
  record.main_on_data("markov", score)
