"""The fused kernels for GPUs, in Pallas' interpreter.

It fills memory that a kernel has not written with NaN.
"""

import dataclasses
import itertools
import re

import catalogue
import executor_laws as laws
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from sparse_transformer import patterns
from sparse_transformer.attention import attend, registry, spread, triton
from sparse_transformer.attention.contract import Case, Plan
from sparse_transformer.attention.triton import Triton
from sparse_transformer.patterns import (
  Block,
  Causal,
  Local,
  RandomBlocks,
  Strided,
  Summary,
)

TWO_SLOTS = Local(12) | Strided(12), Strided(5)
MIXES = {
  "parts that share an order": (
    *(Block(32) | Summary(32, 8, shift) for shift in (0, 1)),
    Local(17),
  ),
  "parts in two slots": TWO_SLOTS,
  "rows and a head without keys": (
    RandomBlocks(4, 2) - Local(9),
    Causal() - Causal(),
  ),
}


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
  registry.register("interpreted", Triton(interpret=True))
  yield
  registry.unregister("interpreted")


def agrees(heads, n, k=16, e=32, tile=32, batch=2, dtype=jnp.float32):
  inputs = laws.random_inputs(n, len(heads), k, e, batch, dtype)
  found = laws.run(*inputs, tuple(heads), "interpreted", tile)
  tolerance = 2e-5 if dtype == jnp.float32 else 0.02
  laws.assert_close(found, laws.reference(*inputs, heads), tolerance)


@pytest.mark.parametrize("part", [Causal(), Strided(12)])
def test_devices_may_have_more_keys_than_queries(part):
  n, tile, executor = 104, 32, Triton(interpret=True)
  *arrays, dout, dlse = laws.random_inputs(n, 1, 16, 16, batch=1)
  expected = laws.reference(*arrays, dout, dlse, (part,))[0]
  shares = spread.share(part, n, tile, 2, "slices")
  works = executor.shares(part, shares.layouts, 1)
  sides = shares.queries, shares.keys, shares.keys
  assert shares.queries.positions.shape[1] < shares.keys.positions.shape[1]
  for device, work in enumerate(works):
    q, k, v = (
      x[:, side.positions[device].clip(0)]
      for x, side in zip(arrays, sides, strict=True)
    )
    plan = Plan(part, tile, None, None, work)  # the orders are not used
    out, lse = executor.forward(plan, q, k, v)
    at = shares.queries.positions[device]
    assert out.shape[1] == lse.shape[1] == len(at)
    np.testing.assert_allclose(
      out[:, at >= 0], expected[:, at[at >= 0]], atol=2e-5
    )


def test_every_pattern_in_one_launch():
  agrees(catalogue.ALL, 70, batch=1)


def test_every_factorization_and_mode():
  layers = [
    patterns.assign(
      name,
      mode,
      num_layers=2,
      num_heads=2,
      stride=12,
      window=12,
      width=3,
      num_summaries=2,
    )
    for name in patterns.FACTORIZATIONS
    for mode in patterns.MODES
  ]
  every = itertools.chain(*itertools.chain(*layers))
  agrees([*dict.fromkeys(every)], 61, batch=1)


@pytest.mark.parametrize(
  "n, mix", [(1, 1), (31, 2), (32, 1), (33, 2), (64, 0), (65, 0)]
)
def test_lengths_around_tiles(n, mix):
  agrees([*MIXES.values()][mix], n)


@pytest.mark.parametrize("k, e", [(64, 64), (32, 128)])
def test_tile_that_runs_on_gpus(k, e):
  agrees(TWO_SLOTS, 150, k, e, tile=0)


def test_split_lists(monkeypatch):
  monkeypatch.setattr(triton, "PIECE", 1)
  agrees((Causal(), Strided(5)), 140)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes(dtype):
  agrees(TWO_SLOTS, 70, dtype=dtype)


def test_results_do_not_depend_on_the_run():
  inputs = laws.random_inputs(70, 2, 16, 32)
  once, again = (
    laws.run(*inputs, TWO_SLOTS, "interpreted", 32) for _ in range(2)
  )
  for x, y in zip(once, again, strict=True):
    np.testing.assert_array_equal(x, y)


def test_attention_can_be_mapped():
  q, k, v, *_ = laws.random_inputs(40, 2, 16, 32, batch=4)
  pairs = (x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v))

  def attention(*arrays):
    return attend(*arrays, TWO_SLOTS, backend="interpreted", tile=32)

  np.testing.assert_array_equal(
    jax.vmap(attention)(*pairs).reshape(v.shape), attention(q, k, v)
  )


mixes = hypothesis.given(
  st.lists(st.sampled_from(catalogue.ALL), min_size=1, max_size=4),
  st.sampled_from([1, 7, 40, 64, 89, 120]),
  st.sampled_from([(16, 16), (16, 64), (64, 32)]),
  st.sampled_from([32, 64]),
)


@pytest.mark.soak
@hypothesis.settings(deadline=None, max_examples=60)
@mixes
def test_any_mix_of_heads(heads, n, widths, tile):
  agrees(heads, n, *widths, tile)


# What is supported.


@pytest.mark.parametrize(
  "change, words",
  [
    (dict(), None),
    (dict(dtype="float16", value_width=128), None),
    (dict(dtype="float32"), None),
    (
      dict(dtype="float64"),
      "dtypes are bfloat16, float16, float32, got float64",
    ),
    (dict(dtype="float32", qk_width=128), "at most 64, got 128"),
    (dict(platform="cpu"), "it needs an NVIDIA GPU"),
    (dict(platform="tpu"), "it needs an NVIDIA GPU"),
    (dict(qk_width=8), r"widths .* among \(16, 32, 64, 128\), got \(8, 64\)"),
  ],
)
def test_cases_that_cannot_run_are_named(change, words):
  settings = dict(qk_width=64, value_width=64, dtype="bfloat16")
  case = dict(batch=1, length=99, num_heads=4, platform="cuda") | settings
  reason = Triton().unsupported(Case(**case | change))
  assert reason is None if words is None else re.search(words, reason)


def test_older_gpus_run_another_executor(monkeypatch):
  monkeypatch.setattr(triton, "_compute_capability", lambda: 7.0)
  case = Case(1, 99, 4, 64, 64, "bfloat16", "cuda")
  assert "capability 8.0 or later, got 7.0" in Triton().unsupported(case)
  assert registry.resolve("auto", case) == "batched"


@pytest.mark.parametrize("tile, name", [(32, "triton"), (48, "batched")])
def test_auto_takes_the_kernel_for_its_own_tiles_only(tile, name):
  case = Case(1, 99, 4, 64, 64, "bfloat16", "cuda", tile)
  assert registry.resolve("auto", case) == name


def test_choice_is_explained():
  case = Case(1, 99, 4, 64, 64, "bfloat16", "cuda")
  assert registry.explain_choice("auto", case) == "triton"
  other = dataclasses.replace(case, qk_width=8)
  found = registry.explain_choice("auto", other)
  assert re.fullmatch(r"batched; not triton: widths of heads .*", found)
