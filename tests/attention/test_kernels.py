"""Kernels for GPUs and TPUs: what they run, with which tiles, on what rows.

That their results are right is in test_backends.py.
"""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backend_laws as laws, runs
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from sparse_transformer.attention import attend, platforms
from sparse_transformer.attention.backends.mosaic import Mosaic
from sparse_transformer.attention.backends.triton import Triton
from sparse_transformer.attention.contract import Keys, Plan, Queries
from sparse_transformer.attention.sequence_parallel import slice_part
from sparse_transformer.patterns import Block, Causal, Local, Strided, Summary

OTHER_VALUES = dict(value_dtype="float32")


@pytest.mark.parametrize(
  "backend, changes, words",
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
def test_cases_that_cannot_run_are_named(backend, changes, words):
  fields = dict(
    length=999,
    qk_width=64,
    value_width=64,
    dtype="bfloat16",
    platform="tpu" if backend == Mosaic else "cuda",
  )
  fields |= changes
  capability = fields.pop("capability", 9.0)
  with platforms.targeting(fields["platform"], capability):
    request = laws.request_for((Local(9),) * 4, **fields)
    reason = backend().unsupported(request)
  assert reason is None if words is None else re.search(words, reason)


# Tiles.


@pytest.mark.parametrize(
  "capability, widths, segments, tile",
  [
    (8.0, (64, 64), False, 64),
    (8.0, (64, 64), True, 32),
    (8.6, (64, 128), False, 32),
    (8.9, (128, 128), False, 32),
    (9.0, (128, 128), True, 64),
    (10.0, (128, 128), False, 64),
    (12.0, (32, 32), False, 64),
    (12.0, (64, 64), False, 32),
    (13.0, (64, 64), False, 32),
  ],
)
def test_tiles_of_gpus_suit_the_shared_memory_and_registers(
  capability, widths, segments, tile
):
  k, e = widths
  request = laws.request_for(
    (Causal(),) * 4,
    999,
    qk_width=k,
    value_width=e,
    dtype="bfloat16",
    platform="cuda",
    segments=segments,
  )
  with platforms.targeting("cuda", capability):
    assert Triton().tile_size(Causal(), request) == tile
    ((plan, _),) = Triton().plans(request)
    assert plan.tile == tile

    reason = Triton().unsupported(dataclasses.replace(request, tile=64))

  assert reason is None if tile == 64 else "among (32,), got tile=64" in reason


@pytest.mark.parametrize(
  "heads, n, tile",
  [
    ((Local(128) | Strided(128),) * 8, 12_288, 256),
    (tuple(Block(128) | Summary(128, 32, i) for i in range(4)), 12_288, 512),
    ((Causal(),), 100, 128),
  ],
)
def test_tiles_of_tpus_suit_the_pattern(heads, n, tile):
  plans = Mosaic().plans(laws.request_for(heads, n))
  assert {plan.tile for plan, _ in plans} == {tile}


# Programs.


@pytest.mark.parametrize("part", [Causal(), Strided(12)])
def test_devices_may_have_more_keys_than_queries(part):
  n = 104
  tile = 32
  backend = Triton(interpret=True)
  *arrays, dout, dlse = laws.random_inputs(
    n,
    1,
    k=16,
    e=16,
    batch=1,
  )
  expected, *_ = laws.reference(*arrays, dout, dlse, (part,))
  slices = slice_part(part, n, tile, 2)
  request = laws.request_for((part,), n)
  tables = backend.device_tables(part, slices.layouts, request)
  sides = slices.queries, slices.keys, slices.keys

  assert slices.queries.positions.shape[1] < slices.keys.positions.shape[1]

  for device, of_device in enumerate(tables):
    q, k, v = (
      x[:, side.positions[device].clip(0)]
      for x, side in zip(arrays, sides, strict=True)
    )
    rows = Queries(q), Keys(k, v)

    def forward(lists, of_device=of_device, rows=rows):
      # Tables that all devices share are constants; others are arguments.
      plan = Plan(part, tile, of_device._replace(by_query=lists))
      return backend.forward(plan, *rows)

    out, lse = jax.jit(forward)(of_device.by_query)
    positions = slices.queries.positions[device]
    assert out.shape[1] == lse.shape[1] == len(positions)
    is_real = positions >= 0
    np.testing.assert_allclose(
      out[:, is_real], expected[:, positions[is_real]], atol=2e-5
    )


def test_lowering_warns_of_one_deprecation_only():
  """Pallas-Triton itself, known since JAX 0.11: see docs/backends.md."""
  gpu = AbstractDevice(
    "NVIDIA H100",
    num_cores=132,
    platform="gpu",
  )
  mesh = AbstractMesh((1,), ("x",), abstract_device=gpu)
  x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
  attention = functools.partial(attend, patterns=Local(9) | Strided(9))

  def step(q, k, v, dout):
    return jax.vjp(attention, q, k, v)[1](dout)

  with platforms.targeting("cuda", 9.0), use_abstract_mesh(mesh):
    traced = jax.jit(step).trace(x, x, x, x)
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      text = traced.lower(lowering_platforms=("cuda",)).as_text()

  assert text.count("__gpu$xla.gpu.triton") >= 3
  known = "The Pallas Triton backend is deprecated"
  assert [x for x in caught if not str(x.message).startswith(known)] == []


# Runs attend as on a platform, in a JAX without the module that kernels need.
WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
import jax
import numpy as np
from helpers import backend_laws as laws
from sparse_transformer.attention import attend, platforms, registry
from sparse_transformer.patterns import Local

arrays = laws.random_inputs(96, 2, 16, 16)
expected = laws.reference(*arrays, (Local(9),) * 2)
request = laws.request_for((Local(9),), 96, platform=sys.argv[2])
with platforms.targeting(sys.argv[2]):
  laws.assert_close(laws.run(*arrays, (Local(9),) * 2, "auto", 32), expected)
  print(registry.explain_choice("auto", request))
"""


@pytest.mark.parametrize(
  "module, platform, backend",
  [
    ("jax.experimental.pallas", "cuda", "triton"),
    ("jax.experimental.pallas.triton", "cuda", "triton"),
    ("jax.experimental.pallas.tpu", "tpu", "mosaic"),
  ],
)
def test_attend_goes_on_without_modules_of_kernels(module, platform, backend):
  words = "-c", WITHOUT, module, platform
  done = runs.python(*words, PYTHONPATH="tests:.")
  why = rf"{backend}: jax \S+ does not have what it imports: .*{module}"
  assert re.search(rf"^batched; .*not {why}", done.stdout), done.stderr
