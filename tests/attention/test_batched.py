"""Tables of the plain XLA executor: lists run in few, bounded steps."""

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
  groups, tile = len(found.units), found.queries.shape[1]
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
  np.testing.assert_array_equal(fixed.units, [[0, 4], [1, 5], [2, 6], [3, 7]])
  np.testing.assert_array_equal(fixed.places[:, 6], [2, 1])
  mixed = tables((Causal(), Local(3), Causal()), 256)
  np.testing.assert_array_equal(mixed.units, [[0], [2], [1]])


@pytest.mark.parametrize("n, tile", [(53, 16), (64, 32), (40, 9), (101, 16)])
def test_loops_of_several_steps_agree_with_the_reference(n, tile, few_scores):
  patterns = Local(12) | Strided(12), Causal(), FIXED[1], Causal() - Causal()
  if n == 101:  # whose loops have several steps each
    patterns = patterns[:2] * 2
  steps = [len(loop.tiles) for loop in tables(patterns, n, tile).by_key.loops]
  assert len(steps) > 1 and (max(steps) > 1) == (n == 101)
  laws.agrees_with_the_reference("batched", patterns, n, tile)
