"""`attend`: its contract, its errors, and what it runs on each platform."""

import collections
import functools
import itertools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backend_laws as laws
from helpers.cases import listed
from helpers.errors import refused

from sparse_transformer.attention import (
  SAVED_NAMES,
  Unsupported,
  attend,
  attend_next,
  describe,
  init_cache,
  platforms,
  registry,
)
from sparse_transformer.attention.backends import xla
from sparse_transformer.patterns import (
  Block,
  Local,
  Strided,
  Summary,
)

TWO_PARTS = Local(8) | Strided(8)
arrays = lambda n: laws.random_inputs(n, 2, 4, 6)[:3]


@pytest.mark.parametrize("backend", ["streamed", "dense"])
@pytest.mark.parametrize(
  "dtype, other, tolerance",
  [
    ("float32", "float64", 2e-5),
    ("float64", "float32", 2e-5),
    ("float32", "bfloat16", 0.02),
    ("bfloat16", "float32", 0.02),
  ],
)
def test_values_may_be_wider_or_narrower_than_scores(
  dtype, other, tolerance, backend
):
  heads = (Local(40),)
  options = laws.Options(packed=True)
  with jax.enable_x64(True):
    q, k, v, dout, dlse = laws.random_inputs(40, 1, dtype=dtype)
    inputs = q, k, v.astype(other), dout.astype(other), dlse
    found = laws.run(*inputs, heads, backend, 4, options=options)

  assert found[0].dtype == other
  expected = laws.reference(*inputs, heads, options)
  laws.assert_close(found, expected, tolerance)


@pytest.mark.parametrize(
  "n, backend, message",
  [
    (2**31 + 1, "auto", "n=2147483649 .* 32 bits"),
    (2**17, "dense", "16 GiB"),
  ],
)
def test_what_is_too_long_is_rejected(n, backend, message):
  x = jax.ShapeDtypeStruct((1, n, 1, 4), jnp.float32)
  run = functools.partial(
    attend,
    patterns=Local(4),
    backend=backend,
  )
  with refused(message):
    jax.eval_shape(run, x, x, x)


@pytest.mark.parametrize(
  "given, expected",
  [
    ("Local(8) | Strided(8)", Local(8) | Strided(8)),
    (["Local(8)", Block(8)], (Local(8), Block(8))),
  ],
)
def test_patterns_can_be_text_and_lists_and_arrays_of_numpy(given, expected):
  x = arrays(40)
  found = attend(*map(np.asarray, x), given, tile=np.int32(8))
  np.testing.assert_array_equal(found, attend(*x, expected, tile=8))


@pytest.mark.parametrize("backend", ["dense", *laws.ANYWHERE])
def test_outputs_have_the_names_that_rematerialization_saves(backend):
  def loss(q, k, v, weights):
    out = attend(q, k, v, Local(3), backend=backend)
    return (out @ weights).sum()

  policy = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
  kept = jax.eval_shape(
    lambda *x: jax.vjp(jax.checkpoint(loss, policy=policy), *x)[1],
    *arrays(9),
    jnp.ones((6, 1)),
  )
  shapes = collections.Counter(x.shape for x in jax.tree.leaves(kept))

  assert shapes[2, 9, 2, 6] == 2  # values and outputs


# What runs where.


def products(lowered):
  """Counts the types of all matrix products in a lowered program."""
  found = re.findall(r"dot_general.*-> (tensor<\S+>)", lowered.as_text())
  return collections.Counter(found)


@pytest.mark.parametrize(
  "platform, name",
  [
    ("cpu", "streamed"),
    ("cuda", "batched"),
    ("rocm", "batched"),
  ],
)
def test_program_depends_on_the_platform_it_is_traced_for(platform, name):
  def lower(backend):
    def step(q, k, v):
      pattern = Block(32) | Summary(32, 8)
      attention = functools.partial(
        attend,
        patterns=pattern,
        backend=backend,
      )
      out, vjp = jax.vjp(attention, q, k, v)
      return vjp(out)

    x = jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.float32)
    with platforms.targeting(platform):
      traced = jax.jit(step).trace(x, x, x)
    return traced.lower(lowering_platforms=(platform,))

  found = products(lower("auto"))

  assert found == products(lower(name))
  other = {
    "streamed": "batched",
    "batched": "streamed",
  }[name]

  assert found != products(lower(other))


@pytest.mark.parametrize(
  "platform, name, tile",
  [
    ("cpu", "streamed", 64),
    ("tpu", "mosaic", 256),
    ("", "batched", 128),
  ],
)
def test_description_says_what_runs_with_which_tiles(platform, name, tile):
  def describe_tiles(backend, pattern, n, tile=0):
    request = laws.request_for(
      (pattern,) * 4,
      n,
      qk_width=64,
      value_width=64,
      platform=platform,
      tile=tile,
    )
    (description,) = describe(request, backend)

    assert description.heads == (0, 1, 2, 3)
    assert description.num_key_heads == 4
    return description.backends, description.tiles, description.computed

  local = Local(128)
  n = 12_288
  computed = len(local.layout(n, tile).rows) * tile**2

  assert describe_tiles("auto", local, n) == ((name,), (tile,), computed)
  assert describe_tiles(name, local, n, 512)[:2] == ((name,), (512,))

  huge = describe_tiles("streamed", Local(8), 9, 2**40)

  assert huge == (("streamed",), (9,), 9**2)
  for pattern in Local(8), TWO_PARTS:
    dense = describe_tiles("dense", pattern, 100)
    assert dense == (("dense",), (100,), 100**2)


CONTENT = "TopBlocks(2, 8) | LSH(8, 4)"


@pytest.mark.parametrize(
  "backend, pattern",
  listed(
    default=[
      ("batched", TWO_PARTS),
      ("streamed", CONTENT),
    ],
    every=itertools.product((*laws.ANYWHERE, "dense"), (TWO_PARTS, CONTENT)),
  ),
)
def test_number_of_sequences_can_be_symbolic(backend, pattern):
  def loss(q_BLHK, backend):
    return (attend(q_BLHK, q_BLHK, q_BLHK, pattern, backend=backend) ** 2).sum()

  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  (batch,) = jax.export.symbolic_shape("batch")
  shape = jax.ShapeDtypeStruct((batch, 64, 2, 16), jnp.float32)
  exported = jax.export.export(gradient)(shape, backend)
  q_BLHK = jax.random.normal(jax.random.key(0), (3, 64, 2, 16))

  np.testing.assert_allclose(
    exported.call(q_BLHK),
    gradient(q_BLHK, "dense"),
    rtol=1e-4,
    atol=1e-4,
  )

  with laws.settings_for("batched"):  # a TPU, whose kernels need a number
    jax.eval_shape(functools.partial(loss, backend="auto"), shape)


def test_eager_calls_compile_once(caplog):
  q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 16))

  def run(scale):
    def value(q):
      return (attend(scale * q, k, v, TWO_PARTS) ** 2).sum()

    return jax.value_and_grad(value)(q)

  run(1.0)
  with jax.log_compiles():
    run(2.0)

  assert not [x for x in caplog.records if "Compiling" in x.getMessage()]


@pytest.mark.parametrize("pattern", ["Local(3) | Strided(4)", "LSH(8, 4)"])
@pytest.mark.parametrize("backend", ["batched", "dense"])
def test_dtypes_are_promoted_explicitly(pattern, backend):
  x = jnp.ones((1, 16, 2, 8), jnp.bfloat16)
  cache = init_cache(
    pattern,
    length=16,
    batch=1,
    num_heads=2,
    qk_width=8,
    dtype=x.dtype,
  )

  def loss(x):
    return attend(x, x, x, pattern, backend=backend, softcap=2.0).sum()

  def step(cache, x):
    return attend_next(cache, x, x, x, 0, sinks_H=jnp.zeros(2))

  with jax.numpy_dtype_promotion("strict"):
    assert jax.eval_shape(jax.grad(loss), x).dtype == x.dtype
    assert jax.eval_shape(step, cache, x[:, 0])[0].dtype == x.dtype


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
def test_kernels_of_another_platform_are_rejected(backend, transform):
  x = jnp.ones((2, 1, 64, 2, 16))
  function = transform(
    lambda x: attend(x, x, x, Local(9), backend=backend).sum()
  )
  with pytest.raises(Unsupported, match=f"backend={backend}.* it needs a"):
    function(x if transform is jax.vmap else x[0])


def test_default_device_decides_what_runs(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  assert platforms.current_platform() == "tpu"
  for device in jax.devices("cpu")[0], "cpu":
    with jax.default_device(device):
      assert platforms.current_platform() == "cpu"
    with jax.default_device(device), platforms.targeting("cuda"):
      assert platforms.current_platform() == "cuda"


def test_backends_are_registered_once_and_for_known_platforms():
  with refused("'streamed' is already registered"):
    registry.register("streamed", xla.ON_CPUS)
  with refused("gpu.*known: cpu, cuda, rocm, tpu"):
    registry.register("new", xla.ON_CPUS, platforms=("gpu",))
  assert "new" not in registry.BACKENDS


def test_layers_with_equal_requests_are_lowered_once():
  pattern = Local(4) | Strided(4)
  x = jnp.ones((1, 16, 2, 8))

  def two_layers(x):
    y = attend(x, x, x, pattern)
    return attend(y, y, y, pattern)

  text = jax.jit(two_layers).lower(x).as_text()
  assert text.count("func private @_on_devices") == 1
  assert text.count("call @_on_devices") == 2
