"""Linear prediction of the pixels of images, and counts of its errors.

Each channel of a pixel is predicted by least squares from neighbors above and
to the left, all their channels, and the channels before it of the same pixel.
A second linear model predicts the size of the error, from the distances of the
same channel of the neighbors to the prediction and from the errors of the
channels before; it selects one of 32 histograms of errors. A histogram, moved
to the prediction and cut to the possible values, is the distribution.

Beyond the top is the middle gray; beyond the left is the pixel above, and
beyond the right the last one of the row. In clips, square frames one below the
other, neighbors are also in the frame before. Errors are over images.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from sparse_transformer import data

SCORED = "validation", "test"
IMAGES = 2_500  # of the training split; 1,000 at a time are scored
# Rows up and columns to the left: the pixels before within 1, and within 2.
NEIGHBORS = (
  [(0, 1), (1, 0), (1, 1)],
  [(0, 1), (0, 2), *((i, j) for i in (1, 2) for j in range(-2, 3))],
)
# And of the frame before, the pixels within 1 of the same place.
BEFORE = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
EDGES = np.geomspace(1 / 512, 1 / 4, 31)  # of the histograms, times the levels


def score(
  splits: Mapping[str, np.ndarray], source: data.Images
) -> list[dict[str, Any]]:
  """Bits per value of images [number, length] of a source."""
  rows, step = [], -(-len(splits["train"]) // IMAGES)
  neighbors, shape, size = [*NEIGHBORS], source.shape, source.vocab_size
  if source.frames > 1:
    before = ((shape[1] + i, j) for i, j in BEFORE)
    neighbors.append([*NEIGHBORS[1], *before])
  for near in neighbors:
    bits_of = fit(splits["train"][::step], near, shape, size)
    bits = {}
    for split in SCORED:
      parts = np.array_split(splits[split], -(-len(splits[split]) // 1_000))
      bits[split] = np.concatenate([bits_of(part).ravel() for part in parts])
    about = dict(model=f"linear, {len(near)} pixels", sees="its image")
    rows.append(about | means(bits, splits["test"].shape[1]))
  return rows


def fit(
  train: np.ndarray,
  near: Sequence[tuple[int, int]],
  shape: Sequence[int],
  size: int,
) -> Callable[[np.ndarray], np.ndarray]:
  """Returns the function of images to the bits of each value."""
  known = 1 + len(near) * shape[-1]
  means: list[np.ndarray] = []
  scales: list[np.ndarray] = []

  def channels(images, is_new=False):
    """Of each channel: a histogram's index, the prediction and the value."""
    inputs, errors = features(images.reshape(-1, *shape), near, size), []
    for i in range(shape[-1]):
      value = inputs[:, known + i]
      if is_new:
        means.append(solve(inputs[:, : known + i], value))
      p = inputs[:, : known + i] @ means[i]
      off = [np.ones_like(p), *(inputs[:, 1 + i : known : shape[-1]].T - p)]
      sizes = np.abs(np.stack([*off, *errors], axis=1))
      errors.append(value - p)
      if is_new:
        scales.append(solve(sizes, np.abs(errors[-1])))
      index = np.searchsorted(EDGES * size, sizes @ scales[i])
      p = np.rint(p).clip(0, size - 1)
      yield index, p.astype(int), value.astype(int)

  shift, counts = size - 1, []
  for index, p, value in channels(train, is_new=True):
    places = index, value - p + shift
    counts.append(np.full((len(EDGES) + 1, 2 * size - 1), 0.5))
    np.add.at(counts[-1], places, 1)
  sums = [np.pad(x.cumsum(1), ((0, 0), (1, 0))) for x in counts]

  def bits(images):
    found = []
    for i, (index, p, value) in enumerate(channels(images)):
      total = sums[i][index, size + shift - p] - sums[i][index, shift - p]
      found.append(np.log2(total / counts[i][index, value - p + shift]))
    return np.stack(found, axis=1).reshape(images.shape)

  return bits


def features(
  images: np.ndarray, near: Sequence[tuple[int, int]], size: int
) -> np.ndarray:
  """Of each pixel: 1, the channels of its neighbors, and its own."""
  x = images.astype(np.float32)
  top = max(i for i, _ in near)
  x = np.pad(x, ((0, 0), (top, 0), (0, 0), (0, 0)), constant_values=size / 2)
  left = np.concatenate([x[:, :1, :1], x[:, :-1, :1]], axis=1)
  x = np.concatenate([left, left, x, x[:, :, -1:], x[:, :, -1:]], axis=2)
  height, width = images.shape[1:3]
  found = [np.ones_like(images[..., :1], np.float32)]
  for i, j in [*near, (0, 0)]:
    found.append(x[:, top - i : top - i + height, 2 - j : 2 - j + width])
  found = np.concatenate(found, axis=-1)
  return found.reshape(-1, found.shape[-1])


def solve(inputs: np.ndarray, values: np.ndarray) -> np.ndarray:
  """The weights of least squares; the sums are in float64."""
  products: Any = 0
  for part in np.array_split(np.column_stack([inputs, values]), 100):
    part = part.astype(np.float64)
    products += part.T @ part
  found, *_ = np.linalg.lstsq(products[:-1, :-1], products[:-1, -1])
  return found.astype(np.float32)


def means(bits: Mapping[str, np.ndarray], size: int) -> dict[str, Any]:
  """Mean bits of each split, and the error of the test split's over blocks."""
  validation, test = (mean_and_error(bits[split], size) for split in SCORED)
  return dict(validation=validation[0], test=test[0], standard_error=test[1])


def mean_and_error(values: np.ndarray, size: int) -> tuple[float, float | None]:
  """The mean of a row of values, and its standard error over whole blocks."""
  blocks = values[: len(values) // size * size].reshape(-1, size)
  means = blocks.mean(1, np.float64)
  error = float(scipy.stats.sem(means)) if len(means) > 1 else None
  return float(values.mean(dtype=np.float64)), error
