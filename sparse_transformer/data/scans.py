"""Scans: orders in which images are generated, by labels: Jun et al. 2020."""

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
# The seed of random scans, as in the released code.
SEED = 42


@dataclasses.dataclass(frozen=True)
class Scans(Arrangement):
  """Orders of images. A scan has one label for each name.

  Attributes:
    names: keys of `KINDS`, or random:K for K fixed scans; at least one.
    shape: of images: (rows, columns, channels).
    tables: by name, the places of positions in the image, int32 [labels, n];
      label 0 is the image as it is.

  Raises:
    ValueError: a name is unknown, or images of this shape have no such scans.
  """

  names: tuple[str, ...]
  shape: tuple[int, ...]
  tables: dict[str, np.ndarray] = dataclasses.field(init=False, compare=False)

  def __post_init__(self) -> None:
    places = np.arange(math.prod(self.shape), dtype=np.int32)
    # An image whose levels are its own places: turning it turns the table.
    image = places.reshape(self.shape)
    tables = {name: _table(name, image) for name in self.names}
    # The class is frozen, but its tables follow from its fields.
    object.__setattr__(self, "tables", tables)

  def __len__(self) -> int:
    return len(self.names)

  def draw(self, *seed: int) -> tuple[int, ...]:
    # NumPy guarantees the same words in all versions.
    words = np.random.SeedSequence(seed).generate_state(len(self))
    numbers = [len(table) for table in self.tables.values()]
    # Words have 32 bits, so that the remainder favors no label noticeably.
    return tuple(words % numbers)

  def labels(self, words: Sequence[str]) -> tuple[int, ...]:
    """Returns the labels of a scan, 0 for kinds that no word names.

    Args:
      words: NAME=LABEL, at most one for each kind.

    Raises:
      ValueError: there is no such name or label.
    """
    allowed = {name: len(table) for name, table in self.tables.items()}
    known = "".join(f"{k}=0 to {x - 1}, " for k, x in allowed.items())
    labels = dict.fromkeys(self.names, 0)
    for word in words:
      name, _, label = word.rpartition("=")
      # Taken out, so that a second label of the same kind is unknown.
      numbers = range(allowed.pop(name, 0))
      if label not in map(str, numbers):
        raise ValueError(
          f"--order={word} must be of data.orders: {known}each once"
        )
      labels[name] = int(label)
    return tuple(labels.values())

  def places(self, order_labels_BO: Any, xp: Any = np) -> Any:
    """The places of positions in the image.

    Args:
      order_labels_BO: one label of each of the O kinds of `data.orders`.
      xp: the module to compute with, NumPy or jax.numpy.

    Returns:
      int32 [B, n]: position i of a row has the symbol of that place.
    """
    chosen = []
    for k, table in enumerate(self.tables.values()):
      labels_B = order_labels_BO[:, k]
      chosen.append(xp.asarray(table)[labels_B])
    # One scan after another.
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
  """The places of positions in an image, int32 [labels, n]."""
  try:
    match = RANDOM.fullmatch(name)
    scans = _random(image, int(match[1])) if match else KINDS[name](image)
    return np.stack(scans).reshape(-1, image.size)
  except (KeyError, ValueError, IndexError):
    raise ValueError(
      f"data.orders: images of {image.shape} have no {name!r}; there are"
      f" {', '.join(KINDS)} and random:2 to random:99, of squares, of 3 colors"
      " or of even sizes"
    ) from None


# Each function returns an image in all scans of a kind, first as it is.


def _rotations(image):
  """An image turned clockwise by 0, 90, 180 and 270 degrees."""
  return [np.rot90(image, turns, (1, 0)) for turns in range(4)]


def _colors(image):
  """An image with its 3 channels in all 6 orders."""
  return [image[..., list(x)] for x in itertools.permutations((0, 1, 2))]


def _puzzles(image):
  """An image with its 4 quarters in all 24 orders."""
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
  """An image in its own order, and in `number` - 1 random ones."""
  rng = np.random.RandomState(SEED)
  # Released networks were trained with these draws.
  scans = [image.reshape(-1)]
  for _ in range(number - 1):
    drawn = rng.permutation(image.size)
    scans.append(drawn.astype(image.dtype))
  return scans


def _transposition(image):
  """An image, and with its rows as columns."""
  return [image, image.swapaxes(0, 1)]


def _reversal(image):
  """An image, and from its last pixel to its first."""
  return [image, image[::-1, ::-1]]


KINDS = {
  "rotation": _rotations,
  "colors": _colors,
  "transposition": _transposition,
  "reverse": _reversal,
  "jigsaw": _puzzles,
}
