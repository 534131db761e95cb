"""Attention with learned spans, against the published formula."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import executor_laws as laws, reference_attention
from helpers.cases import listed, soak
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from sparse_transformer import patterns
from sparse_transformer.attention import attend, online_softmax
from sparse_transformer.attention.contract import Keys, Scores

SPAN = patterns.AdaptiveSpan(60, 16)
ALONE = (SPAN,) * 3
MIXED = (
  patterns.Strided(5) | patterns.AdaptiveSpan(20, 1),
  patterns.Local(4),
  (SPAN - patterns.Local(2)) & patterns.Local(50),
)


def by_pattern(heads, x):
  return {c: x for p in heads for c in p.contents()}


def weights_of(pattern, span, n):
  """The weights [n, n] of pairs, those of static patterns 0 and 1."""
  match pattern:
    case patterns.Union(left, right):
      return jnp.maximum(*(weights_of(p, span, n) for p in (left, right)))
    case patterns.Intersection(left, right):
      return jnp.minimum(*(weights_of(p, span, n) for p in (left, right)))
    case patterns.Difference(left, right):
      return jnp.minimum(weights_of(left, span, n), 1.0 - right.matrix(n))
    case patterns.AdaptiveSpan(_, ramp):
      distance = np.arange(n)[:, None] - np.arange(n)
      m = (ramp + span - distance) / ramp
      m = jnp.where(m <= 0, 0, jnp.where(m >= 1, 1, m))
      return jnp.where(distance >= 0, m, 0)
  return jnp.asarray(1.0 * pattern.matrix(n))


def reference(inputs, heads, spans):
  """(out, lse, dq, dk, dv, dspans) of the published formula in float64."""
  n = inputs[0].shape[1]

  def weights(spans):
    pairs = zip(heads, spans, strict=True)
    return jnp.stack([weights_of(pattern, span, n) for pattern, span in pairs])

  with jax.enable_x64(True):
    weights_HLM, pullback = jax.vjp(weights, jnp.asarray(spans, jnp.float64))
    results = reference_attention.attention(
      *inputs, weights=np.asarray(weights_HLM)
    )
    (dspans,) = pullback(jnp.asarray(results.dweights.sum(0)))

  return *results[:5], np.asarray(dspans)


@functools.partial(jax.jit, static_argnames=("heads", "backend", "tile"))
def run(spans, *inputs, heads, backend="auto", tile=16):
  def attention(q, k, v, spans):
    settings = dict(
      backend=backend,
      tile=tile,
      return_lse=True,
    )
    given = by_pattern(heads, spans)
    return attend(q, k, v, heads, directions=given, **settings)

  with laws.settings_for(backend):
    return laws.with_gradients(attention, *inputs, spans)


def assert_close(found, expected, tolerance=2e-5):
  laws.assert_close(found[:5], expected[:5], tolerance)
  error = np.abs(np.asarray(found[5]) - expected[5]).max()
  assert error <= tolerance * max(np.abs(expected[5]).max(), 1), error


@pytest.mark.parametrize(
  "heads, n, backend",
  listed(
    default=[
      (ALONE, 77, "auto"),
      (MIXED, 50, "streamed"),
    ],
    every=itertools.product(
      (ALONE, MIXED), (77, 50), ("streamed", "batched", "dense")
    ),
  ),
)
def test_attention_is_that_of_the_formula(heads, n, backend):
  inputs = laws.random_inputs(n, 3)
  # Within bounds, at 0 and at the longest; where weights reach 0 and 1 at whole
  # distances, and where they do not.
  for spans in ([3.3, 17.8, 41.5], [0.0, 60.0, 7.0], [20.0, 0.4, 0.0]):
    expected = reference(inputs, heads, np.minimum(spans, 60))
    spans = jnp.array(spans, jnp.float32)
    found = run(
      spans,
      *inputs,
      heads=heads,
      backend=backend,
    )
    assert_close(found, expected)


@pytest.mark.parametrize("n", [1, soak(31)])
def test_tiles_are_chosen_and_one_span_serves_all_heads(n):
  inputs = laws.random_inputs(n, 2)
  found = run(
    jnp.array([9.6]),
    *inputs,
    heads=(SPAN,) * 2,
    tile=0,
  )
  expected = reference(inputs, (SPAN,) * 2, [9.6, 9.6])

  assert_close(found, (*expected[:5], expected[5].sum()))


@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_gradients_are_those_of_the_formula_in_float64(backend):
  with jax.enable_x64(True):
    inputs = laws.random_inputs(77, 3, dtype=jnp.float64)
    spans = jnp.array([0.25, 5.5, 19.1])
    found = run(
      spans,
      *inputs,
      heads=ALONE,
      backend=backend,
      tile=26,
    )
    for x, y in zip(found, reference(inputs, ALONE, spans), strict=True):
      assert x.dtype == jnp.float64
      np.testing.assert_allclose(x, y, atol=1e-12)


def test_forward_derivatives_of_a_weight_of_0_are_finite():
  x = jnp.ones((1, 1, 1, 3, 2))
  weights = jnp.array([[[[[1.0, 0.5, 0.0]]]]])

  def run(m):
    return online_softmax.softmax(x, Keys(x, x), (m > 0, m), Scores())

  _, (dout, dlse) = jax.jvp(run, (weights,), (jnp.ones_like(weights),))

  np.testing.assert_allclose(dlse, 2 / 1.5, rtol=1e-6)
  np.testing.assert_allclose(dout, 0, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "batched"])
def test_one_program_processes_fewer_tiles_as_spans_shrink(
  backend, monkeypatch
):
  steps = []
  softmax_of_tile = online_softmax._softmax_of_tile

  def counted(*args):
    jax.debug.callback(lambda: steps.append(1))
    return softmax_of_tile(*args)

  monkeypatch.setattr(online_softmax, "_softmax_of_tile", counted)
  q, k, v, *_ = laws.random_inputs(128, 2, batch=1)
  heads = (patterns.AdaptiveSpan(128, 8),) * 2

  @jax.jit
  def program(spans):
    given = by_pattern(heads, spans)
    with laws.settings_for(backend):
      return attend(q, k, v, heads, backend=backend, tile=16, directions=given)

  def count(*spans):
    steps.clear()
    jax.block_until_ready(program(jnp.array(spans)))
    jax.effects_barrier()
    return len(steps)

  # A tile of keys reaches 16 positions back, the ramp 7 further than the span.
  # One head has 8, 3 or 2 steps with a span of 128, 20 or 0.
  assert count(128.0, 128.0) == 8 + 8
  assert count(0.0, 128.0) == 2 + 8
  assert count(20.0, 0.0) == 3 + 2
  assert count(0.0, 0.0) == 2 + 2
  assert program._cache_size() == 1


def test_program_is_lowered_for_accelerators():
  inputs = laws.random_inputs(40, 3)
  traced = run.trace(jnp.zeros(3), *inputs, heads=MIXED)
  for platform in ("cuda", "tpu"):
    assert traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_spans_have_gradients_on_any_mesh(axis_type):
  def wrapped(attention):
    if axis_type == AxisType.Explicit:
      return attention
    spec = P("x", None, "y")
    return jax.shard_map(
      attention,
      in_specs=(spec, spec, spec, P("y")),
      out_specs=spec,
    )

  def attention(q, k, v, spans):
    given = {SPAN: spans}
    out = attend(q, k, v, patterns.Strided(5) | SPAN, directions=given, tile=16)
    return out, out[..., 0]

  mesh = AbstractMesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
  inputs = jax.eval_shape(lambda: laws.random_inputs(40, 4, batch=4))
  with jax.sharding.use_abstract_mesh(mesh):

    def on_devices(x, *spec):
      sharding = jax.sharding.NamedSharding(mesh, P(*spec))
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    arrays = [on_devices(x, "x", None, "y") for x in inputs]
    spans = on_devices(jax.ShapeDtypeStruct((4,), jnp.float32), "y")
    found = jax.eval_shape(
      functools.partial(laws.with_gradients, wrapped(attention)), *arrays, spans
    )

  assert found[5].shape == (4,)
