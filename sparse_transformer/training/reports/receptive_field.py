"""How many earlier symbols a network can see, and whether it sees certain ones.

Networks with the same number of keys per query may have different receptive
fields. A network cannot use a symbol that no path through its layers connects
to the output.
"""

import dataclasses
import functools

import numpy as np

from sparse_transformer import data, model as model_lib
from sparse_transformer.patterns import analysis

ABOVE = "the byte above"
FRAME_BACK = "the pixel one frame back"


@dataclasses.dataclass(frozen=True)
class ReceptiveField:
  """What the last `analysis.LAST` positions of a sequence can depend on.

  For content-based patterns, this includes all pairs that they may choose.

  Attributes:
    symbols: the maximum number of earlier symbols on which one of these
      positions can depend.
    sees: {name of a symbol: fraction of these positions that can depend on it}.
      The names are `ABOVE` in images, and `FRAME_BACK` in clips.
  """

  symbols: int
  sees: dict[str, float]


@functools.lru_cache(maxsize=8)
def measure(model: model_lib.Config) -> ReceptiveField:
  """Measures the receptive field of a network."""
  n = model.length
  support = []
  for heads in model.patterns:
    support.append([pattern.support() for pattern in heads])
  is_seen = analysis.receptive_field(support, n)

  # Unless the network classifies, inputs are shifted by one: key 0 is the
  # start, and key k holds symbol k - 1.
  shift = 0 if model.classifies else 1
  is_seen = is_seen[:, shift:]

  sees = {}
  targets = np.arange(n)[-len(is_seen) :]
  for name, distance in _distances(model).items():
    # At the first positions of a short sequence, there is no such symbol.
    has_symbol = targets >= distance
    symbols = targets[has_symbol] - distance
    rows = np.flatnonzero(has_symbol)
    sees[name] = float(is_seen[rows, symbols].mean())
  return ReceptiveField(
    symbols=int(is_seen.sum(1).max()),
    sees=sees,
  )


def _distances(model):
  """Returns {name of a symbol: its distance before the target}."""
  if len(model.shape) != 3 or model.classifies:
    return {}

  rows, columns, channels = model.shape
  frames = data.count_frames(model.shape)
  distances = {}
  if rows > frames:  # a row has another one above it
    distances[ABOVE] = columns * channels
  if frames > 1:
    distances[FRAME_BACK] = model.length // frames
  return distances


def share(seen: float) -> str:
  """Formats a fraction of the positions as yes, no, or a percentage."""
  if seen in (0, 1):
    return "yes" if seen else "no"
  return f"{100 * seen:.0f} %"
