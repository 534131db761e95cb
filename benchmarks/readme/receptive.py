"""What the network of a record can see at all, through all of its layers.

Boolean products of the masks of its layers, followed back from the last
positions of a sequence. Inputs are shifted by one: key k holds byte k - 1, and
key 0 none.
"""

import functools
import re
from typing import Any

import numpy as np

from sparse_transformer import patterns
from sparse_transformer.patterns import Pattern, analysis

LAST = analysis.LAST  # positions, so that not all are at an edge of a picture

Layers = tuple[tuple[Pattern, ...], ...]


def layers_of(config: dict[str, Any], choice: str = "") -> Layers:
  """The patterns of a network, or of one with another pattern, by layer."""
  attention, model = config["attention"], config["model"]
  names = "mode", "cycle", "stride", "window", "width", "num_summaries"
  changed, _, fields = choice.partition(" with ")
  pattern = changed or attention["pattern"]
  sizes = {name: model[name] for name in ("num_layers", "num_heads")}
  if layers := re.search(r"model\.num_layers=(\d+)", fields):
    sizes["num_layers"] = int(layers[1])
  return patterns.assign(pattern, **sizes, **{x: attention[x] for x in names})


@functools.cache
def reach(layers: Layers, n: int, last: int = LAST) -> np.ndarray:
  """The positions that each of the last ones can depend on: bool [last, n].

  >>> window = ((patterns.Local(3),), (patterns.Local(3),))
  >>> np.flatnonzero(reach(window, 64, last=1))
  array([59, 60, 61, 62, 63])
  """
  return analysis.receptive_field(layers, n, last)


def count(layers: Layers, n: int) -> int:
  """The bytes of the receptive field: the most that a position can see."""
  return int(reach(layers, n)[:, 1:].sum(1).max())


def sees(layers: Layers, n: int, back: int) -> str:
  """Which positions can see the byte so many places before their target.

  Positions without such a byte do not count.
  """
  seen = reach(layers, n)
  # Key 0 holds no byte.
  keys = np.arange(n)[-len(seen) :] - back + 1
  has_byte = keys > 0
  share = np.mean(seen[has_byte, keys[has_byte]])
  return {0: "no", 1: "yes"}.get(share, f"{100 * share:.0f} %")


def length(run: dict[str, Any], config: dict[str, Any]) -> int:
  """Positions of a sequence of a comparison's run."""
  _, _, changed = run["choice"].partition("train.batch_size=")
  size = int(changed.split()[0]) if changed else config["train"]["batch_size"]
  return run["tokens_per_step"] // size


def fields(found: dict[str, Any], back: int = 0) -> dict[str, tuple[str, ...]]:
  """{choice of a comparison: bytes seen, and whether one is}, as cells."""
  config, cells = found["about"]["config"], {}
  for run in found["runs"]:
    layers = layers_of(config, run["choice"])
    n = length(run, config)
    is_seen = (sees(layers, n, back),) if back else ()
    cells[run["choice"]] = f"{count(layers, n):,}", *is_seen
  return cells


def keys(found: dict[str, Any], choice: str) -> float:
  """Mean keys of a query, over positions, heads and layers."""
  config = found["about"]["config"]
  run = next(x for x in found["runs"] if x["choice"] == choice)
  n, layers = length(run, config), layers_of(config, choice)
  heads = [pattern for heads in layers for pattern in heads]
  return sum(pattern.pairs(n) for pattern in heads) / (n * len(heads))
