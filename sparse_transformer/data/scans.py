"""Scans: labelled orders in which images are generated (Jun et al. 2020)."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparse_transformer.data.arrangements import ARRANGEMENTS, Arrangement

RANDOM = re.compile("random:([2-9]|[1-9][0-9])")
# The seed of random scans, which is that of the released code.
SEED = 42


@dataclasses.dataclass(frozen=True)
class Scans(Arrangement):
  """Orders in which images are read, each identified by one label per name.

  Attributes:
    names: keys of `KINDS`, or random:K for K fixed scans; at least one name.
    shape: the shape of images, (rows, columns, channels).
    tables: {name: table}. A table is int32 [labels, n]. Its entry [label, i] is
      the index in the image of the symbol at position i of the scan. Label 0 is
      the image's own order.

  Raises:
    ValueError: a name is unknown, or does not apply to images of this shape.
  """

  names: tuple[str, ...]
  shape: tuple[int, ...]
  tables: dict[str, np.ndarray] = dataclasses.field(init=False, compare=False)

  def __post_init__(self) -> None:
    places = np.arange(math.prod(self.shape), dtype=np.int32)
    # Create an image whose levels are its own indices. Applying a scan to it
    # then gives the table of the scan.
    image = places.reshape(self.shape)
    tables = {name: _table(name, image) for name in self.names}
    # The class is frozen, but setting this is safe, because the tables are
    # determined by the fields.
    object.__setattr__(self, "tables", tables)

  def __len__(self) -> int:
    return len(self.names)

  def draw(self, *seed: int) -> tuple[int, ...]:
    # NumPy guarantees that the words are the same in all versions.
    words = np.random.SeedSequence(seed).generate_state(len(self))
    numbers = [len(table) for table in self.tables.values()]
    # Words have 32 bits, so remainders are very nearly uniform.
    return tuple(words % numbers)

  def labels(self, words: Sequence[str]) -> tuple[int, ...]:
    """Returns the labels of a scan; names that are not given have label 0.

    Args:
      words: items NAME=LABEL, at most one per name.

    Raises:
      ValueError: the name or the label does not exist.
    """
    allowed = {name: len(table) for name, table in self.tables.items()}
    known = "".join(f"{k}=0 to {x - 1}, " for k, x in allowed.items())
    labels = dict.fromkeys(self.names, 0)
    for word in words:
      name, _, label = word.rpartition("=")
      # Remove the name, so that a second label for it raises an error.
      numbers = range(allowed.pop(name, 0))
      if label not in map(str, numbers):
        raise ValueError(
          f"--order={word} must be one of data.orders: {known}each at most once"
        )
      labels[name] = int(label)
    return tuple(labels.values())

  def places(self, order_labels_BO: Any, xp: Any = np) -> Any:
    """Returns, for each position in a scan, its index in the image.

    Args:
      order_labels_BO: for each row, the O labels of a scan, one for each of
        `data.orders`.
      xp: the module to compute with, NumPy or jax.numpy.

    Returns:
      int32 [B, n]. Position i of a scan is the symbol at index [b, i] of the
      image.
    """
    chosen = []
    for k, table in enumerate(self.tables.values()):
      labels_B = order_labels_BO[:, k]
      chosen.append(xp.asarray(table)[labels_B])
    # Compose the permutations.
    compose = functools.partial(xp.take_along_axis, axis=1)
    return functools.reduce(compose, chosen)

  def arrange(self, example_L: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    (places_L,) = self.places(np.array([labels]))
    symbols_L = example_L[places_L]
    return np.append(symbols_L, np.array(labels, symbols_L.dtype))

  def restore(self, rows_BL: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    (places_L,) = self.places(np.array([labels]))
    # argsort inverts a permutation.
    return rows_BL[:, places_L.argsort()]


ARRANGEMENTS.append(Scans)


def _table(name, image):
  """Returns the table of a name, int32 [labels, n], see `Scans.tables`."""
  try:
    match = RANDOM.fullmatch(name)
    scans = _random(image, int(match[1])) if match else KINDS[name](image)
    return np.stack(scans).reshape(-1, image.size)
  except (KeyError, ValueError, IndexError):
    raise ValueError(
      f"data.orders: images of {image.shape} have no order {name!r}; orders are"
      f" {', '.join(KINDS)} and random:2 to random:99, some of which require"
      " square images, 3 colors or even sizes"
    ) from None


# Each function returns an image in all scans of a kind; the first is unchanged.


def _rotations(image):
  """Returns an image rotated clockwise by 0, 90, 180 and 270 degrees."""
  return [np.rot90(image, turns, (1, 0)) for turns in range(4)]


def _colors(image):
  """Returns an image with its 3 channels in all 6 orders."""
  return [image[..., list(x)] for x in itertools.permutations((0, 1, 2))]


def _puzzles(image):
  """Returns an image with its 4 quarters in all 24 orders."""
  quarters = []
  for half in np.split(image, 2):
    quarters += np.split(half, 2, axis=1)

  puzzles = []
  for a, b, c, d in itertools.permutations(quarters):
    top = np.hstack([a, b])
    bottom = np.hstack([c, d])
    puzzles.append(np.vstack([top, bottom]))
  return puzzles


def _random(image, number):
  """Returns an image in its own order and in `number` - 1 random orders."""
  rng = np.random.RandomState(SEED)
  # Released networks were trained with these draws.
  scans = [image.reshape(-1)]
  for _ in range(number - 1):
    drawn = rng.permutation(image.size)
    scans.append(drawn.astype(image.dtype))
  return scans


def _transposition(image):
  """Returns an image and its transpose."""
  return [image, image.swapaxes(0, 1)]


def _reversal(image):
  """Returns an image, and the image with its pixels in reverse order."""
  return [image, image[::-1, ::-1]]


KINDS = {
  "rotation": _rotations,
  "colors": _colors,
  "transposition": _transposition,
  "reverse": _reversal,
  "jigsaw": _puzzles,
}
