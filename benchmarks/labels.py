"""Accuracy of baselines on ListOps: what its first symbols alone decide.

The most frequent label of the training split; the most frequent one given the
root's operator; and the one given also the result of the digits that are the
root's own arguments. Of the training split, `EXAMPLES` spread over it are used.
"""

import collections
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from sparse_transformer import data
from sparse_transformer.data.listops import OPERATORS, SYMBOLS

EXAMPLES = 20_000
SCORED = "validation", "test"
Splits = dict[str, list[tuple[np.ndarray, int]]]


def score(source: data.Sequences) -> dict[str, Any]:
  splits = {split: examples(source, split) for split in data.SPLITS}
  models: tuple[tuple[str, str, Callable[[np.ndarray], Hashable]], ...] = (
    ("most frequent label", "nothing", lambda x: 0),
    ("root's operator", "the first symbol", lambda x: x[0]),
    ("root's operator and digits", "them", of_root),
  )
  rows = [
    dict(model=model, sees=sees) | look_up(splits, key)
    for model, sees, key in models
  ]
  numbers = {split: len(found) for split, found in splits.items()}
  return dict(unit="accuracy", symbols=numbers, rows=rows)


def examples(source, split):
  """(symbols, label) of a split, of at most `EXAMPLES` spread over it."""
  rows = source.examples(split)
  places = np.linspace(0, len(rows) - 1, min(EXAMPLES, len(rows)))
  chosen = (rows[int(i)] for i in places.round())
  return [(row[: row[-1]], int(row[-2])) for row in chosen]


def look_up(
  splits: Splits, key: Callable[[np.ndarray], Hashable]
) -> dict[str, float]:
  """Accuracies of the most frequent label for each key in training."""
  labels: dict[Hashable, collections.Counter] = {}
  for x, label in splits["train"]:
    labels.setdefault(key(x), collections.Counter())[label] += 1
  everywhere = sum(labels.values(), collections.Counter())
  guess = lambda x: labels.get(key(x), everywhere).most_common(1)[0][0]
  hits = {
    split: np.array([guess(x) == label for x, label in splits[split]])
    for split in SCORED
  }
  error = float(hits["test"].std(ddof=1)) / len(hits["test"]) ** 0.5
  found = {split: float(right.mean()) for split, right in hits.items()}
  return found | dict(standard_error=error)


def of_root(x: np.ndarray) -> Hashable:
  """The root's operator, and its result for the digits among its arguments."""
  digits: list[int] = []
  depth, nested = 0, 0
  for symbol in x[1:-1]:
    text = SYMBOLS[symbol]
    if text in OPERATORS:
      nested += depth == 0
      depth += 1
    elif text == "]":
      depth -= 1
    elif depth == 0:
      digits.append(int(text))
  operator = SYMBOLS[x[0]]
  result = OPERATORS[operator](digits) if digits else None
  # A sum with unknown terms depends on how many there are, a few of them.
  return operator, result, min(nested, 3)
