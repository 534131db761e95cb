"""A baseline for clips: counts of how a pixel changes between frames.

For each context, the changes in the training split are counted, plus one for
each possible change. The distribution of a pixel is this histogram, shifted by
the pixel in the previous frame and restricted to possible values. There are
three models, with different contexts: the pixel in the previous frame; the
changes of the pixels to the left and above; and these with the previous change
of the pixel itself. Beyond the edges of a clip, changes are 0. The first frame
of a clip is not scored. Standard errors are over clips.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks import linear
from sparse_transformer import data

EDGE = 8  # in a context, larger changes are replaced by this one
SIZE = 2 * EDGE + 1


class Changes(NamedTuple):
  """The changes in clips, without the first frame.

  Arrays have the shape [clips, frames - 1, rows, columns].
  """

  before: np.ndarray  # the pixel in the previous frame
  change: np.ndarray  # the difference from it
  contexts: dict[int, np.ndarray]  # {number of contexts: context}


def score(
  splits: Mapping[str, np.ndarray], source: data.Images
) -> list[dict[str, Any]]:
  """Returns bits per value of all frames but the first, a row per model."""
  parts, rows = {x: changes(splits[x], source) for x in splits}, []
  scored = (source.frames - 1) * source.shape[1] ** 2  # of a clip
  copied = float(np.mean(parts["test"].change == 0))  # share of the pixels
  for number in parts["train"].contexts:
    counts = count(parts["train"], number, source.vocab_size)
    bits = {x: bits_of(counts, parts[x], number) for x in linear.SCORED}
    about = dict(model=f"counts, {number:,} contexts", sees="its clip")
    rows.append(about | linear.means(bits, scored) | dict(copied=copied))
  return rows


def changes(clips: np.ndarray, source: data.Images) -> Changes:
  shape = len(clips), source.frames, source.shape[1], source.shape[1]
  frames = clips.reshape(shape).astype(int)
  before, change = frames[:, :-1], np.diff(frames, axis=1)
  last, above, left = (_earlier(change, axis) for axis in (1, 2, 3))
  around = SIZE * left + above
  contexts = before, around, SIZE * around + last
  numbers = source.vocab_size, SIZE**2, SIZE**3
  return Changes(before, change, dict(zip(numbers, contexts, strict=True)))


def _earlier(change, axis):
  """Returns the changes shifted by one along an axis, from 0 to SIZE - 1."""
  first = np.zeros_like(change.take([0], axis))
  others = change.take(range(change.shape[axis] - 1), axis)
  found = np.concatenate([first, others], axis)
  return found.clip(-EDGE, EDGE) + EDGE


def count(train: Changes, number: int, size: int) -> np.ndarray:
  """Counts each change, from 1 - size on, in each context, plus 1."""
  counts = np.ones((number, 2 * size - 1))
  places = train.contexts[number], train.change + size - 1
  np.add.at(counts, places, 1)
  return counts


def bits_of(counts: np.ndarray, found: Changes, number: int) -> np.ndarray:
  """Returns the bits of each change, given that pixels are 0 to size - 1."""
  size = (counts.shape[1] + 1) // 2
  sums = np.pad(counts.cumsum(1), ((0, 0), (1, 0)))
  context, least = found.contexts[number], size - 1 - found.before
  total = sums[context, least + size] - sums[context, least]
  return np.log2(total / counts[context, found.change + size - 1]).ravel()
