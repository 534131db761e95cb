"""How many earlier symbols a network can see, and whether it sees certain ones.

Equal numbers of keys do not give equal receptive fields: a network that cannot
see a symbol through any number of its layers cannot use it.
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

  Where the content decides, this is what they may depend on for some content.

  Attributes:
    symbols: the most earlier symbols that one of them can depend on.
    sees: for `ABOVE`, in images, and `FRAME_BACK`, in clips, the share of them
      that can depend on this symbol.
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

  # Inputs of generators are shifted by one: key 0 is the start, and key k holds
  # symbol k - 1.
  shift = 0 if model.classifies else 1
  is_seen = is_seen[:, shift:]

  sees = {}
  targets = np.arange(n)[-len(is_seen) :]
  for name, distance in _distances(model).items():
    # The first positions of a short sequence have no such symbol.
    has_symbol = targets >= distance
    symbols = targets[has_symbol] - distance
    rows = np.flatnonzero(has_symbol)
    sees[name] = float(is_seen[rows, symbols].mean())
  return ReceptiveField(
    symbols=int(is_seen.sum(1).max()),
    sees=sees,
  )


def _distances(model):
  """{name of a symbol: how far it is before the target}."""
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
  """A share of the positions as text: yes, no, or a percentage."""
  if seen in (0, 1):
    return "yes" if seen else "no"
  return f"{100 * seen:.0f} %"
