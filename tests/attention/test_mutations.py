"""The checks of `make accelerator` find wrong kernels, in Pallas' interpreter.

Each mutation changes one thing in the kernels' source, or one pair in their
tables. `correctness.examine` must then report something, and must report
nothing without the mutation.
"""

import dataclasses
import functools
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


# For changes of the tables: compiled once.
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


@pytest.mark.parametrize("side, other", [("by_query", 1), ("by_key", -1)])
@pytest.mark.parametrize("step", [0, 1], ids=["too few", "too many"])
@pytest.mark.parametrize("dtype", correctness.TOLERANCES)
def test_pair_at_the_causal_edge_is_found(side, other, step, dtype):
  """The pair of a query and itself is missing, or that with the next key."""
  questions, plan = asked("full tiles", dtype)
  lists = getattr(plan.tables, side)
  items = lists.items[(lists.items[:, 0] == 0) & (lists.items[:, 1] == 2)]
  here = range(items[0, 2], items[0, 3])
  (where,) = (i for i in here if lists.others[i, 0] == 2)
  column, masks = 20 + step * other, lists.masks.view(np.uint32).copy()
  masks[lists.others[where, 1], 20, column // 32] ^= np.uint32(1 << column % 32)
  lists = lists._replace(masks=masks.view(np.int32))
  tables = plan.tables._replace(**{side: lists})
  assert faults_of(questions, dataclasses.replace(plan, tables=tables))
