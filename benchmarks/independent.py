"""Scores a model of independent positions on the images of a config.

python -m benchmarks.independent --config=configs/digits.py

A baseline for models of images: every position has the distribution of its
values in the training split, each counted once more than it occurs. Writes
benchmarks/results/independent.json.
"""

import numpy as np

from benchmarks import record
from sparse_transformer import data


def score(source: data.Source) -> dict:
  train, test = (np.stack(list(source.examples(x))) for x in ("train", "test"))
  bits = bits_per_dim(train, test, source.vocab_size)
  print(f"{bits:.4f} {source.unit}")
  return dict(images=len(test), test=bits)


def bits_per_dim(train_NL: np.ndarray, test_ML: np.ndarray, size: int) -> float:
  """Bits per position of `test`, whose values are less than `size`."""
  counts_LV = np.ones((train_NL.shape[1], size))
  for value in range(size):
    counts_LV[:, value] += (train_NL == value).sum(0)
  p_LV = counts_LV / counts_LV.sum(1, keepdims=True)
  return float(-np.log2(p_LV[np.arange(len(p_LV)), test_ML]).mean())


if __name__ == "__main__":
  record.main_on_data("independent", score)
