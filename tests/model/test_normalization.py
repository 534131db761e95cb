"""Tests of norms by kernels, in Pallas' interpreter, against plain code."""

import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import networks, runs
from helpers.cases import listed
from jax.sharding import AxisType

from sparse_transformer import model
from sparse_transformer.attention import platforms, registry
from sparse_transformer.model import (
  block,
  norm_kernels,
  normalization,
  sharding,
)
from sparse_transformer.model.dropout import WORD, draw, share
from sparse_transformer.model.normalization import add_and_normalize

EPSILON = 1e-5
# Rows that are and are not multiples of those of a program, and widths that are
# and are not powers of two.
SHAPE = 2, 2 * norm_kernels.NUM_ROWS, 32
ODD = 2, norm_kernels.NUM_ROWS + 7, 24
WIDE = 1, 3, 2 * norm_kernels.NUM_VALUES
NARROW = 3, 1, 1


def arrays(shape, dtype="float32", seed=0):
  """{x, y, scale, bias, da, dh}; those of the stream are not centered."""
  rng = np.random.default_rng(seed)
  width = shape[2:]
  return dict(
    x=jnp.asarray(rng.normal(0.5, 2, shape), dtype),
    y=jnp.asarray(rng.normal(0, 1, shape), dtype),
    scale=rng.normal(1, 1, width).astype(np.float32),
    bias=rng.normal(0, 1, width).astype(np.float32),
    da=rng.normal(0, 1, shape).astype(np.float32),
    dh=jnp.asarray(rng.normal(0, 1, shape), dtype),
  )


def layer_norm(scale, bias):
  norm = nnx.LayerNorm(len(scale), epsilon=EPSILON, rngs=nnx.Rngs(0))
  norm.scale[...] = scale
  norm.bias[...] = bias
  return norm


def by_kernels(words, rate, x, y, scale, bias):
  norm = layer_norm(scale, bias)
  return add_and_normalize(x, y, words, rate, norm, True, interpret=True)


def plainly(is_dropped, rate, x, y, scale, bias):
  """The plainest code, in the dtype of its arguments."""
  a = None
  if y is not None:
    a = jnp.where(is_dropped, 0, y / float(1 - share(rate)))
    x = x + a
  centered = x - x.mean(-1, keepdims=True)
  variance = (centered**2).mean(-1, keepdims=True)
  normalized = centered / jnp.sqrt(variance + EPSILON)
  return a, normalized * scale[None, None] + bias[None, None]


def with_gradients(function, has_branch, arrays):
  """{h, dx, dscale, dbias}, and with a branch {a, dy}."""
  names = "x", "y", "scale", "bias", "da", "dh"
  x, y, scale, bias, da, dh = (arrays[name] for name in names)
  if not has_branch:
    (_, h), pullback = jax.vjp(
      lambda x, *vectors: function(x, None, *vectors), x, scale, bias
    )
    return dict(
      zip(
        ("h", "dx", "dscale", "dbias"), (h, *pullback((None, dh))), strict=True
      )
    )

  (a, h), pullback = jax.vjp(function, x, y, scale, bias)
  names = "a", "h", "dx", "dy", "dscale", "dbias"
  return dict(zip(names, (a, h, *pullback((da, dh))), strict=True))


def mask_of(words, shape):
  """What words say of each value, bit by bit."""
  is_dropped = np.zeros(shape, bool)
  if words is not None:
    for t in range(shape[1]):
      word, bit = divmod(t, WORD)
      is_dropped[:, t] = np.asarray(words)[:, word] >> bit & 1
  return is_dropped


def check(shape, dtype, rate, has_branch=True, seed=0):
  """Compares kernels with plain code in float64."""
  given = arrays(shape, dtype, seed)
  words = draw(jax.random.key(seed), shape, rate) if rate else None
  run = functools.partial(by_kernels, words, rate)
  found = jax.jit(functools.partial(with_gradients, run, has_branch))(given)

  with jax.enable_x64(True):
    exact = {name: jnp.asarray(x, "float64") for name, x in given.items()}
    run = functools.partial(plainly, mask_of(words, shape), rate)
    expected = with_gradients(run, has_branch, exact)

  assert found.keys() == expected.keys()
  rounding = max(5e-6, float(jnp.finfo(dtype).eps))
  for name, x in found.items():
    of_stream = name in ("h", "dx", "dy")
    assert x.dtype == (dtype if of_stream else "float32"), name
    y = np.asarray(expected[name])
    # Of one position, or one feature, gradients may be 0 and nothing else.
    error = np.abs(np.float64(x) - y).max()
    assert error <= rounding * max(1, np.abs(y).max()), name


@pytest.mark.parametrize("has_branch", [True, False])
@pytest.mark.parametrize("dtype", normalization.DTYPES)
@pytest.mark.parametrize(
  "shape, rate",
  listed(
    [(SHAPE, 0.4), (ODD, 0.0)],
    [(x, rate) for x in (SHAPE, ODD, WIDE, NARROW) for rate in (0.0, 0.1, 0.4)],
  ),
)
def test_values_and_gradients_are_those_of_plain_code(
  shape, rate, dtype, has_branch
):
  check(shape, dtype, rate if has_branch else 0.0, has_branch)


@pytest.mark.parametrize("seed", [1, *listed([], [(x,) for x in range(2, 9)])])
def test_random_shapes(seed):
  rng = np.random.default_rng(seed)
  shape = tuple(int(rng.integers(1, most)) for most in (4, 200, 300))
  rate = float(rng.choice([0.0, 0.1, 0.25, 0.9]))
  dtype = str(rng.choice(normalization.DTYPES))
  check(shape, dtype, rate, seed=seed)


def test_row_of_equal_values_has_finite_gradients():
  given = arrays(ODD)
  given["x"] = jnp.full(ODD, 3.0)
  given["y"] = jnp.zeros(ODD)
  run = functools.partial(by_kernels, None, 0.0)
  found = with_gradients(run, True, given)

  np.testing.assert_allclose(found["h"], given["bias"] + np.zeros(ODD))
  assert np.isfinite(found["dx"]).all()


# Meshes and networks.


def test_rows_may_be_split_over_devices():
  runs.on_devices(8, check_meshes)


def check_meshes():
  check_mesh((2, 1, 4, 1), 4 * WORD)
  check_mesh((1, 2, 2, 2), 2 * WORD)
  check_mesh((2, 2, 1, 2), WORD + 3)
  check_mesh((1, 8, 1, 1), WORD)  # these devices do not divide the batch
  with mesh_of((2, 2, 1, 2)):
    check_network("none")


def mesh_of(sizes):
  types = (AxisType.Auto,) * len(sizes)
  return jax.set_mesh(jax.make_mesh(sizes, sharding.AXES, types))


def check_mesh(sizes, length):
  shape = 4, length, 16
  rate = 0.25
  given = arrays(shape)
  words = draw(jax.random.key(0), shape, rate)
  run = functools.partial(by_kernels, words, rate)

  expected = with_gradients(run, True, given)
  with mesh_of(sizes):
    found = jax.jit(functools.partial(with_gradients, run, True))(given)

  for name, x in expected.items():
    np.testing.assert_allclose(found[name], x, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("remat", ["none", "block_but_attention"])
def test_network_is_the_same_by_kernels(remat):
  check_network(remat)


def check_network(remat):
  """Compares a network with and without kernels, on the mesh in context."""
  config = networks.config(dropout=0.25, remat=remat)
  params = networks.random_params(config, 0.3)
  symbols = networks.tokens(config, batch=4)
  apply = model.make_apply(config)

  def loss(params):
    return (apply(params, symbols, jax.random.key(1)) ** 2).mean()

  expected = jax.jit(jax.value_and_grad(loss))(params)
  kernels = functools.partial(add_and_normalize, interpret=True)
  with (
    mock.patch.object(block, "add_and_normalize", kernels),
    mock.patch.object(normalization, "add_and_normalize", kernels),
    mock.patch.object(block, "unsupported", lambda x, remat: None),
  ):
    run = jax.jit(jax.value_and_grad(loss))  # not what is traced already
    check_kernels(run.trace(params).jaxpr.jaxpr)
    found = run(params)

  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6)


def check_kernels(program):
  """Each device must run them on its own rows: compilers cannot divide them."""
  kernels = names_of_kernels(program)
  assert {"norm_forward", "norm_backward"} <= {*kernels}

  divided = []
  for equation in networks.equations(program):
    if equation.primitive.name == "shard_map":
      divided += names_of_kernels(equation.params["jaxpr"])
  has_mesh = sharding.size(sharding.AXES) > 1
  assert divided == (kernels if has_mesh else [])


def names_of_kernels(program):
  return [
    equation.params["name"]
    for equation in networks.equations(program)
    if equation.primitive.name == "pallas_call"
  ]


# Where they run.


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(), None),
    (dict(platform="cpu"), "they need an NVIDIA GPU"),
    (dict(platform="tpu"), "they need an NVIDIA GPU"),
    (dict(capability=7.5), "capability 8.0 or later, got 7.5"),
    (dict(capability=0.0), None),
    (dict(dtype="float64"), "bfloat16, float16, float32, got float64"),
    (dict(width=8193), "support widths up to 8,192, got 8,193"),
    (dict(avoided="they are wrong"), "they are wrong"),
    (dict(remat="block"), "need more memory, and model.remat=block"),
  ],
)
def test_cases_that_cannot_run_are_named(changes, words):
  fields = dict(
    platform="cuda",
    capability=9.0,
    dtype="bfloat16",
    width=512,
    remat="none",
    avoided=None,
  )
  fields |= changes
  registry.avoid({})
  if fields["avoided"]:
    registry.avoid({normalization.NAME: fields["avoided"]})
  try:
    with (
      jax.enable_x64(True),
      platforms.targeting(fields["platform"], fields["capability"]),
    ):
      x = jax.ShapeDtypeStruct((2, 64, fields["width"]), fields["dtype"])
      reason = normalization.unsupported(x, fields["remat"])
      choice = normalization.explain_choice(x, fields["remat"])
  finally:
    registry.avoid({})
  if words is None:
    assert reason is None
    assert choice == "fused_norm"
  else:
    assert re.search(words, reason)
    assert choice == f"plain XLA; not fused_norm: {reason}"


@pytest.mark.parametrize(
  "length, devices, words",
  [
    (4 * WORD, 4, None),
    (4 * WORD + 4, 4, "a multiple of 32 positions"),
    (4 * WORD + 1, 4, None),  # which positions are not split over
    (WORD + 1, 1, None),
  ],
)
def test_words_are_not_split_over_devices(length, devices, words):
  types = (AxisType.Auto,) * 4
  mesh = jax.sharding.AbstractMesh((1, 1, devices, 1), sharding.AXES, types)
  with jax.sharding.use_abstract_mesh(mesh), platforms.targeting("cuda", 9.0):
    x = jax.ShapeDtypeStruct((2, length, 8), "float32")
    reason = normalization.unsupported(x, "none")
  assert reason is None if words is None else re.search(words, reason)


# Verification.


VERIFIED = (1, 70, 24), "bfloat16", 0.4


def test_right_kernels_have_no_faults():
  assert normalization.verify(*VERIFIED, interpret=True) == []


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("number", [2.0, np.nan])
def test_wrong_kernels_have_faults(name, number, monkeypatch):
  right = getattr(norm_kernels, name)

  def wrong(*args, **kwargs):
    results = right(*args, **kwargs)
    *others, last = jax.tree.leaves(results)
    last = last.at[0, 5, 0].set(10 * number)
    return jax.tree.unflatten(jax.tree.structure(results), [*others, last])

  monkeypatch.setattr(norm_kernels, name, wrong)
  (fault,) = normalization.verify(*VERIFIED, interpret=True)
  of = "h" if name == "forward" else "dy"
  assert re.match(rf"error of {of} (\d+|\d\.\d+|nan), above 0\.016", fault)


def test_kernels_that_do_not_compile_have_a_fault():
  (fault,) = normalization.verify(*VERIFIED)  # on a CPU
  assert "Only interpret mode is supported on CPU" in fault


@pytest.mark.parametrize("remat", ["none", "block"])
def test_networks_for_gpus_have_kernels_unless_memory_matters_most(remat):
  config = networks.config(dropout=0.25, remat=remat, dtype="bfloat16")
  apply = model.make_apply(config)
  symbols = networks.tokens(config)

  def loss(params):
    return apply(params, symbols, jax.random.key(1)).mean()

  params = model.param_shapes(config)
  with platforms.targeting("cuda", 9.0):
    program = str(jax.make_jaxpr(jax.grad(loss))(params))
  for name in ("norm_forward", "norm_backward"):
    assert (name in program) == (remat == "none")
