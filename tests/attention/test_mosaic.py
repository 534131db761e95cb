"""The executor for TPUs: its tables, and what it supports."""

import catalogue
import numpy as np
import pytest
from executor_laws import TWO_SLOTS, WITHOUT_KEYS

from sparse_transformer.attention import registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors import mosaic_tables
from sparse_transformer.attention.executors.mosaic import Mosaic
from sparse_transformer.attention.executors.mosaic_tables import (
  FULL,
  PARTIAL,
  SHIFT,
)
from sparse_transformer.patterns import Block, Causal, Local, Strided, Summary

FIXED = tuple(Block(32) | Summary(32, 8, shift) for shift in (0, 1, 0))


# Tables.


def places_of(side):
  """The head of each block, and its positions, -1 for padding."""
  heads, positions = [], []
  for group in side.groups:
    tiles = group.order.positions.reshape(-1, side.tile)
    heads += np.repeat(group.heads, len(tiles)).tolist()
    positions += [*tiles] * len(group.heads)
  return heads, positions


def pairs_of(tables, launch, by_query, n, num_heads):
  """How often each pair is processed: int [heads, n, n]."""
  bits = np.ascontiguousarray(tables.masks.swapaxes(1, 2)).view(np.uint8)
  masks = np.unpackbits(bits, axis=-1, bitorder="little")
  heads_of_queries, queries = places_of(tables.queries)
  heads_of_keys, keys = places_of(tables.keys)
  counts = np.zeros((num_heads, n + 1, n + 1), int)
  for steps in launch.steps:
    for mine, other, code in zip(
      steps.items, steps.others, steps.codes, strict=True
    ):
      assert steps.first <= mine < steps.first + steps.num_blocks
      if code & (PARTIAL | FULL):
        query, key = (mine, other) if by_query else (other, mine)
        assert heads_of_queries[query] == heads_of_keys[key]
        where = heads_of_keys[key], queries[query][:, None], keys[key]
        counts[where] += masks[code >> SHIFT] if code & PARTIAL else 1
  assert (counts[:, -1] == 0).all() and (counts[:, :, -1] == 0).all()  # padding
  return counts[:, :-1, :-1]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("n, most_steps", [(1, 99), (64, 5), (100, 9)])
@pytest.mark.parametrize(
  "heads", [FIXED, (*TWO_SLOTS, Causal()), WITHOUT_KEYS, catalogue.ALL]
)
def test_steps_name_each_pair_once(heads, n, most_steps, cores):
  limits = mosaic_tables.Limits(most_steps, cores)
  tables = mosaic_tables.make_tables(heads, n, 32, limits)
  expected = np.stack([pattern.matrix(n) for pattern in heads])
  for launch, by_query in ((tables.by_query, True), (tables.by_key, False)):
    for steps in launch.steps:
      per_core = steps.items.reshape(steps.cores, -1)
      most = np.unique(steps.items, return_counts=True)[1].max()
      # Cores have equally many steps, apart from those of an item.
      assert len(steps.items) <= most_steps + 2 * most * (steps.cores > 1)
      assert not steps.cores == 2 or not set(per_core[0]) & set(per_core[1])
    found = pairs_of(tables, launch, by_query, n, len(heads))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_two_cores_share_a_sequence_that_is_left_over(batch):
  heads = (Local(128) | Strided(128),) * 8
  case = Case(batch, 12_288, len(heads), 64, 64, "bfloat16", "tpu")
  ((plan, _),) = Mosaic().plans(heads, case)
  for launch in (plan.tables.by_query, plan.tables.by_key):
    (steps,) = launch.steps
    assert steps.cores == (1 if batch == 2 else 2)
    busy = (steps.codes & (PARTIAL | FULL) > 0).reshape(steps.cores, -1).sum(1)
    assert busy.max() < 1.01 * busy.sum() / steps.cores


def test_natural_order_is_not_gathered():
  for heads in ((Local(40),) * 2, (Block(32), Local(9))):
    limits = mosaic_tables.Limits(999)
    tables = mosaic_tables.make_tables(heads, 128, 32, limits)
    for side in (tables.queries, tables.keys):
      assert [group.order.is_natural for group in side.groups] == [True]


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
  assert Mosaic().plans(heads, case)[0][0].tile == tile


# What is supported.


@pytest.mark.parametrize("tile", [48, 1024])
def test_tile_that_cannot_run_is_named(tile):
  case = Case(1, 99, 1, 64, 64, "bfloat16", "tpu", tile)
  assert f"got tile={tile}; 0" in Mosaic().unsupported(case)
  assert registry.resolve("auto", case) == "batched"
