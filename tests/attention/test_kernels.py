"""The fused kernels for GPUs and TPUs, in Pallas' interpreter.

It fills memory that a kernel has not written with NaN.
"""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import catalogue, executor_laws as laws
from helpers.executor_laws import TWO_SLOTS, WITHOUT_KEYS
from hypothesis import strategies as st

from sparse_transformer.attention import attend, platforms, registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors.mosaic import Mosaic
from sparse_transformer.attention.executors.triton import Triton
from sparse_transformer.patterns import Block, Causal, Local, Strided, Summary

MIXED = Local(12), Local(12) | Strided(12), WITHOUT_KEYS[1], Strided(5)
EXECUTORS = {
  "interpreted": Triton(interpret=True),
  "interpreted_mosaic": Mosaic(interpret=True),
}
GPU, TPU = EXECUTORS
SHARED_ORDER = *(Block(32) | Summary(32, 8, i) for i in (0, 1)), Local(17)
OTHER_VALUES = dict(others=("values of another dtype",))
# But for Triton, most cases are for soak.
soak = pytest.mark.soak
slow = functools.partial(pytest.param, marks=soak)
everywhere = pytest.mark.parametrize("backend", [GPU, slow(TPU)])


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
  for backend, executor in EXECUTORS.items():
    registry.register(backend, executor)
  yield
  for backend in EXECUTORS:
    registry.unregister(backend)


def agrees(
  backend,
  heads,
  n,
  k=16,
  e=32,
  tile=32,
  batch=2,
  dtype=jnp.float32,
  options=laws.PLAIN,
):
  sizes = n, len(heads), k, e, batch, dtype
  inputs = laws.random_inputs(*sizes, group=options.group)
  found = laws.run(*inputs, tuple(heads), backend, tile, options=options)
  tolerance = 2e-5 if dtype == jnp.float32 else 0.02
  laws.assert_close(found, laws.reference(*inputs, heads, options), tolerance)


# A pattern is tables to kernels, which other tests check for all patterns; the
# interpreter for TPUs is slow.
@pytest.mark.parametrize(
  "backend, k, e, patterns",
  [
    (GPU, 16, 32, catalogue.ALL),
    slow(TPU, 8, 12, catalogue.ALL),
  ],
)
def test_every_pattern_in_one_launch(backend, k, e, patterns):
  agrees(backend, (*patterns, *WITHOUT_KEYS), 70, k, e, batch=1)


@pytest.mark.parametrize(
  "backend, n, heads",
  [
    (GPU, 1, TWO_SLOTS),
    (TPU, 65, SHARED_ORDER),
    *(
      slow(backend, n, heads)
      for backend in (GPU, TPU)
      for n in (1, 31, 32, 33, 65)
      for heads in (SHARED_ORDER, TWO_SLOTS, WITHOUT_KEYS)
    ),
  ],
)
def test_lengths_around_tiles(backend, n, heads):
  agrees(backend, heads, n)


@everywhere
@pytest.mark.parametrize("k, e", [slow(64, 64), slow(32, 128), (128, 128)])
def test_tile_that_runs_on_the_device(backend, k, e):
  agrees(backend, TWO_SLOTS, 150 if backend == GPU else 300, k, e, tile=0)


@everywhere
@pytest.mark.parametrize("options", [slow(laws.OPTIONS[1]), *laws.OPTIONS[2:]])
def test_groups_segments_and_scores(backend, options):
  heads = *MIXED, *MIXED[:2]
  agrees(backend, heads, 70, options=options)


@everywhere
@pytest.mark.parametrize(
  "scale, softcap", [slow(-0.7, 0), (-0.7, 2), slow(0, 0)]
)
def test_scales_that_are_not_above_0(backend, scale, softcap):
  options = laws.Options(scale=scale, softcap=softcap)
  agrees(backend, MIXED, 70, batch=1, options=options)


@pytest.mark.parametrize(
  "backend, dtype",
  [(GPU, jnp.bfloat16), slow(GPU, jnp.float16), slow(TPU, jnp.bfloat16)],
)
def test_narrow_dtypes(backend, dtype):
  agrees(backend, TWO_SLOTS, 70, dtype=dtype)


@everywhere
def test_attention_can_be_mapped(backend):
  q, k, v, *_ = laws.random_inputs(40, 2, 16, 32, batch=4)
  pairs = (x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v))

  @jax.jit
  def attention(*arrays):
    return attend(*arrays, TWO_SLOTS, backend=backend, tile=32)

  np.testing.assert_array_equal(
    jax.vmap(attention)(*pairs).reshape(v.shape), attention(q, k, v)
  )


@pytest.mark.parametrize(
  "backend, heads, tile",
  [(GPU, (*TWO_SLOTS, Causal()), 32), (TPU, SHARED_ORDER[2:] * 2, 32)],
)
def test_tables_are_arguments_in_several_launches(
  backend, heads, tile, monkeypatch
):
  monkeypatch.setattr(Mosaic, "MOST_STEPS", 4)
  n = 96
  inputs = laws.random_inputs(n, len(heads), 16, 16, batch=1)
  ((plan, _),) = laws.plans_of(backend, heads, n, tile)
  lists = plan.tables.by_query  # slots, or grids
  assert len(getattr(lists, "written", lists)) > 1

  @jax.jit
  def planned(plan, *inputs):
    for table in jax.tree.leaves(plan):
      assert isinstance(table, jax.core.Tracer)
    return laws.run_plans(backend, [(plan, None)], *inputs)

  laws.assert_close(planned(plan, *inputs), laws.reference(*inputs, heads))


@pytest.mark.parametrize(
  "executor, change, words",
  [
    (Triton, dict(), None),
    (Triton, dict(capability=7.5), "capability 8.0 or later, got 7.5"),
    (Triton, dict(dtype="float16", value_width=128), None),
    (Triton, dict(dtype="float32"), None),
    (Triton, dict(dtype="float64"), "bfloat16, float16, float32, got float64"),
    (Triton, dict(dtype="float32", qk_width=128), "at most 64, got 128"),
    (Triton, dict(platform="cpu"), "it needs an NVIDIA GPU"),
    (Triton, dict(platform="tpu"), "it needs an NVIDIA GPU"),
    (Triton, dict(qk_width=8), r"among \(16, 32, 64, 128\), got \(8, 64\)"),
    (Mosaic, dict(), None),
    (Mosaic, dict(dtype="float32", qk_width=12, value_width=256), None),
    (Mosaic, OTHER_VALUES, "not have values of another dtype"),
    (Mosaic, dict(dtype="float16"), "bfloat16 or float32, got float16"),
    (Mosaic, dict(tile=48), "got tile=48; 0"),
    (Mosaic, dict(tile=1024, length=99), "got tile=1024; 0"),
    (Mosaic, dict(platform="cpu"), "it needs a TPU"),
    (Mosaic, dict(value_width=512), r"at most 256, got \(64, 512\)"),
  ],
)
def test_cases_that_cannot_run_are_named(executor, change, words):
  settings = dict(qk_width=64, value_width=64, dtype="bfloat16")
  platform = "tpu" if executor == Mosaic else "cuda"
  case = dict(batch=1, length=999, num_heads=4, platform=platform) | settings
  case |= change
  with platforms.targeting(case["platform"], case.pop("capability", 9.0)):
    reason = executor().unsupported(Case(**case))
  assert reason is None if words is None else re.search(words, reason)


@pytest.mark.soak
@everywhere
@pytest.mark.parametrize("part", range(3))  # a test may not map too much memory
@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(
  st.lists(st.sampled_from(catalogue.ALL), min_size=1, max_size=4),
  st.sampled_from([1, 7, 40, 64, 89, 120]),
  st.sampled_from([(16, 16), (16, 64), (64, 32)]),
  st.sampled_from([32, 64]),
)
def test_any_mix_of_heads(backend, part, heads, n, widths, tile):
  # In float32, Triton's kernels run tiles of 32 only.
  agrees(backend, heads, n, *widths, 32 if backend == GPU else tile)


@everywhere
def test_derivatives_are_right_or_raise(backend):
  pattern = Local(4) | Strided(4)
  assert laws.derivatives_are_right_or_raise(backend, pattern) >= 2
