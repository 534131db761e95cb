"""Tables of kernels that copy blocks: plans, steps, grids, tiles."""

import numpy as np
import pytest
from helpers import catalogue
from helpers.executor_laws import TWO_SLOTS, WITHOUT_KEYS

from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors import block_tables
from sparse_transformer.attention.executors.block_tables import (
  FULL,
  PARTIAL,
  SHIFT,
)
from sparse_transformer.attention.executors.mosaic import Mosaic
from sparse_transformer.attention.heads import index_of, key_heads
from sparse_transformer.patterns import Block, Causal, Local, Strided, Summary

FIXED = tuple(Block(32) | Summary(32, 8, shift) for shift in (0, 1, 0, 1))


def plans_of(heads, n, group=1):
  widths, of_keys = (16, 16), len(heads) // group
  case = Case(1, n, len(heads), *widths, "bfloat16", "tpu", 32, of_keys)
  return Mosaic().plans(heads, case)


def count_pairs(plan, grids, by_query, group):
  """How often each pair of places is processed: int [heads, places, places]."""
  masks = np.ascontiguousarray(plan.tables.masks.swapaxes(1, 2))
  masks = np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")
  tile, (rows, cols) = (
    plan.tile,
    (len(x.positions) // plan.tile for x in (plan.queries, plan.keys)),
  )
  counts = {}
  for steps in grids:
    for mine, other, code in zip(
      steps.items, steps.others, steps.codes, strict=True
    ):
      assert steps.first <= mine < steps.first + steps.num_blocks
      if code & (PARTIAL | FULL):
        query, key = (mine, other) if by_query else (other, mine)
        (head, row), (of_keys, col) = divmod(query, rows), divmod(key, cols)
        assert head // group == of_keys
        pairs = counts.setdefault((head, row, col), np.zeros((tile, tile), int))
        pairs += masks[code >> SHIFT] if code & PARTIAL else 1
  return counts


@pytest.mark.parametrize("n, most_steps", [(1, 99), (64, 8), (100, 13)])
@pytest.mark.parametrize(
  "heads, group",
  [
    (FIXED, 1),
    (FIXED, 2),
    ((*TWO_SLOTS, Causal()), 3),
    (WITHOUT_KEYS, 1),
    (catalogue.ALL, 1),
  ],
)
@pytest.mark.one_in(2)
def test_steps_name_each_pair_once(heads, group, n, most_steps, monkeypatch):
  monkeypatch.setattr(Mosaic, "MOST_STEPS", most_steps)
  total = np.zeros((2, len(heads), n, n), int)
  for plan, of_plan in plans_of(heads, n, group):
    of_keys = key_heads(of_plan, group)
    own = np.arange(len(heads))[index_of(of_plan)]
    own_group = len(own) // (len(of_keys) if of_keys else len(own) // group)
    sides = plan.tables.by_query, plan.tables.by_key
    for k, grids in enumerate(sides):
      for steps in grids:
        assert len(steps.items) <= most_steps
      for (head, row, col), pairs in count_pairs(
        plan, grids, k == 0, own_group
      ).items():
        q = plan.queries.positions.reshape(-1, plan.tile)[row]
        key = plan.keys.positions.reshape(-1, plan.tile)[col]
        assert not pairs[q < 0].any() and not pairs[:, key < 0].any()
        total[k, own[head], q[q >= 0][:, None], key[key >= 0]] += pairs[q >= 0][
          :, key >= 0
        ]
  expected = [pattern.matrix(n) for pattern in heads]
  for found in total:
    np.testing.assert_array_equal(found, expected)


def test_parts_with_the_same_order_of_queries_have_one_plan():
  assert len(plans_of((Local(40), Local(9) | Causal()), 128)) == 1
  ((plan, _),) = plans_of(FIXED, 128)
  assert len(plan.keys.orders) == 3
  ((plan, heads), (second, _)) = plans_of((Block(32), Strided(8)), 128)
  assert (
    heads == (0,)
    and plan.queries.orders[0].is_natural
    and plan.keys.orders[0].is_natural
  )
  assert not second.queries.orders[0].is_natural


def test_blocks_are_restored():
  x = np.arange(2 * 8 * 3 * 5).reshape(2, 8, 3, 5)
  for array, width in ((x, 5), (x[..., 0], 0)):
    blocks = block_tables.to_blocks(array, 4, 3)
    assert blocks.shape == (2, 6, width or 1, 4)
    found = block_tables.from_blocks(blocks, 3, width > 0)
    np.testing.assert_array_equal(found, array)

  of_all_heads = block_tables.to_blocks(x[:, :, :1, 0], 4, 3)
  expected = np.repeat(x[:, :, :1, 0], 3, 2)
  found = block_tables.from_blocks(of_all_heads, 3, False)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
  "heads, n, tile",
  [
    ((Local(128) | Strided(128),) * 8, 12_288, 256),
    (tuple(Block(128) | Summary(128, 32, i) for i in range(4)), 12_288, 512),
    ((Causal(),), 100, 128),
  ],
)
def test_tile_suits_the_pattern(heads, n, tile):
  case = Case(1, n, len(heads), 64, 64, "bfloat16", "tpu")
  assert {plan.tile for plan, _ in Mosaic().plans(heads, case)} == {tile}
