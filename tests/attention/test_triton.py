"""The executor for GPUs: devices' shares, and what it supports."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import executor_laws as laws
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from sparse_transformer.attention import attend, platforms
from sparse_transformer.attention.contract import Case, Keys, Plan, Queries
from sparse_transformer.attention.executors.triton import Triton
from sparse_transformer.attention.sequence_parallel import slice_part
from sparse_transformer.patterns import Causal, Local, Strided


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


@pytest.mark.parametrize(
  "capability, widths, others, tile",
  [
    (8.0, (64, 64), (), 64),
    (8.0, (64, 64), ("segments",), 32),
    (8.6, (64, 128), (), 32),
    (8.9, (128, 128), (), 32),
    (9.0, (128, 128), ("segments",), 64),
    (10.0, (128, 128), (), 64),
    (12.0, (32, 32), (), 64),
    (12.0, (64, 64), (), 32),
    (13.0, (64, 64), (), 32),
  ],
)
def test_tiles_suit_the_shared_memory_and_registers(
  capability, widths, others, tile
):
  case = Case(1, 999, 4, *widths, "bfloat16", "cuda", others=others)
  with platforms.targeting("cuda", capability):
    assert Triton().tile_size(Causal(), case) == tile
    ((plan, _),) = Triton().plans((Causal(),) * 4, case)
    assert plan.tile == tile
    words = Triton().unsupported(dataclasses.replace(case, tile=64))
  assert words is None if tile == 64 else "among (32,), got tile=64" in words


def test_lowering_warns_of_one_deprecation_only():
  """Pallas-Triton itself, known since JAX 0.11: see docs/kernels.md."""
  gpu = AbstractDevice("NVIDIA H100", num_cores=132, platform="gpu")
  mesh = AbstractMesh((1,), ("x",), abstract_device=gpu)
  x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
  attention = functools.partial(attend, patterns=Local(9) | Strided(9))

  def step(q, k, v, dout):
    return jax.vjp(attention, q, k, v)[1](dout)

  with platforms.targeting("cuda", 9.0), use_abstract_mesh(mesh):
    traced = jax.jit(step).trace(x, x, x, x)
    with warnings.catch_warnings(record=True) as found:
      warnings.simplefilter("always")
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("__gpu$xla.gpu.triton") >= 3
  known = "The Pallas Triton backend is deprecated"
  assert [x for x in found if not str(x.message).startswith(known)] == []
