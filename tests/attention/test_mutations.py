"""The checks of `make accelerator` find wrong kernels, in Pallas' interpreter.

Each mutation changes one thing in the kernels' source, or one pair in their
tables. `correctness.examine` must then report something, and must report
nothing without the mutation.
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from helpers import backend_laws as laws

from benchmarks.accelerator import correctness
from sparse_transformer.attention import registry, verification
from sparse_transformer.attention.backends import triton_kernels
from sparse_transformer.attention.backends.triton import Triton
from sparse_transformer.patterns import parse

pytestmark = pytest.mark.soak

# What is wrong, and a text of triton_kernels.py with its change, marked as by
# `git diff --word-diff`.
TEXTS = r"""
pairs are transposed
  unpack(self._tables.masks[number, :, :], 1){+.T+}
the last full tile is skipped
  lax.fori_loop(self._middle, self.[-_last-]{+_last - 1+}, full, carry)
the first partial tile is skipped
  lax.fori_loop(self.[-_first-]{+_first + 1+}, self._middle, partial, carry)
rows of another head
  ref[self.batch, self.positions, [-self.head-]{+0+}, :]
products accumulate in 16 bits
  preferred_element_type=[-jnp.float32-]{+a.dtype+}
no maximum is subtracted
  raise_max([-running_max, tile_max-]{+0 * running_max, 0 * tile_max+})
a stale maximum
  return accumulator, [-new_max-]{+running_max+}, normalizer
the output is not rescaled
  decayed = accumulator[- * decay[:, None]-]
the output is not divided
  out_ref, accumulator[- / total[:, None]-])
rows without keys are divided by zero
  / [-total-]{+jnp.where(lse == -jnp.inf, 0.0, total)+}[:, None]
lse without the sum
  lse_ref, [-lse-]{+running_max / LOG2_E+})
weights of the backward pass without pairs
  weights = program.exp2(scores, factor, lse[:, None]){+; pairs = None+}
dq without its scale
  dq = dq[- * program.scores.factor(width)-]
dk without its scale
  dk = dk[- * program.scores.factor(width)-]
gradients without other slots
  dq = [-sum(program.load_earlier(0), dq)-]{+dq+}
rows that other slots did not write
  is_written = written[slot, head, positions] [-!=-]{+>=+} 0
dq with the delta of the row before
  dweights = program.dot(dout, v.T) - [-delta-]{+jnp.roll(delta, 1)+}[:, None]
dk with the delta of the row before
  dweights = program.dot(v, dout.T) - [-delta-]{+jnp.roll(delta, 1)+}[None, :]
dv from the gradients of scores
  program.dot([-weights-]{+(weights * weights)+}.astype(dout.dtype), dout)
one product in TensorFloat-32
  HIGHEST if self._interpret else three{+; a = lax.reduce_precision(a, 8, 10)+}
"""
SOURCE = dict(re.findall(r"(?m)^(\S.*)\n  (\S.*)", TEXTS))
FLOAT32 = {"one product in TensorFloat-32"}
LONG = (
  "the last full tile is skipped",
  "the first partial tile is skipped",
  "pairs are transposed",
  "a stale maximum",
  "dk without its scale",
  "dk with the delta of the row before",
)
FEW_KEYS = {"rows without keys are divided by zero"}


@dataclasses.dataclass(frozen=True)
class Mutant(Triton):
  """Triton's kernels with a text of their source replaced.

  Attributes:
    change: the text, which must be there once, with what changes marked.
  """

  interpret: bool = True
  change: str = ""

  def kernels(self):
    if not self.change:
      return triton_kernels
    return laws.mutant(self.change, triton_kernels)


@pytest.fixture(autouse=True)
def _registered(optimized):
  del optimized
  registry.register("mutant", Mutant())
  yield
  registry.unregister("mutant")
  laws.run.clear_cache()


@functools.lru_cache(maxsize=4)
def asked(title, dtype):
  """The questions of a mix, and the plan that answers them."""
  mix = correctness.mixes(False, dtype)[title]
  k, e = mix.widths
  request = laws.request_for(
    mix.heads,
    mix.n,
    qk_width=k,
    value_width=e,
    dtype=dtype,
  )
  ((plan, _),) = Mutant().plans(request)
  return correctness.ask(mix, dtype), plan


def run_plan(plan, *inputs):
  """The results of kernels whose tables are arguments."""
  return laws.run_plans("mutant", [(plan, None)], *inputs)


# For changes of the tables: compiled once.
run_tables = jax.jit(run_plan)


def faults_of(questions, plan, run=run_tables):
  """What `correctness.examine` reports about a plan."""
  return correctness.examine(functools.partial(run, plan), *questions)[1]


@pytest.mark.parametrize("dtype", correctness.TOLERANCES)
def test_nothing_is_found_without_a_mutation(dtype):
  for title in correctness.mixes(False, dtype):
    if not title.startswith("n ="):
      assert faults_of(*asked(title, dtype)) == [], title
  for mix in correctness.mixes(True, dtype).values():
    assert "failed" not in correctness.check("mutant", mix, dtype)


@pytest.mark.parametrize("name", SOURCE)
def test_change_of_the_source_is_found(name, monkeypatch):
  monkeypatch.setitem(registry.BACKENDS, "mutant", Mutant(True, SOURCE[name]))
  dtype = "float32" if name in FLOAT32 else "bfloat16"
  title = "catalogue 6" if name in FEW_KEYS else "full tiles"
  run = jax.jit(lambda *inputs: run_plan(*inputs))  # JAX caches by function
  assert faults_of(*asked(title, dtype), run)


@pytest.mark.parametrize("name", LONG)
def test_change_of_the_source_is_found_at_long_n(name, monkeypatch):
  monkeypatch.setitem(registry.BACKENDS, "mutant", Mutant(True, SOURCE[name]))
  monkeypatch.setattr(correctness, "MAX_REFERENCE", 100)
  *_, mix = correctness.mixes(True, "bfloat16").values()
  assert mix.is_long
  assert "failed" in correctness.check("mutant", mix, "bfloat16")


@pytest.mark.parametrize(
  "side, other",
  [
    ("by_query", 1),
    ("by_key", -1),
  ],
)
@pytest.mark.parametrize("step", [0, 1], ids=["too few", "too many"])
@pytest.mark.parametrize("dtype", correctness.TOLERANCES)
def test_pair_at_the_causal_edge_is_found(side, other, step, dtype):
  """The pair of a query and itself is missing, or that with the next key."""
  questions, plan = asked("full tiles", dtype)
  lists = getattr(plan.tables, side)
  # Of head 0, the item of tile 2, and its partial tile on the diagonal.
  is_item = (lists.items[:, 0] == 0) & (lists.items[:, 1] == 2)
  _, _, first, middle, *_ = lists.items[is_item][0]
  (where,) = (i for i in range(first, middle) if lists.tiles[i, 0] == 2)
  changed = flip(
    lists,
    lists.tiles[where, 1],
    row=20,
    column=20 + step * other,
  )
  tables = plan.tables._replace(**{side: changed})

  assert faults_of(questions, dataclasses.replace(plan, tables=tables))


# What a run's check must refuse: random changes of the tables of its kernels.
CHECKED = (
  "Local(24) | Strided(24)",
  "Block(32) | Summary(32, 8)",
  "Causal()",
  "Strided(40)",
)
CHECKED_AT = 200
BATCHES = 6
OF_BATCH = 40


def flip(lists, mask, row, column):
  """Adds a pair to a mask, or removes it."""
  masks = lists.masks.view(np.uint32).copy()
  masks[mask, row, column // 32] ^= np.uint32(1 << column % 32)
  return lists._replace(masks=masks.view(np.int32))


def pair(lists, positions, rng):
  """One pair of a partial tile is added or removed."""
  partial = lists.items[lists.items[:, 3] > lists.items[:, 2]]
  _, tile, first, middle, *_ = partial[rng.integers(len(partial))]
  other, mask, *_ = lists.tiles[rng.integers(first, middle)]
  mine, others = positions
  row = rng.choice(np.flatnonzero(mine[tile] >= 0))
  column = rng.choice(np.flatnonzero(others[other] >= 0))
  return flip(lists, mask, row, column)


def bound(lists, positions, rng):
  """An item begins or ends a tile early or late, or masks one more or less."""
  del positions
  items = lists.items.copy()
  # columns
  first = 2
  middle = 3
  last = 4
  column, step = rng.choice([(first, 1), (middle, 1), (middle, -1), (last, -1)])
  changed = items[:, column] + step
  is_able = (
    (items[:, first] < items[:, last])
    & (items[:, first] <= changed)
    & (changed <= items[:, last])
  )
  item = items[rng.choice(np.flatnonzero(is_able))]
  item[column] += step
  item[middle] = np.clip(item[middle], item[first], item[last])
  return lists._replace(items=items)


def tile(lists, positions, rng):
  """A tile of the other side is another one, of other positions."""
  tiles = lists.tiles.copy()
  row = tiles[rng.integers(len(tiles) - 1)]
  able = (positions[1] != positions[1][row[0]]).any(1)
  row[0] = rng.choice(np.flatnonzero(able))
  return lists._replace(tiles=tiles)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_check_of_a_run_refuses_random_changes_of_tables(batch):
  heads = tuple(parse(text)[0][0] for text in CHECKED)
  request = laws.request_for(heads, CHECKED_AT, dtype="bfloat16")
  ((plan, _),) = Mutant().plans(request)
  inputs = verification.draw(request)
  expected = laws.reference(*inputs, heads)

  def wrong(x):
    return verification.compare(run_tables(x, *inputs), expected, "bfloat16")[1]

  assert not wrong(plan)
  accepted = []
  for seed in range(batch * OF_BATCH, (batch + 1) * OF_BATCH):
    rng = np.random.default_rng(seed)
    change = (pair, bound, tile)[seed % 3]
    side = ("by_query", "by_key")[seed // 3 % 2]
    positions = plan.tables.queries, plan.tables.keys
    positions = positions if side == "by_query" else positions[::-1]
    new = change(getattr(plan.tables, side), positions, rng)
    tables = plan.tables._replace(**{side: new})
    if not wrong(dataclasses.replace(plan, tables=tables)):
      accepted.append((seed, change.__name__, side))

  assert accepted == []
