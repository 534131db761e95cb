"""A baseline for images: linear prediction, and counts of its errors.

Each channel of a pixel is predicted by least squares from all channels of
neighbors above and to the left, and from the previous channels of the same
pixel. A second linear model predicts the size of the error, from the distances
between the neighbors' values in this channel and the prediction, and from the
errors of the previous channels. The predicted size selects one of 32 histograms
of errors. The distribution of a value is this histogram, shifted by the
prediction and restricted to possible values.

Pixels above the image are middle gray. A pixel left of the image is the pixel
above it, and one right of the image is the last pixel of the row. In clips,
whose square frames are below each other, there are also neighbors in the
previous frame. Standard errors are over images.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from sparse_transformer import data

SCORED = "validation", "test"
IMAGES = 2_500  # training images used for the fit
# (rows up, columns to the left) of neighbors, within a distance of 1 and of 2.
NEIGHBORS = (
  [(0, 1), (1, 0), (1, 1)],
  [(0, 1), (0, 2), *((i, j) for i in (1, 2) for j in range(-2, 3))],
)
# Offsets of neighbors in the previous frame, within a distance of 1.
BEFORE = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
# Predicted sizes of errors that separate histograms, relative to the levels.
EDGES = np.geomspace(1 / 512, 1 / 4, 31)


def score(
  splits: Mapping[str, np.ndarray], source: data.Images
) -> list[dict[str, Any]]:
  """Returns bits per value of the images [number, length] of a source."""
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
  """Fits a model, and returns a function from images to bits of each value."""
  known = 1 + len(near) * shape[-1]
  means: list[np.ndarray] = []
  scales: list[np.ndarray] = []

  def channels(images, is_new=False):
    """Yields (index of the histogram, prediction, value) for each channel."""
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
  """Returns for each pixel: 1, the channels of its neighbors, and its own."""
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
  """Returns the weights of least squares, with sums in float64."""
  products: Any = 0
  for part in np.array_split(np.column_stack([inputs, values]), 100):
    part = part.astype(np.float64)
    products += part.T @ part
  found, *_ = np.linalg.lstsq(products[:-1, :-1], products[:-1, -1])
  return found.astype(np.float32)


def means(bits: Mapping[str, np.ndarray], size: int) -> dict[str, Any]:
  """Returns the mean bits of each split, and the standard error of the test."""
  validation, test = (mean_and_error(bits[split], size) for split in SCORED)
  return dict(validation=validation[0], test=test[0], standard_error=test[1])


def mean_and_error(values: np.ndarray, size: int) -> tuple[float, float | None]:
  """Returns the mean of values, and its standard error over whole blocks."""
  blocks = values[: len(values) // size * size].reshape(-1, size)
  means = blocks.mean(1, np.float64)
  error = float(scipy.stats.sem(means)) if len(means) > 1 else None
  return float(values.mean(dtype=np.float64)), error
