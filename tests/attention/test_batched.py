"""Tables of the plain XLA executor: each list runs once, in bounded steps."""

import executor_laws as laws
import numpy as np
import pytest

from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors import batched
from sparse_transformer.patterns import (
  BigBird,
  Block,
  Causal,
  Local,
  Strided,
  Summary,
)

FIXED = tuple(Block(128) | Summary(128, 32, i % 4) for i in range(8))


@pytest.fixture
def few_scores(monkeypatch):
  """Steps so small that short sequences take several."""
  batched._plan.cache_clear()
  monkeypatch.setattr(batched, "SCORES", 8)
  yield
  batched._plan.cache_clear()


def tables(patterns, n, tile=0):
  case = Case(16, n, len(patterns), 64, 64, "bfloat16", tile=tile)
  ((plan, heads),) = batched.plans(tuple(patterns), case)
  assert heads is None
  return plan.tables


def pairs_of(sweep, mine, other, n):
  """How often each slot has each pair: int [slots, groups, n, n]."""
  bits = np.ascontiguousarray(sweep.masks).view(np.uint8)
  masks = np.unpackbits(bits, axis=-1, count=mine.shape[1], bitorder="little")
  num_slots, _, num_groups = sweep.rows.shape
  results = []  # group, positions and pairs of each lane, in order
  for loop in sweep.loops:
    tables = loop.groups, loop.tiles, loop.others, loop.masks
    lanes = (x.reshape(loop.tiles.size, *x.shape[2:]) for x in tables)
    for group, tile, others, numbers in zip(*lanes, strict=True):
      pairs = np.zeros((mine.shape[1], n + 1), int)
      for j, number in zip(others, numbers, strict=True):
        np.add.at(pairs.T, other[j], masks[number].T)
      assert not pairs[mine[tile] < 0].any() and not pairs[:, -1].any()
      rows = zip(mine[tile], pairs[:, :-1], strict=True)
      results += [(group, *row) for row in rows]
  counts = np.zeros((num_slots, num_groups, n, n), int)
  slots, positions, groups = np.nonzero(sweep.rows != batched.NOWHERE)
  rows = sweep.rows[slots, positions, groups]
  assert len(set(rows)) == len(rows)
  for row, *place in zip(rows, slots, positions, groups, strict=True):
    group, position, pairs = results[row]
    assert (position, group) == tuple(place[1:])
    counts[place[0], group, position] = pairs
  assert counts.sum() == sum(pairs.sum() for _, _, pairs in results)
  return counts.sum(0)


@pytest.mark.parametrize("n, tile", [(53, 16), (64, 32), (40, 9)])
def test_lists_name_each_pair_once(n, tile, few_scores):
  heads = Local(12) | Strided(12), Causal(), FIXED[1], Causal() - Causal()
  found = tables(heads, n, tile)
  groups = [heads[first] for first in found.heads[:, 0]]
  expected = np.stack([pattern.matrix(n) for pattern in groups])
  queries, keys = found.queries, found.keys
  of_queries = pairs_of(found.by_query, queries, keys, n)
  np.testing.assert_array_equal(of_queries, expected)
  of_keys = pairs_of(found.by_key, keys, queries, n)
  np.testing.assert_array_equal(of_keys, expected.swapaxes(1, 2))


@pytest.mark.parametrize(
  "patterns, n, num_steps",
  [
    (FIXED, 12_288, 10),
    ((Local(128) | Strided(128),) * 8, 12_288, 2),
    ((Local(96),) * 2, 3072, 1),
    ((Strided(96),) * 2, 3072, 1),
    ((BigBird(64),) * 8, 12_288, 10),
    ((Causal(),) * 8, 12_288, 40),
  ],
  ids=lambda x: str(x[0]) if isinstance(x, tuple) else "",
)
def test_steps_are_few_and_bounded(patterns, n, num_steps):
  found = tables(patterns, n)
  groups, tile = len(found.heads), found.queries.shape[1]
  for sweep in (found.by_query, found.by_key):
    steps, lanes = np.transpose([loop.tiles.shape for loop in sweep.loops])
    spans = np.array([loop.others.shape[-1] for loop in sweep.loops])
    assert steps.sum() <= num_steps and len(steps) <= 8
    assert (lanes * spans * tile <= batched.SCORES * groups * n / tile).all()
    # Padding: lists of a loop differ in length.
    real = sum((x.masks != len(sweep.masks) - 1).sum() for x in sweep.loops)
    assert real > 0.8 * (steps * lanes * spans).sum()


def test_heads_are_grouped_by_pattern():
  fixed = tables(FIXED, 256)
  np.testing.assert_array_equal(fixed.heads, [[0, 4], [1, 5], [2, 6], [3, 7]])
  np.testing.assert_array_equal(fixed.places[:, 6], [2, 1])
  mixed = tables((Causal(), Local(3), Causal()), 256)
  np.testing.assert_array_equal(mixed.heads, [[0], [2], [1]])


def test_loops_of_several_steps_agree_with_the_reference(few_scores):
  patterns = (Causal(), Local(12) | Strided(12)) * 2
  loops = tables(patterns, 101, 16).by_key.loops
  assert len(loops) > 1 and max(len(loop.tiles) for loop in loops) > 1
  laws.agrees_with_the_reference("batched", patterns, 101, 16)
