"""The executor for GPUs: devices' shares, and what it supports."""

import dataclasses
import re

import executor_laws as laws
import jax
import numpy as np
import pytest

from sparse_transformer.attention import platforms, registry
from sparse_transformer.attention.contract import Case, Keys, Plan, Queries
from sparse_transformer.attention.executors.triton import Triton
from sparse_transformer.attention.sequence_parallel import slice_part
from sparse_transformer.patterns import Causal, Strided


@pytest.mark.parametrize("part", [Causal(), Strided(12)])
def test_devices_may_have_more_keys_than_queries(part):
  n, tile, executor = 104, 32, Triton(interpret=True)
  *arrays, dout, dlse = laws.random_inputs(n, 1, 16, 16, batch=1)
  expected = laws.reference(*arrays, dout, dlse, (part,))[0]
  shares = slice_part(part, n, tile, 2)
  case = Case(1, n, 1, 16, 16, "float32")
  works = executor.shares(part, shares.layouts, case)
  sides = shares.queries, shares.keys, shares.keys
  assert shares.queries.positions.shape[1] < shares.keys.positions.shape[1]
  for device, work in enumerate(works):
    q, k, v = (
      x[:, side.positions[device].clip(0)]
      for x, side in zip(arrays, sides, strict=True)
    )
    plan = Plan(part, tile, work)

    rows = Queries(q), Keys(k, v)

    def forward(lists, plan=plan, rows=rows):
      work = plan.tables._replace(by_query=lists)
      return executor.forward(dataclasses.replace(plan, tables=work), *rows)

    # Tables that all devices share are constants; others depend on the device.
    out, lse = jax.jit(forward)(work.by_query)
    at = shares.queries.positions[device]
    assert out.shape[1] == lse.shape[1] == len(at)
    np.testing.assert_allclose(
      out[:, at >= 0], expected[:, at[at >= 0]], atol=2e-5
    )


# What is supported.


def test_older_gpus_run_another_executor():
  case = Case(1, 99, 4, 64, 64, "bfloat16", "cuda")
  with platforms.targeting("cuda", 7.5):
    assert "capability 8.0 or later, got 7.5" in Triton().unsupported(case)
    assert registry.resolve("auto", case) == "batched"


@pytest.mark.parametrize(
  "capability, widths, tile",
  [
    (8.9, (128, 128), 32),
    (8.6, (128, 128), 32),
    (12.0, (128, 128), 32),
    (8.9, (64, 128), 64),
    (8.0, (128, 128), 64),
    (9.0, (128, 128), 64),
  ],
)
def test_tiles_fit_in_the_shared_memory_of_a_gpu(capability, widths, tile):
  case = Case(1, 999, 4, *widths, "bfloat16", "cuda")
  with platforms.targeting("cuda", capability):
    assert Triton().tile_size(Causal(), case) == tile
    ((plan, _),) = Triton().plans((Causal(),) * 4, case)
    assert plan.tile == tile
    words = Triton().unsupported(dataclasses.replace(case, tile=64))
  assert words is None if tile == 64 else "among (32,), got tile=64" in words


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
