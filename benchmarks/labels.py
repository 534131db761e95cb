"""Accuracy of baselines without a network, on labelled data.

The most frequent label of the training split; linear classifiers; and what is
known to decide a task:

listops: the most frequent label given the root's operator, and given also the
  result of the digits that are its own arguments.
strand: the sign of G minus C in the window.

Linear classifiers are ridge regressions of one-hot labels, whose regularization
is chosen on the validation split, of pixels or of how often each run of k
symbols occurs. At most `EXAMPLES` of the training split are used, spread over
it.
"""

import collections
import functools
import statistics
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from sparse_transformer import data
from sparse_transformer.data import codecs
from sparse_transformer.data.listops import OPERATORS, SYMBOLS

EXAMPLES = 20_000
RIDGES = 10.0 ** np.arange(-1, 7)
Example = tuple[np.ndarray, int]
Splits = dict[str, list[Example]]


def score(name: str, source: data.Sequences) -> dict[str, Any]:
  """Rows of baselines for the source with a name."""
  splits = {split: examples(source, split) for split in data.SPLITS}
  rows: list[dict[str, Any]] = []

  def add(model, sees, find, function):
    rows.append(dict(model=model, sees=sees) | find(splits, function))

  add("most frequent label", "nothing", look_up, lambda x: 0)
  if name == "listops":
    add("root's operator", "the first symbol", look_up, lambda x: x[0])
    add("root's operator and digits", "them", look_up, of_root)
  elif name == "cifar10_gray":
    add("linear", "all pixels", ridge, lambda x: x / np.float32(128) - 1)
  else:
    if name == "strand":
      add("sign of G minus C", "all", look_up, sign_of_skew)
    size = source.vocab_size
    for k in range(1, 6 if size == len(codecs.BASES) else 2):
      count = functools.partial(count_runs, k=k, size=size)
      add(f"linear, runs of {k}", "all", ridge, count)
  numbers = {split: len(found) for split, found in splits.items()}
  return dict(unit="accuracy", symbols=numbers, rows=rows)


def examples(source: data.Sequences, split: str) -> list[Example]:
  """(symbols, label) of a split, of at most `EXAMPLES` spread over it."""
  rows = source.examples(split)
  places = np.linspace(0, len(rows) - 1, min(EXAMPLES, len(rows)))
  chosen = (rows[int(i)] for i in places.round())
  return [(row[: row[-1]], int(row[-2])) for row in chosen]


def look_up(
  splits: Splits, key: Callable[[np.ndarray], Hashable]
) -> dict[str, float]:
  """The scores of the most frequent label for each key, in training."""
  labels: dict[Hashable, collections.Counter] = {}
  for x, label in splits["train"]:
    labels.setdefault(key(x), collections.Counter())[label] += 1
  everywhere = sum(labels.values(), collections.Counter())

  def guess(x):
    return labels.get(key(x), everywhere).most_common(1)[0][0]

  return scores(
    {
      split: np.array([guess(x) == label for x, label in splits[split]])
      for split in ("validation", "test")
    }
  )


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


def sign_of_skew(x: np.ndarray) -> Hashable:
  g, c = (np.count_nonzero(x == codecs.BASES.index(base)) for base in "GC")
  return g > c


def count_runs(x: np.ndarray, k: int, size: int) -> np.ndarray:
  """How often each run of k symbols occurs, [size^k]."""
  places = len(x) - k + 1
  runs = sum(
    x[i : i + places].astype(np.int64) * size ** (k - 1 - i) for i in range(k)
  )
  return np.bincount(runs, minlength=size**k)


def ridge(
  splits: Splits, features: Callable[[np.ndarray], np.ndarray]
) -> dict[str, float]:
  """The scores of a linear classifier of features, standardized."""
  x, y = {}, {}
  for split, found in splits.items():
    x[split] = np.stack([features(symbols) for symbols, _ in found])
    y[split] = np.array([label for _, label in found])
  mean, deviation = x["train"].mean(0), x["train"].std(0)
  x = {
    split: np.c_[(found - mean) / (deviation + 1e-6), np.ones(len(found))]
    for split, found in x.items()
  }
  targets = np.eye(1 + max(y["train"]))[y["train"]]
  gram, moments = x["train"].T @ x["train"], x["train"].T @ targets

  def found(strength):
    weights = np.linalg.solve(gram + strength * np.eye(len(gram)), moments)
    return scores(
      {
        split: (x[split] @ weights).argmax(1) == y[split]
        for split in ("validation", "test")
      }
    )

  return max(map(found, RIDGES), key=lambda row: row["validation"])


def scores(hits: dict[str, np.ndarray]) -> dict[str, float]:
  """Accuracies, and the standard error on the test split."""
  found = {split: float(right.mean()) for split, right in hits.items()}
  error = statistics.stdev(map(float, hits["test"])) / len(hits["test"]) ** 0.5
  return found | dict(standard_error=error)
