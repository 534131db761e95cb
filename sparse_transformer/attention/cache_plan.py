"""Where decoding keeps keys: the fewest slots that a causal pattern needs.

A key is kept in a slot from its own position to that of the last query that
attends to it; then the slot is free for another key. Local keeps the last keys;
Block and Summary keep the current block and the summaries; Strided keeps all
keys. All is known before any array: this module is in NumPy.
"""

import dataclasses
import functools
import heapq

import numpy as np

from sparse_transformer.attention.content.selection import labelled
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.patterns.catalogue import Causal


@dataclasses.dataclass(frozen=True, eq=False)
class CachePlan:
  """Where the keys of one causal pattern are kept over n steps."""

  pattern: Pattern
  # int32 [n], the slot of each key; `size` for keys without a reader.
  slots: np.ndarray
  # int [n], the last query that may attend to each key, -1 for none.
  last: np.ndarray
  size: int  # number of slots
  width: int  # the largest number of keys of a query

  def held(self, stop: int) -> np.ndarray:
    """The key in each slot before step `stop`, -1 for none, [size + 1]."""
    keys = np.flatnonzero(self.last[:stop] >= stop)
    held = np.full(self.size + 1, -1, np.int32)
    held[self.slots[keys]] = keys
    return held


@functools.lru_cache(maxsize=256)
def plan_cache(pattern: Pattern, n: int) -> CachePlan:
  """The plan with the fewest slots.

  >>> from sparse_transformer.patterns import Local
  >>> plan_cache(Local(2), 5).slots.tolist()
  [0, 1, 0, 1, 0]

  Raises:
    ValueError: if the pattern is not causal.
  """
  kept = kept_pairs(pattern)
  if not analysis.is_causal(kept, n):
    raise ValueError(
      f"{pattern} lets queries see later keys, so it cannot be decoded step by"
      " step; use a causal pattern"
    )
  last = analysis.last_readers(kept, n)
  slots, size = _assign_slots(last)
  width = analysis.most_keys(pattern, n)
  return CachePlan(pattern, slots, last, size, width)


def _assign_slots(last: np.ndarray) -> tuple[np.ndarray, int]:
  """(slot of each key, number of slots); the last reader frees a slot."""
  slots, size = np.full(len(last), -1, np.int32), 0
  freed: list[tuple[int, int]] = []  # heap: (position, slot free from there on)
  for key in np.flatnonzero(last >= np.arange(len(last))).tolist():
    if freed and freed[0][0] <= key:
      slot = heapq.heappop(freed)[1]
    else:
      slot, size = size, size + 1
    slots[key] = slot
    heapq.heappush(freed, (int(last[key]) + 1, slot))
  slots[slots < 0] = size
  return slots, size


def kept_pairs(pattern: Pattern) -> Pattern:
  """The pairs for which keys are kept: labels may depend on any earlier key."""
  return Causal() if labelled(pattern) else pattern.support()
