"""The executor for GPUs: devices' shares, and what it supports."""

import dataclasses
import re

import executor_laws as laws
import numpy as np
import pytest

from sparse_transformer.attention import registry
from sparse_transformer.attention.contract import Case, Plan
from sparse_transformer.attention.distributed import spread
from sparse_transformer.attention.executors import triton
from sparse_transformer.attention.executors.triton import Triton
from sparse_transformer.patterns import (
  Causal,
  Strided,
)


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
    plan = Plan(part, tile, work)
    out, lse = executor.forward(plan, q, k, v)
    at = shares.queries.positions[device]
    assert out.shape[1] == lse.shape[1] == len(at)
    np.testing.assert_allclose(
      out[:, at >= 0], expected[:, at[at >= 0]], atol=2e-5
    )


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
