"""Attention with a bias by distance, against its formula in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backend_laws as laws, reference_attention, runs
from helpers.cases import listed
from helpers.errors import refused
from jax.sharding import AxisType

from sparse_transformer.attention import (
  attend,
  bias_at,
  describe,
  online_softmax,
)
from sparse_transformer.patterns import Causal, Full, Local, Strided

N = 75
HEADS = 6
MIXED = (Local(40), Strided(5), Local(7) | Strided(7)) * 2


def biases(n=N, heads=HEADS):
  """Random ones; of some heads, all but the nearest keys are masked."""
  distance = np.abs(np.arange(1 - n, n))
  bias = np.random.default_rng(0).normal(size=(heads, len(distance)))
  for head, reach in zip(range(heads), (n, 0, 3, 40), strict=False):
    bias[head, distance > reach] = -np.inf
  bias[-1, distance % 3 == 1] = -np.inf
  return bias


def reference(inputs, heads, bias, options):
  """(out, lse, dq, dk, dv, dsinks, dbias) in float64; dbias of distances."""
  batch, n = inputs[0].shape[:2]
  positions = np.arange(n)
  of_pairs = bias_at(bias, positions[:, None] - positions)
  masks = np.stack([pattern.matrix(n) for pattern in heads])
  weights = masks * np.exp(of_pairs)
  if options.packed:
    segments = options.segments(batch, n)[:, None]
    weights = weights * (segments[..., None] == segments[..., None, :])
  results = reference_attention.attention(
    *inputs,
    weights=weights,
    scale=options.scale,
    softcap=options.softcap,
    sinks=options.sinks(len(heads)),
  )

  gradients = (weights * results.dweights).sum(0)
  dbias = [
    [np.trace(of_head, -distance) for distance in range(1 - n, n)]
    for of_head in gradients
  ]
  return results[: 6 if options.has_sinks else 5], np.array(dbias)


@functools.partial(
  jax.jit, static_argnames=("heads", "backend", "tile", "options")
)
def run(bias, *inputs, heads, backend, tile=16, options=laws.PLAIN):
  """The results of `attend`, and the gradient of the bias at the end."""

  def attention(q, k, v, *more):
    *sinks, bias = more
    return attend(
      q,
      k,
      v,
      heads,
      backend=backend,
      tile=tile,
      return_lse=True,
      sinks_H=sinks[0] if sinks else None,
      bias_HD=bias,
      **options.settings(*q.shape[:2]),
    )

  sinks = [options.sinks(len(heads))] if options.has_sinks else []
  with laws.settings_for(backend):
    return laws.with_gradients(attention, *inputs, *sinks, bias)


@pytest.mark.parametrize(
  "options, backend",
  listed(
    default=[
      (laws.OPTIONS[1], "streamed"),
      (laws.OPTIONS[2], "dense"),
      (laws.OPTIONS[3], "batched"),
    ],
    every=itertools.product(laws.OPTIONS, ("dense", "streamed", "batched")),
  ),
)
def test_attention_and_gradients_are_those_of_the_formula(options, backend):
  bias = biases()
  inputs = laws.random_inputs(N, HEADS, group=options.group)
  *found, found_dbias = run(
    bias,
    *inputs,
    heads=MIXED,
    backend=backend,
    options=options,
  )
  expected, dbias = reference(inputs, MIXED, bias, options)

  laws.assert_close(found, expected)
  allowed = 2e-5 * np.abs(dbias).max()
  np.testing.assert_allclose(found_dbias, dbias, atol=allowed, rtol=0)


@pytest.mark.parametrize("backend", ["dense", "auto"])
def test_later_keys_and_more_distances_have_a_bias_in_float64(backend):
  heads = Full(), Local(9, causal=False)
  bias = biases(N + 3, 2)
  with jax.enable_x64(True):
    inputs = laws.random_inputs(N, 2, dtype=jnp.float64)
    *found, found_dbias = run(
      jnp.array(bias),
      *inputs,
      heads=heads,
      backend=backend,
    )
    expected, dbias = reference(inputs, heads, bias, laws.PLAIN)

  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-12)
  np.testing.assert_allclose(found_dbias[:, 3:-3], dbias, atol=1e-12)
  assert not found_dbias[:, :3].any()
  assert not found_dbias[:, -3:].any()


def test_heads_without_pairs_have_no_gradients():
  heads = Causal() - Causal(), Local(3)
  inputs = laws.random_inputs(9, 2)
  found = run(biases(9, 2), *inputs, heads=heads, backend="auto")

  assert not found[0][:, :, 0].any()
  assert not found[-1][0].any()
  assert found[-1][1].any()


def test_slices_are_rows_of_the_whole():
  q, k, v, dout, _ = laws.random_inputs(N, HEADS, group=2)
  of_heads = functools.partial(attend, patterns=MIXED, tile=16)

  def run(dout, first, q, *others):
    def of_queries(q, k, v, bias):
      return of_heads(q, k, v, first=first, bias_HD=bias)

    out, pullback = jax.vjp(of_queries, q, *others)
    return out, *pullback(dout)

  others = k, v, jnp.asarray(biases())
  part = jax.jit(run)
  for first in (0, 21, N - 30):
    rows = slice(first, first + 30)
    # Only the rows of the slice have gradients in the whole sequence.
    own = jnp.zeros_like(dout).at[:, rows].set(dout[:, rows])
    out, dq, *expected = run(own, None, q, *others)
    expected = [out[:, rows], dq[:, rows], *expected]

    found = part(dout[:, rows], first, q[:, rows], *others)
    for x, y in zip(found, expected, strict=True):
      np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("backend", ["auto", "batched"])
def test_one_program_processes_fewer_tiles_where_more_are_masked(
  backend, monkeypatch
):
  steps = []
  softmax_of_tile = online_softmax._softmax_of_tile

  def counted(*args):
    jax.debug.callback(lambda: steps.append(1))
    return softmax_of_tile(*args)

  monkeypatch.setattr(online_softmax, "_softmax_of_tile", counted)
  q, k, v, *_ = laws.random_inputs(128, 2, batch=1)

  @jax.jit
  def program(reaches):
    is_masked = np.abs(np.arange(-127, 128))[None] > reaches[:, None]
    bias = jnp.where(is_masked, -jnp.inf, 0)
    with laws.settings_for(backend):
      return attend(q, k, v, Causal(), bias_HD=bias, tile=16, backend=backend)

  def count(*reaches):
    steps.clear()
    jax.block_until_ready(program(jnp.array(reaches)))
    jax.effects_barrier()
    return len(steps)

  assert count(128, 128) == 8 + 8
  assert count(0, 128) == 1 + 8
  assert count(27, 1) == 3 + 2
  assert count(-1, -1) == 0
  assert program._cache_size() == 1


def test_scores_that_are_computed_are_known_before():
  request = laws.request_for((Causal(),) * 2, 128, tile=16, bias=True)
  (description,) = describe(request)

  assert description.tiles == (16,)
  assert description.computed == 8 * 8 * 16**2  # all 8 tiles in each of 8 steps


def test_program_is_lowered_for_accelerators():
  inputs = laws.random_inputs(N, HEADS)
  traced = run.trace(biases(), *inputs, heads=MIXED, backend="auto")
  for platform in ("cuda", "tpu"):
    assert traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
  "split, axis_type",
  listed(
    default=[("positions", "Explicit"), ("heads", "Auto")],
    every=itertools.product(("positions", "heads"), ("Explicit", "Auto")),
  ),
)
def test_gradients_are_the_same_on_a_mesh(split, axis_type):
  runs.on_devices(2, check_mesh, split, axis_type)


def check_mesh(split, axis_type):
  bias = jnp.array(biases(80, 4), jnp.float32)
  inputs = laws.random_inputs(80, 4)
  heads = (Local(30), Strided(5)) * 2
  expected = run(bias, *inputs, heads=heads, backend="auto")
  mesh = jax.make_mesh((2,), ("x",), (AxisType[axis_type],))
  by_axis = dict(positions=(None, "x"), heads=(None, None, "x"))
  spec = jax.P(*by_axis[split])

  def attention(q, k, v, bias):
    return attend(
      q,
      k,
      v,
      heads,
      bias_HD=bias,
      tile=16,
      spec=spec,
      return_lse=True,
    )

  with jax.set_mesh(mesh):
    on = jax.sharding.NamedSharding(mesh, spec)
    arrays = [jax.device_put(x, on) for x in inputs]
    compute = jax.jit(functools.partial(laws.with_gradients, attention))
    found = compute(*arrays, bias)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize(
  "pattern, bias, words",
  [
    (
      "Local(3)",
      np.zeros((2, 16)),
      r"\[2, 17\], one .* got float32 \[2, 16",
    ),
    ("Local(3)", np.zeros((2, 18)), "odd"),
    ("Local(3)", np.zeros((2, 17), int), "floating-point"),
    ("Local(3)", np.zeros(()), "floating-point"),
    ("LSH(4, 4)", np.zeros((2, 17)), "so attend cannot add a bias"),
  ],
)
def test_wrong_biases_are_rejected(pattern, bias, words):
  q, k, v, *_ = laws.random_inputs(9, 2)
  with refused(words):
    attend(q, k, v, pattern, bias_HD=bias)
