"""Lists of items name every pair of every head exactly once."""

import numpy as np
import pytest
from helpers import catalogue

from sparse_transformer.attention import contract
from sparse_transformer.attention.executors import items
from sparse_transformer.patterns import Block, Causal, Local, Strided, Summary

TILE = 32


def pairs_of(lists, mine, other, n, num_heads, group=1):
  """How often each pair is processed: int [heads, n, n], this side first."""
  counts = np.zeros((num_heads, n + 1, n + 1), int)
  bits = np.ascontiguousarray(lists.masks).view(np.uint8)
  masks = np.unpackbits(bits, axis=-1, bitorder="little")
  # The first slot has every row once.
  tiles = lists.items[lists.items[:, 5] == 0, :2]
  assert len(tiles) == -(-n // TILE) * (num_heads // group)
  assert len(tiles) == len(np.unique(tiles, axis=0)) and lists.written[0].all()
  lengths = lists.items[:, 4] - lists.items[:, 2]
  assert (np.diff(lengths) <= 0).all()  # the longest first
  for head, tile, first, middle, last, slot in lists.items:
    assert lists.written[slot, mine[tile][mine[tile] >= 0], head].all()
    for i in range(first, last):
      where, mask, *member = lists.others[i]
      pairs = masks[mask] if i < middle else 1
      of = sum(member, head * group)
      counts[of, mine[tile][:, None], other[where]] += pairs
  assert (counts[:, -1] == 0).all() and (counts[:, :, -1] == 0).all()  # padding
  return counts[:, :-1, :-1]


@pytest.mark.parametrize("n", [1, 64, 100])
@pytest.mark.parametrize(
  "patterns, group",
  [
    (tuple(Block(32) | Summary(32, 8, shift) for shift in (0, 1, 0)), 1),
    ((Local(12) | Strided(12), Causal(), Causal() - Causal()), 1),
    ((Local(9), Local(9) | Strided(9), Causal() - Causal(), Strided(9)), 2),
    ((Local(9), Local(9) | Strided(9), Causal() - Causal(), Strided(9)), 4),
    (tuple(catalogue.ALL), 1),
  ],
  ids=lambda x: str(x[0]) if isinstance(x, tuple) else str(x),
)
def test_lists_name_each_pair_once(patterns, group, n):
  work = items.work_by_position(patterns, n, TILE, group)
  num_heads, expected = len(patterns), [p.matrix(n) for p in patterns]
  found = pairs_of(work.by_query, work.queries, work.keys, n, num_heads)
  np.testing.assert_array_equal(found, expected)
  sides = work.keys, work.queries
  found = pairs_of(work.by_key, *sides, n, num_heads, group)
  np.testing.assert_array_equal(found, np.swapaxes(expected, 1, 2))
  assert work.by_key.written.shape[2] == num_heads // group


def test_tile_is_no_larger_than_needed():
  tiles = [contract.fit_tile(128, n) for n in (1, 32, 33, 65, 500)]
  assert tiles == [32, 32, 64, 128, 128]
