"""The checks of `make accelerator` find wrong kernels, in Pallas' interpreter.

Each mutation changes one thing in the kernels' source, or in the tables that
they work on. `correctness.examine` must then report something, and must report
nothing without the mutation.
"""

import dataclasses
import functools
import itertools
import re

import executor_laws as laws
import jax
import numpy as np
import pytest

from benchmarks.accelerator import correctness
from sparse_transformer.attention import registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors import triton_kernels
from sparse_transformer.attention.executors.triton import Triton

pytestmark = pytest.mark.soak

# Mixes of random mutations.
TITLES = *(f"catalogue {i}" for i in (1, 2, 3, 4, 6)), "full tiles"
NUM_RANDOM = 20  # for each mix and dtype: 240
UNWRITTEN = -100  # stands for memory that no item writes
# What is wrong, and a text of triton_kernels.py with its change, marked as by
# `git diff --word-diff`.
TEXTS = r"""
pairs are transposed
  reshape(tile, [-count * 32) != 0-]{+count * 32).T.reshape(tile, -1) != 0+}
the last full tile is skipped
  (self.middle, self.[-last-]{+last - 1+}, False)
the first partial tile is skipped
  (self.[-first-]{+first + 1+}, self.middle, True)
rows of another head
  ref[self.batch, at, [-head-]{+0+}, :]
products accumulate in 16 bits
  preferred_element_type=[-jnp.float32-]{+a.dtype+}
no maximum is subtracted
  raise_max([-max_, s.max(1) * factor-]{+0 * max_, 0 * max_+})
a stale maximum
  return out, [-new-]{+max_+}, sum_
the output is not rescaled
  out [-* decay[:, None] -]+ item
the output is not divided
  out / total[-[:, None]-]{+[:, None] ** 0+}
rows without keys are divided by zero
  out / [-total-]{+jnp.where(lse == -jnp.inf, 0.0, total)+}[:, None]
lse without the sum
  item.store(lse_ref, [-lse-]{+max_ / LOG2_E+})
weights of the backward pass without pairs
  p = [-p if pairs is None else jnp.where(pairs, p, 0.0)-]{+p+}
dq without its scale
  item.earlier(0), [-dq * item.scale(q)-]{+dq+}
dk without its scale
  item.earlier(0), [-dk * item.scale(k)-]{+dk+}
dq without other slots
  dq_ref, [-sum(item.earlier(0), dq * item.scale(q)-]{+(dq * item.scale(q)+})
rows that other slots did not write
  mask = results[number], written[slot, self.head, self.at] [-!=-]{+>=+} 0
dq with the delta of the row before
  item.dot(dout, v, (1, 1)) - [-delta-]{+jnp.roll(delta, 1)+}
dk with the delta of the row before
  item.dot(v, dout, (1, 1)) - [-delta-]{+jnp.roll(delta, 1)+}
dv from the gradients of scores
  [-p-]{+(p * p)+}.astype(dout.dtype), dout, (1, 0)
one product in TensorFloat-32
  [-a-]{+lax.reduce_precision(a, 8, 10)+},
      [-b-]{+lax.reduce_precision(b, 8, 10)+},
"""
SOURCE = dict(re.findall(r"(?m)^(\S.*)\n  (\S.*(?:\n {6}.*)?)", TEXTS))
FLOAT32 = {"one product in TensorFloat-32"}
LONG = (
  *("the last full tile is skipped", "the first partial tile is skipped"),
  *("pairs are transposed", "a stale maximum", "dk without its scale"),
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
    return laws.mutant(triton_kernels, self.change)


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
  case = Case(3, mix.n, len(mix.heads), *mix.widths, dtype, "cuda")
  ((plan, _),) = Mutant().plans(mix.heads, case)
  return correctness.ask(mix, dtype), plan


def run_plan(plan, *inputs):
  """The results of kernels whose tables are arguments."""
  return laws.run_plans("mutant", [(plan, None)], *inputs)


# For changes of the tables: compiled once for each mix.
run_tables = jax.jit(run_plan)


def faults_of(questions, plan, run=run_tables):
  """What `correctness.examine` reports about a plan."""
  return correctness.examine(functools.partial(run, plan), questions)[1]


@pytest.mark.parametrize("dtype", correctness.TOLERANCES)
def test_nothing_is_found_without_a_mutation(dtype):
  for title in correctness.mixes(False, dtype):
    if not title.startswith("n ="):
      assert faults_of(*asked(title, dtype)) == [], title
  for mix in correctness.mixes(True, dtype).values():
    assert "failed" not in correctness.check("mutant", mix, dtype)


@pytest.mark.parametrize("name", SOURCE)
def test_change_of_the_source_is_found(name, monkeypatch):
  monkeypatch.setitem(registry.EXECUTORS, "mutant", Mutant(True, SOURCE[name]))
  dtype = "float32" if name in FLOAT32 else "bfloat16"
  title = "catalogue 6" if name in FEW_KEYS else "full tiles"
  assert faults_of(*asked(title, dtype), jax.jit(run_plan))


@pytest.mark.parametrize("name", LONG)
def test_change_of_the_source_is_found_at_long_n(name, monkeypatch):
  monkeypatch.setitem(registry.EXECUTORS, "mutant", Mutant(True, SOURCE[name]))
  monkeypatch.setattr(correctness, "MAX_REFERENCE", 100)
  *_, mix = correctness.mixes(True, "bfloat16").values()
  assert mix.is_long
  assert "failed" in correctness.check("mutant", mix, "bfloat16")


# Changes of the tables.


class Tables:
  """The tables of one side's lists, to be changed in place.

  Attributes:
    items, others, masks, written: see `items.Lists`; masks are unsigned.
    mine, other: the positions in the items of this side and in the tiles of the
      other.
  """

  def __init__(self, work, side):
    self._work, self._side = work, side
    lists = getattr(work, side)
    self.items, self.others, self.written = (
      x.copy() for x in (lists.items, lists.others, lists.written)
    )
    self.masks = lists.masks.view(np.uint32).copy()
    sides = work.queries.copy(), work.keys.copy()
    mine, self.other = sides if side == "by_query" else sides[::-1]
    self.mine = mine

  def work(self):
    """The work with these tables."""
    lists = getattr(self._work, self._side)._replace(
      items=self.items,
      others=self.others,
      masks=self.masks.view(np.int32),
      written=self.written,
    )
    sides = self.mine, self.other
    queries, keys = sides if self._side == "by_query" else sides[::-1]
    changes = {self._side: lists, "queries": queries, "keys": keys}
    return self._work._replace(**changes)

  def effect(self):
    """How often each pair is counted, int8 [heads, n, n], this side first.

    Two tables with the same effect give the same results: padding is read as
    the first position, and rows of padding are not written.
    """
    num_slots, n, num_heads = self.written.shape
    # The first items of the first slot run last; they have all of its rows.
    items = self.items[(self.items[:, 5] > 0).argsort(stable=True)]
    num_first = -(-n // self.mine.shape[1]) * num_heads
    counts = np.full((num_slots, num_heads, n, n), UNWRITTEN, np.int8)
    bits = np.unpackbits(self.masks.view(np.uint8), -1, bitorder="little")
    for i, (head, tile, first, middle, last, slot) in enumerate(items):
      slot = 0 if i < num_first else max(slot, 1)
      rows = np.zeros((n, len(self.mine[tile])), np.int8)  # one for each key
      for j in range(first, last):
        where, mask = self.others[j]
        pairs = bits[mask] if j < middle else np.ones_like(bits[0])
        np.add.at(rows, self.other[where].clip(0), pairs.T.astype(np.int8))
      is_real = self.mine[tile] >= 0
      counts[slot, head, self.mine[tile][is_real]] = rows.T[is_real]
    written = self.written[1:].swapaxes(1, 2)[..., None]
    counts[1:] = np.where(written, counts[1:], np.int8(0))
    return counts.sum(0, dtype=np.int8)


def changes(t, rng, item, i):
  """{name: (array, where, new values)} at an item [6] and its tile i."""
  mask, draw = t.masks[t.others[i, 1]], rng.integers
  row, column = draw(len(mask)), draw(t.other.shape[1])
  word, bit = divmod(int(column), 32)
  flipped = mask[row, word] ^ np.uint32((i < item[3]) << bit)
  mine = t.mine[item[1]]
  two = rng.choice(len(mine), 2, replace=False)
  all_but_last = item[3:5].clip(item[2], max(item[2], item[4] - 1))
  return {
    "bit of a mask": (mask, (row, word), flipped),
    "partial tiles as full": (item, 3, item[2]),
    "full tiles as partial": (item, 3, item[4]),
    "last tile skipped": (item, [3, 4], all_but_last),
    "first tile skipped": (item, [2, 3], item[2:4].clip(item[2] + 1)),
    "next tile added": (item, 4, min(item[4] + 1, len(t.others))),
    "list skipped": (item, [3, 4], item[2]),
    "another tile": (t.others, (i, 0), draw(len(t.other))),
    "another mask": (t.others, (i, 1), draw(len(t.masks))),
    "rows of another head": (item, 0, draw(t.written.shape[2])),
    "rows of another tile": (item, 1, draw(len(t.mine))),
    "another slot": (item, 5, draw(len(t.written))),
    "rows of a slot left out": (t.written, (item[5], mine, item[0]), False),
    "slot not merged": (t.written, item[5], False),
    "unwritten rows merged": (t.written, draw(len(t.written)), True),
    "positions exchanged": (mine, two, mine[two[::-1]]),
    "position repeated": (mine, two[0], mine[two[1]]),
  }


def changed(work, rng, first):
  """(name, side, the work with a random change that has an effect).

  Kinds of changes are tried in turn, from number `first` on.
  """
  for turn in itertools.count(first):
    side = rng.choice(["by_query", "by_key"])
    t = Tables(work, side)
    before = t.effect()
    filled = np.flatnonzero(t.items[:, 4] > t.items[:, 2])
    item = t.items[rng.choice(filled)]
    found = changes(t, rng, item, rng.integers(item[2], item[4]))
    name = [*found][turn % len(found)]
    array, where, values = found[name]
    array[where] = values
    if not np.array_equal(before, t.effect()):
      return name, side, t.work()


def test_random_changes_of_the_tables_are_found(capsys):
  missed, kinds = [], []
  for dtype in ("bfloat16", "float32"):
    for title in TITLES:
      questions, plan = asked(title, dtype)
      rng = np.random.default_rng(len(kinds))
      for _ in range(NUM_RANDOM):
        name, side, work = changed(plan.tables, rng, len(kinds))
        kinds.append((title, dtype, name, side))
        mutant = dataclasses.replace(plan, tables=work)
        if not faults_of(questions, mutant):
          missed.append(kinds[-1])
  with capsys.disabled():
    print(f"{len(kinds) - len(missed)} of {len(kinds)} random changes found")
  assert len({name for *_, name, _ in kinds}) == 17
  assert not missed


@pytest.mark.parametrize("side, other", [("by_query", 1), ("by_key", -1)])
@pytest.mark.parametrize("step", [0, 1], ids=["too few", "too many"])
@pytest.mark.parametrize("dtype", correctness.TOLERANCES)
def test_pair_at_the_causal_edge_is_found(side, other, step, dtype):
  """The pair of a query and itself is missing, or that with the next key."""
  questions, plan = asked("full tiles", dtype)
  t = Tables(plan.tables, side)
  before = t.effect()
  items = t.items[(t.items[:, 0] == 0) & (t.items[:, 1] == 2)]
  (where,) = (i for i in range(items[0, 2], items[0, 3]) if t.others[i, 0] == 2)
  column = 20 + step * other
  t.masks[t.others[where, 1], 20, column // 32] ^= np.uint32(1 << column % 32)
  # One pair of the tiles that share this mask.
  assert np.abs(t.effect() - before).sum((1, 2))[0] <= -(-1000 // 32)
  plan = dataclasses.replace(plan, tables=t.work())
  assert faults_of(questions, plan)
