"""Work lists name every pair of every head exactly once."""

import catalogue
import numpy as np
import pytest

from sparse_transformer.attention.executors import worklists
from sparse_transformer.patterns import Block, Causal, Local, Strided, Summary

TILE = 32


def pairs_of(lists, mine, other, n, num_heads, group=1):
  """How often each pair is processed: int [heads, n, n], this side first."""
  counts = np.zeros((num_heads, n + 1, n + 1), int)
  bits = np.ascontiguousarray(lists.masks).view(np.uint8)
  masks = np.unpackbits(bits, axis=-1, bitorder="little")
  mine = mine.reshape(-1, masks.shape[1])
  # The first slot has every row once.
  tiles = lists.items[lists.items[:, 5] == 0, :2]
  assert len(tiles) == -(-n // mine.shape[1]) * (num_heads // group)
  assert len(tiles) == len(np.unique(tiles, axis=0)) and lists.written[0].all()
  for head, tile, first, middle, last, slot in lists.items:
    assert lists.written[slot, mine[tile][mine[tile] >= 0], head].all()
    for i in range(first, last):
      where, mask, *member = lists.others[i]
      pairs = masks[mask] if i < middle else 1
      of = sum(member, head * group)
      counts[of, mine[tile][:, None], other[where]] += pairs
  assert (counts[:, -1] == 0).all() and (counts[:, :, -1] == 0).all()  # padding
  return counts[:, :-1, :-1]


@pytest.mark.parametrize("longest, height", [(0, 1), (2, 1), (0, 2), (2, 2)])
@pytest.mark.parametrize("n", [1, 64, 100])
@pytest.mark.parametrize(
  "patterns",
  [
    tuple(Block(32) | Summary(32, 8, shift) for shift in (0, 1, 0)),
    (Local(12) | Strided(12), Causal(), Causal() - Causal()),
    *(tuple(catalogue.ALL[i : i + 6]) for i in range(0, len(catalogue.ALL), 6)),
  ],
  ids=lambda patterns: str(patterns[0]),
)
def test_lists_name_each_pair_once(patterns, n, longest, height):
  work = worklists.make_work(patterns, n, TILE, longest, height=height)
  assert work.by_key.masks.shape[1] == height * TILE
  expected = np.stack([pattern.matrix(n) for pattern in patterns])
  of_queries = pairs_of(
    work.by_query, work.queries, work.keys, n, len(patterns)
  )
  np.testing.assert_array_equal(of_queries, expected)
  of_keys = pairs_of(work.by_key, work.keys, work.queries, n, len(patterns))
  np.testing.assert_array_equal(of_keys, expected.swapaxes(1, 2))


@pytest.mark.parametrize("longest, height", [(0, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("group", [2, 4])
def test_items_of_keys_list_all_query_heads(group, longest, height):
  local, strided = Local(12), Strided(12)
  patterns, n = (local, local | strided, Causal() - Causal(), strided), 100
  by_query, by_key = (
    worklists.make_work(patterns, n, TILE, longest, size, height)
    for size in (1, group)
  )
  np.testing.assert_array_equal(by_query.by_query.items, by_key.by_query.items)
  lists, expected = by_key.by_key, np.stack([p.matrix(n) for p in patterns])
  assert lists.written.shape[2] == len(patterns) // group
  found = pairs_of(lists, by_key.keys, by_key.queries, n, 4, group)
  np.testing.assert_array_equal(found, expected.swapaxes(1, 2))


def test_items_are_longest_first_and_bounded():
  patterns = (Causal(), Strided(7))
  lists = worklists.make_work(patterns, 500, TILE, 4).by_key
  lengths = lists.items[:, 4] - lists.items[:, 2]
  assert (np.diff(lengths) <= 0).all() and lengths.max() == 4
  assert len(lists.written) > 1 and lists.written[0].all()


@pytest.mark.parametrize("tile", [16, 48, 96])
def test_tile_that_a_kernel_cannot_run_is_rejected(tile):
  with pytest.raises(ValueError, match=f"tile={tile} must be a power of two"):
    worklists.check_tile(tile, 500)


def test_tile_is_no_larger_than_needed():
  tiles = [worklists.check_tile(128, n) for n in (1, 32, 33, 65, 500)]
  assert tiles == [32, 32, 64, 128, 128]
