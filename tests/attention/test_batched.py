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


@pytest.fixture
def few_scores(monkeypatch):
  """Steps so small that short sequences take several."""
  batched._plan.cache_clear()
  monkeypatch.setattr(batched, "SCORES", 8)
  yield
  batched._plan.cache_clear()


def plans_of(heads, n, tile=0):
  case = Case(16, n, len(heads), 64, 64, "bfloat16", tile=tile)
  return batched.plans(heads, case)


@pytest.mark.parametrize(
  "heads, n, num_steps",
  [
    (tuple(Block(128) | Summary(128, 32, i % 4) for i in range(8)), 12_288, 33),
    ((Local(128) | Strided(128),) * 8, 12_288, 2),
    ((Strided(96),) * 2, 3072, 1),
    ((BigBird(64),) * 8, 12_288, 10),
    ((Causal(),) * 8, 12_288, 40),
  ],
  ids=lambda x: str(x[0]) if isinstance(x, tuple) else "",
)
def test_steps_are_few_and_bounded(heads, n, num_steps):
  for side in ("by_query", "by_key"):
    total = real = padded = 0
    for plan, of_plan in plans_of(heads, n):
      loops = getattr(plan.tables, side).loops
      steps, lanes, spans = np.transpose([x.others.shape for x in loops])
      total, tile = total + steps.sum(), plan.tile
      scores = batched.SCORES * len(heads) // len(of_plan or heads)
      assert len(steps) <= 8
      assert (lanes * spans * tile <= scores * n / tile).all()
      padded += (steps * lanes * spans).sum()
      real += sum((x.others >= 0).sum() for x in loops)
    assert total <= num_steps
    assert real > 0.75 * padded  # lists of a loop differ in length


@pytest.mark.parametrize(
  "pattern, n, tile, has_loop",
  [
    (Causal(), 53, 16, False),
    (Causal(), 40, 9, False),
    (Local(40), 161, 16, True),
  ],
)
def test_loops_of_several_steps_agree_with_the_reference(
  pattern, n, tile, has_loop, few_scores
):
  ((plan, _),) = plans_of((pattern,), n, tile)
  steps = [len(loop.mine) for loop in plan.tables.by_key.loops]
  assert len(steps) > 1 and (max(steps) > 1) == has_loop
  heads = Local(12) | Strided(12), pattern, Causal() - Causal(), Strided(5)
  laws.agrees_with_the_reference("batched", heads, n, tile)
