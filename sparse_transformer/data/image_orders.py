"""Orders in which images are generated, chosen by labels: Jun et al. 2020."""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np

# From an image to its orders, itself the first.
KINDS = {
  "rotation": lambda x: [np.rot90(x, turns, (1, 0)) for turns in range(4)],
  "colors": lambda x: [x[..., list(c)] for c in permutations((0, 1, 2))],
  "transposition": lambda x: [x, x.swapaxes(0, 1)],
  "reverse": lambda x: [x, x[::-1, ::-1]],
  "jigsaw": lambda x: [_join(*four) for four in permutations(_quarters(x))],
}
RANDOM = re.compile("random:([2-9]|[1-9][0-9])")
SEED = 42  # of random orders, as in the released code


@dataclasses.dataclass(frozen=True)
class Orders:
  """Kinds of orders that a source has; a label of each kind tells an order.

  Attributes:
    names: keys of `KINDS`, or random:K for K fixed orders.
    shape: of images: (rows, columns, channels).
    tables: by name, the places of positions in the image, [labels, n]; label 0
      is the image as it is.

  Raises:
    ValueError: a name is unknown, or images of this shape have no such orders.
  """

  names: tuple[str, ...] = ()
  shape: tuple[int, ...] = ()
  tables: dict[str, np.ndarray] = dataclasses.field(init=False, compare=False)

  def __post_init__(self) -> None:
    image = np.arange(math.prod(self.shape), dtype=np.int32)
    tables = {x: _table(x, image.reshape(self.shape)) for x in self.names}
    object.__setattr__(self, "tables", tables)

  def __len__(self) -> int:
    return len(self.names)

  def draw(self, *seed: int) -> tuple[int, ...]:
    """Labels, a function of the seed, each with the same probability."""
    # NumPy guarantees the same words in all versions.
    words = np.random.SeedSequence(seed).generate_state(len(self))
    return tuple(words % [len(x) for x in self.tables.values()])

  def labels(self, words: Sequence[str]) -> tuple[int, ...]:
    """The labels of words NAME=LABEL, 0 where none is given; or ValueError."""
    sizes = {name: len(x) for name, x in self.tables.items()}
    known = "".join(f"{k}=0 to {x - 1}, " for k, x in sizes.items())
    known = f"{known}each once" if known else "there are none"
    found = dict.fromkeys(self.names, 0)
    for word in words:
      name, _, label = word.rpartition("=")
      if label not in map(str, range(sizes.pop(name, 0))):
        raise ValueError(f"--order={word} must be of data.orders: {known}")
      found[name] = int(label)
    return tuple(found.values())

  def places(self, labels_BK: Any, xp: Any = np) -> Any:
    """The places of positions in the image, [B, n], by NumPy or jax.numpy."""
    compose = lambda x, y: xp.take_along_axis(x, y, axis=1)
    tables = enumerate(self.tables.values())
    chosen = (xp.asarray(table)[labels_BK[:, k]] for k, table in tables)
    return functools.reduce(compose, chosen)

  def arrange(self, image_L: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    """A row for the network: an image's symbols in an order; its labels."""
    if not self.names:
      return image_L
    (places_L,) = self.places(np.array([labels]))
    return np.append(image_L[places_L], np.array(labels, image_L.dtype))

  def restore(self, rows_BL: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    """The images whose symbols in an order are given."""
    if not self.names:
      return rows_BL
    return rows_BL[:, self.places(np.array([labels]))[0].argsort()]


def _table(name, image):
  try:
    if match := RANDOM.fullmatch(name):
      rng = np.random.RandomState(SEED)
      more = [rng.permutation(image.size) for _ in range(1, int(match[1]))]
      return np.stack([image.reshape(-1), *more]).astype(np.int32)
    return np.stack(KINDS[name](image)).reshape(-1, image.size)
  except (KeyError, ValueError, IndexError):
    raise ValueError(
      f"data.orders: images of {image.shape} have no {name!r}; there are"
      f" {', '.join(KINDS)} and random:2 to random:99, of squares, of 3 colors"
      " or of even sizes"
    ) from None


def _quarters(x):
  return [part for half in np.split(x, 2) for part in np.split(half, 2, 1)]


def _join(a, b, c, d):
  return np.concatenate([np.hstack([a, b]), np.hstack([c, d])])
