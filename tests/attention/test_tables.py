"""Tables of kernels name every pair of every head exactly once.

Triton's are lists of items (items.py), Mosaic's are grids of steps
(block_tables.py).
"""

import numpy as np
import pytest
from helpers import backend_laws as laws, catalogue
from helpers.cases import listed

from sparse_transformer.attention import contract
from sparse_transformer.attention.backends import block_tables, items
from sparse_transformer.attention.backends.mosaic import Mosaic
from sparse_transformer.attention.heads import index_of, key_heads
from sparse_transformer.patterns import Block, Causal, Local, Strided, Summary

TILE = 32
FIXED = tuple(Block(32) | Summary(32, 8, shift) for shift in (0, 1, 0, 1))
THREE = *laws.TWO_SLOTS, Causal()
FOUR = Local(9), Local(9) | Strided(9), Causal() - Causal(), Strided(9)


def unpacked(masks):
  """Booleans of masks whose last axis has bits."""
  bytes_of = np.ascontiguousarray(masks).view(np.uint8)
  return np.unpackbits(
    bytes_of,
    axis=-1,
    bitorder="little",
  )


def count_items(lists, mine, other, n, num_heads, group=1):
  """How often each pair is processed: int [heads, n, n], this side first."""
  counts = np.zeros((num_heads, n + 1, n + 1), int)
  masks = unpacked(lists.masks)
  for head, tile, first, middle, last, slot in lists.items:
    assert lists.written[slot, mine[tile][mine[tile] >= 0], head].all()
    for i in range(first, last):
      where, mask, *member = lists.tiles[i]
      pairs = masks[mask] if i < middle else 1
      query_head = sum(member, head * group)
      counts[query_head, mine[tile][:, None], other[where]] += pairs

  # Padding, at -1, has none.
  assert (counts[:, -1] == 0).all()
  assert (counts[:, :, -1] == 0).all()
  return counts[:, :-1, :-1]


@pytest.mark.parametrize("n", [1, 64, 100])
@pytest.mark.parametrize(
  "heads, group",
  [
    (FIXED[:3], 1),
    (THREE, 1),
    (FOUR, 2),
    (FOUR, 4),
    (catalogue.ALL, 1),
  ],
)
def test_items_name_each_pair_once(heads, group, n):
  work = items.work_by_position(heads, n, TILE, group)
  expected = np.stack([pattern.matrix(n) for pattern in heads])
  by_query = count_items(
    work.by_query, work.queries, work.keys, n, num_heads=len(heads)
  )
  by_key = count_items(
    work.by_key, work.keys, work.queries, n, num_heads=len(heads), group=group
  )

  np.testing.assert_array_equal(by_query, expected)
  np.testing.assert_array_equal(by_key, expected.swapaxes(1, 2))
  assert work.by_key.written.shape[2] == len(heads) // group

  for lists, num_heads in (
    (work.by_query, len(heads)),
    (work.by_key, len(heads) // group),
  ):
    # The first slot has every row once, and the longest items come first.
    tiles = lists.items[lists.items[:, 5] == 0, :2]
    assert len(tiles) == -(-n // TILE) * num_heads
    assert len(tiles) == len(np.unique(tiles, axis=0))
    assert lists.written[0].all()
    lengths = lists.items[:, 4] - lists.items[:, 2]
    assert (np.diff(lengths) <= 0).all()


def test_tile_is_no_larger_than_needed():
  tiles = [contract.fit_tile(128, n) for n in (1, 32, 33, 65, 500)]
  assert tiles == [32, 32, 64, 128, 128]


# Steps.


def plans_of(heads, n, group=1):
  request = laws.request_for(
    heads,
    n,
    num_key_heads=len(heads) // group,
    tile=TILE,
  )
  return Mosaic().plans(request)


def count_steps(plan, grids, by_query, group):
  """How often each pair of places is processed, by (head, row, column)."""
  masks = unpacked(plan.tables.masks.swapaxes(1, 2))
  rows = len(plan.queries.positions) // TILE
  cols = len(plan.keys.positions) // TILE
  counts = {}
  for steps in grids:
    for mine, other, code in zip(
      steps.rows, steps.columns, steps.codes, strict=True
    ):
      assert steps.first <= mine < steps.first + steps.num_blocks
      if not code & (block_tables.PARTIAL | block_tables.FULL):
        continue
      query, key = (mine, other) if by_query else (other, mine)
      head, row = divmod(query, rows)
      key_head, col = divmod(key, cols)
      assert head // group == key_head

      pairs = counts.setdefault((head, row, col), np.zeros((TILE, TILE), int))
      is_partial = code & block_tables.PARTIAL
      pairs += masks[code >> block_tables.SHIFT] if is_partial else 1

  return counts


ALL = catalogue.ALL


@pytest.mark.parametrize(
  "heads, group, n, most_steps",
  listed(
    default=[
      (FIXED, 1, 1, 99),
      (FIXED, 2, 64, 8),
      (THREE, 3, 100, 13),
      (laws.WITHOUT_KEYS, 1, 64, 8),
      (ALL, 1, 100, 13),
    ],
    every=[
      (*heads, *sizes)
      for heads in (
        (FIXED, 1),
        (FIXED, 2),
        (THREE, 3),
        (laws.WITHOUT_KEYS, 1),
        (ALL, 1),
      )
      for sizes in ((1, 99), (64, 8), (100, 13))
    ],
  ),
)
def test_steps_name_each_pair_once(heads, group, n, most_steps, monkeypatch):
  monkeypatch.setattr(Mosaic, "MOST_STEPS", most_steps)
  totals = np.zeros((2, len(heads), n, n), int)
  for plan, of_plan in plans_of(heads, n, group):
    numbers = np.arange(len(heads))[index_of(of_plan, len(heads))]
    num_key_heads = len(key_heads(of_plan, group) or ())
    num_key_heads = num_key_heads or len(numbers) // group
    group_of_plan = len(numbers) // num_key_heads
    queries = plan.queries.positions.reshape(-1, TILE)
    keys = plan.keys.positions.reshape(-1, TILE)
    sides = plan.tables.by_query, plan.tables.by_key
    for total, grids, by_query in zip(
      totals, sides, (True, False), strict=True
    ):
      assert all(len(steps.rows) <= most_steps for steps in grids)
      counts = count_steps(plan, grids, by_query, group_of_plan)
      for (head, row, col), pairs in counts.items():
        q = queries[row]
        k = keys[col]
        assert not pairs[q < 0].any()
        assert not pairs[:, k < 0].any()
        at = np.ix_(q[q >= 0], k[k >= 0])
        total[numbers[head]][at] += pairs[q >= 0][:, k >= 0]

  expected = [pattern.matrix(n) for pattern in heads]

  for total in totals:
    np.testing.assert_array_equal(total, expected)


def test_parts_with_the_same_order_of_queries_have_one_plan():
  assert len(plans_of((Local(40), Local(9) | Causal()), 128)) == 1

  ((plan, _),) = plans_of(FIXED, 128)
  assert len(plan.keys.orders) == 3

  ((plan, heads), (second, _)) = plans_of((Block(32), Strided(8)), 128)
  assert heads == (0,)
  assert plan.queries.orders[0].is_natural
  assert plan.keys.orders[0].is_natural
  assert not second.queries.orders[0].is_natural


def test_blocks_are_restored():
  x = np.arange(2 * 8 * 3 * 5).reshape(2, 8, 3, 5)
  for array, width in (
    (x, 5),
    (x[..., 0], 0),
  ):
    blocks = block_tables.to_blocks(array, 4, 3)
    found = block_tables.from_blocks(blocks, 3, width > 0)
    assert blocks.shape == (2, 6, width or 1, 4)
    np.testing.assert_array_equal(found, array)

  of_all_heads = x[:, :, :1, 0]
  blocks = block_tables.to_blocks(of_all_heads, 4, 3)
  found = block_tables.from_blocks(blocks, 3, False)

  np.testing.assert_array_equal(found, np.repeat(of_all_heads, 3, 2))
