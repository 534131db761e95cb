"""What `attend` makes of segments, slices of the queries and missing axes."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import backend_laws as laws, catalogue
from helpers.cases import soak
from helpers.errors import refused

from sparse_transformer.attention import (
  as_attention_fn,
  attend,
  attend_next,
  fill_cache,
  init_cache,
  verify,
)
from sparse_transformer.patterns import (
  LSH,
  Block,
  Causal,
  Local,
  Routing,
  Strided,
  TopBlocks,
)

N = 60
HEADS = 4
GROUP = 2
ROUTING = Routing(3, 8)
CONTENT = LSH(8, 4, 2), TopBlocks(4, 3) | Local(4), ROUTING, Local(9)
ENDS = 17, 38  # of the first documents
DOCUMENTS = np.digitize(np.arange(N), ENDS)
SEGMENTS = np.stack([DOCUMENTS] * 2)
COTANGENT = np.cos(np.arange(2 * N * HEADS * 12, dtype=np.float32))
COTANGENT = COTANGENT.reshape(2, N, HEADS, 12)


def inputs(x=0):
  return laws.random_inputs(
    N,
    HEADS,
    group=GROUP,
    seed=x,
  )[:3]


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(heads, backend, q, k, v, segments=None, first=None):
  settings = dict(
    directions=laws.directions_of(heads),
    backend=backend,
    tile=8,
    segments_BL=segments,
    first=first,
  )
  return attend(q, k, v, heads, **settings)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(function, arrays, cotangent, *more):
  out, vjp = jax.vjp(lambda *x: function(*x, *more), *arrays)
  return out, *vjp(cotangent)


# With two documents, equal segments are not next to each other.
@pytest.mark.parametrize("backend", ["auto", soak("dense")])
@pytest.mark.parametrize("number", [3, soak(2)])
def test_a_document_does_not_see_the_content_of_others(backend, number):
  """Of static patterns, test_backends.py compares segments with masks."""
  documents = DOCUMENTS % number
  segments = jnp.asarray(np.stack([documents, documents[::-1]]))
  arrays = inputs()
  others = inputs(1)
  is_kept = (segments == 1)[..., None, None]
  changed = [
    jnp.where(is_kept, x, y) for x, y in zip(arrays, others, strict=True)
  ]
  with laws.settings_for(backend):
    found = run(CONTENT, backend, *arrays, segments)
    other = run(CONTENT, backend, *changed, segments)
  # Sums may round differently: what is sorted has other places in a tile.
  differs = np.abs(found - other).max(3) > 1e-6

  assert not differs[segments == 1].any()
  assert differs.any((0, 1)).all()


@pytest.mark.parametrize("backend", ["auto", soak("dense")])
@pytest.mark.parametrize(
  "heads, count, first",
  [
    ((*catalogue.CAUSAL[::9], Causal()), 23, 20),
    (catalogue.CAUSAL[18:19] * HEADS, 1, 59),
    (catalogue.CAUSAL[18:19] * HEADS, 60, 0),
    (catalogue.given(N)[:HEADS], 10, 20),
  ],
)
def test_a_slice_of_the_queries_gives_rows_of_the_whole(
  heads, count, first, backend
):
  def sliced(q, k, v, first):
    q = jax.lax.dynamic_slice_in_dim(q, first, count, 1)
    return run(heads, backend, q, k, v, SEGMENTS, first)

  arrays = inputs()
  rows = slice(first, first + count)
  padded = np.zeros_like(COTANGENT)
  padded[:, rows] = COTANGENT[:, rows]
  given = padded[:, rows], jnp.int32(first)
  found = value_and_gradients(sliced, arrays, *given)
  whole = functools.partial(run, heads, "dense", segments=SEGMENTS)
  out, *gradients = value_and_gradients(whole, arrays, padded)

  for x, y in zip(found, (out[:, rows], *gradients), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5)


def test_arrays_may_lack_the_axis_of_the_batch():
  q, k, v = inputs()
  heads = (Local(9) | Strided(7), CONTENT[1]) * 2

  @jax.jit
  @jax.vmap
  def one_by_one(q, k, v):
    return attend(q, k, v, heads, segments_BL=DOCUMENTS, tile=8)

  expected = run(heads, "dense", q, k, v, SEGMENTS)

  np.testing.assert_allclose(one_by_one(q, k, v), expected, atol=1e-5)

  out, lse = attend(q[0], k[0], v[0], Local(9), return_lse=True)
  assert out.shape == (N, HEADS, 12)
  assert lse.shape == (N, HEADS)
  of_flax = as_attention_fn(Local(9), segments_BL=DOCUMENTS)
  assert jax.eval_shape(of_flax, q[0], k[0], v[0]).shape == out.shape


def test_sinks_may_have_16_bits_and_the_scale_be_an_array():
  sinks = jnp.linspace(-1.0, 2.0, HEADS)
  expected = attend(
    *inputs(),
    Local(9),
    sinks_H=sinks,
    scale=0.5,
  )
  found = attend(
    *inputs(),
    Local(9),
    sinks_H=sinks.astype("bfloat16"),
    scale=jnp.float32(0.5),
  )

  np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.parametrize(
  "of", [float, np.float16, np.float64, jnp.bfloat16, jnp.float32, np.asarray]
)
def test_numbers_may_be_of_any_width(of):
  expected = attend(
    *inputs(),
    Local(9),
    scale=0.5,
    softcap=2.0,
  )
  found = attend(
    *inputs(),
    Local(9),
    scale=of(0.5),
    softcap=of(2.0),
  )

  np.testing.assert_array_equal(found, expected)


def test_numbers_may_be_integers():
  expected = attend(
    *inputs(),
    Local(9),
    scale=1.0,
    softcap=2.0,
  )
  found = attend(
    *inputs(),
    Local(9),
    scale=1,
    softcap=np.int64(2),
  )

  np.testing.assert_array_equal(found, expected)


# The largest and the smallest that are accepted, alone and together.
@pytest.mark.parametrize("backend", ["streamed", soak("dense")])
@pytest.mark.parametrize(
  "scale, softcap",
  [
    (None, 1e18),
    (None, 1e-18),
    (1e-18, 0.0),
    (1e18, 1e-18),
    soak(-1e-18, 0.0),
    soak(1e18, 0.0),
    soak(1e-18, 1e18),
  ],
)
def test_extreme_scores_are_as_in_float64(scale, softcap, backend):
  options = laws.Options(scale=scale, softcap=softcap)
  arrays = laws.random_inputs(20, 2)
  heads = (Causal(), Causal())
  found = laws.run(*arrays, heads, backend, 8, options=options)

  assert all(np.isfinite(x).all() for x in found)
  expected = laws.reference(*arrays, heads, options)
  np.testing.assert_allclose(found[0], expected[0], atol=2e-5)
  np.testing.assert_allclose(
    found[1],
    expected[1],
    rtol=1e-5,
    atol=1e-5,
  )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_segments_of_up_to_32_bits_are_compared_exactly(dtype, is_traced):
  documents = np.arange(N) // 17
  # The ends of their range, which are the same in fewer bits.
  limits = np.iinfo(dtype)
  values = np.array([limits.min, limits.max, 5, limits.max - 1], dtype)

  def run(documents):
    segments = documents[None].repeat(2, 0)
    return attend(*inputs(), Causal(), segments_BL=segments)

  if is_traced:
    run = jax.jit(run)

  np.testing.assert_array_equal(run(values[documents]), run(documents))


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_segments_of_64_bits_are_never_cut(dtype, is_traced):
  hashes = np.array([5, 2**32 + 5, 7, 2**40], dtype)[np.arange(N) // 17]
  small = np.arange(N, dtype=dtype) // 17
  run = jax.jit if is_traced else lambda f: f
  with jax.enable_x64(True):
    arrays = [x[0] for x in inputs()]

    def call(x):
      return attend(*arrays, Causal(), segments_BL=x)

    for given in (jnp.asarray(hashes), *([] if is_traced else [hashes])):
      with refused("must fit in 32 bits") as error:
        run(call)(given)
      assert f"got {dtype} [60]" in str(error.value)
    if is_traced:
      with refused("must have at most 32 bits"):
        run(call)(jnp.asarray(small))
      found = run(lambda x: call(x.astype(jnp.int32)))(jnp.asarray(small))
    else:
      found = call(jnp.asarray(small))
    np.testing.assert_allclose(found, call(small.astype("int32")), atol=1e-6)


@pytest.mark.parametrize(
  "given", [2.9, True, jnp.zeros(1, int), jnp.zeros((1, 1), int), 1j]
)
def test_a_traced_index_of_the_wrong_kind_is_refused_as_a_known_one(given):
  q, k, v = inputs()
  shape = dict(
    length=N,
    batch=2,
    num_heads=4,
    num_key_heads=2,
    qk_width=8,
  )
  cache = init_cache(
    Local(9),
    value_width=12,
    dtype=q.dtype,
    **shape,
  )
  rows = [x[:, 0] for x in (q, k, v)]

  for name, call in (
    ("first", lambda x: attend(q[:, :5], k, v, Local(9), first=x)),
    ("t", lambda x: attend_next(cache, *rows, x)[0]),
    ("layer", lambda x: attend_next(cache, *rows, 0, layer=x)[0]),
    ("layer", lambda x: fill_cache(cache, q, k, v, layer=x)),
  ):
    with refused(f"^{name}=.* must be an integer; for"):
      jax.jit(call)(given)


def test_sinks_of_minus_infinity_are_none():
  def results(q, k, v, sinks=None):
    pattern = Strided(5, offset=1)  # the first queries have no keys
    return attend(q, k, v, pattern, sinks_H=sinks, return_lse=True)

  arrays = inputs()
  none = jnp.full(HEADS, -jnp.inf)
  found, vjp = jax.vjp(jax.jit(results), *arrays, none)

  for x, y in zip(found, results(*arrays), strict=True):
    np.testing.assert_array_equal(x, y)
  assert np.isinf(found[1]).any()
  assert all(
    np.isfinite(x).all() for x in vjp(jax.tree.map(jnp.ones_like, found))
  )


MASKS = "1110 1111", "0000 1011", "0100 1011", "1111"


@pytest.mark.parametrize("text", MASKS)
def test_a_query_of_flax_sees_the_keys_that_the_mask_leaves(text):
  mask = np.array([[*map(int, row)] for row in text.split()])[:, None, None]
  x = jax.random.normal(jax.random.key(0), (2, 4, 2, 8))
  found = as_attention_fn("Causal()")(x[:, 3:], x, x, mask=jnp.asarray(mask))
  expected = nnx.dot_product_attention(x[:, 3:], x, x, mask=jnp.asarray(mask))
  has_keys = np.broadcast_to(mask.any(-1, keepdims=True), (2, 1, 1, 1))

  np.testing.assert_allclose(
    found,
    np.where(has_keys, expected, 0),
    rtol=1e-5,
    atol=1e-6,
  )


def test_only_the_batch_may_be_symbolic():
  shape = jax.export.symbolic_shape("b, n, 4, 8")
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  run = jax.jit(lambda x: attend(x, x, x, Local(9)))
  with refused(r"only the batch size may be symbolic, .*\[b"):
    jax.export.export(run)(x)


def test_an_attention_function_of_flax_and_verify_say_what_they_cannot_do():
  x = inputs()[0]
  local = as_attention_fn("Local(3)")

  for call, message in (
    (lambda: as_attention_fn("Locl(3)"), "did you mean Local"),
    (lambda: as_attention_fn(ROUTING)(x, x, x), "or to as_attention_fn"),
    (
      lambda: local(x[:, :3], x, x),
      "3 positions and k has 60; cross-attention",
    ),
    (lambda: local(x, x, x, mask=x[..., :1, 0]), "does not support a mask"),
    (lambda: verify("Local(3)", (8, 4, 8), key_heads=3), "the 3 heads of k"),
    (lambda: verify("Local(3)", (8, 4, 8), "int32"), "got q int32"),
  ):
    with refused(message):
      call()


@pytest.mark.parametrize(
  "change, words",
  [
    (
      {name: jnp.zeros((2, N, 3, 8)) for name in "kv"},
      ["3 heads of k and v must divide the 4 heads of q"],
    ),
    (
      dict(segments_BL=jnp.zeros((2, N, 1), int)),
      ["integer array of shape [2, 60]", "int32"],
    ),
    (
      dict(q=jnp.zeros((2, 5, 4, 8))),
      ["q has 5 positions and k has 60", "first="],
    ),
    (dict(q=jnp.zeros((2, 5, 4, 8)), first=56), ["first=56", "0 and 55"]),
    (dict(q=jnp.zeros((2, 5, 4, 8)), first=1.5), ["first=1.5", "an integer"]),
    (
      dict(q=jnp.zeros((2, 5, 4, 8)), first=0, patterns=LSH(8, 4)),
      ["LSH(8, 4)", "content of all positions", "attend_next"],
    ),
    (dict(q=jnp.zeros((2, 5, 4, 8)), first=jnp.arange(2)), ["use jax.vmap"]),
    (dict(segments_BL=np.full((2, N), 2**32)), ["must fit in 32 bits"]),
    (dict(sinks_H=jnp.zeros(3)), ["array of shape [4]", "[3]"]),
    (dict(softcap=-1.0), ["softcap=-1.0", "must not be negative"]),
    *(
      (
        {name: x},
        [f"{name}={x!r} "[:30], "absolute value from 1e-18 to 1e18"],
      )
      for name in ("scale", "softcap")
      for x in (
        1e38,
        1e300,
        2e18,
        9e-19,
        1e-42,
        1e-46,
        np.nan,
        np.inf,
        10**400,
        np.float64(1e39),
        1 + 1j,
      )
    ),
    (dict(scale=-1e19), ["scale=-1e+19"]),
    (dict(segments_BL=np.zeros((2, N))), ["got float64 [2, 60]"]),
    (dict(segments_BL=np.zeros((2, N), bool)), ["got bool [2, 60]"]),
    (dict(scale="big"), ["scale='big'", "before tracing"]),
    (dict(scale=jnp.ones(1), softcap=jnp.ones(2)), ["scale=", "multiply q"]),
    (dict(patterns=(Causal(),) * 3), ["3 patterns for 4 heads"]),
    (dict(patterns=(Causal(), None, 1, 2)), ["None is not a pattern"]),
    (dict(patterns="strided"), ["'strided'", "write Local(128) | Strided"]),
    (dict(patterns=("dense", "gemma3", "fixed", "fixed")), ["write Causal()"]),
    (dict(backend="dens"), ["'dens'", "auto, dense, batched"]),
    (dict(tile=-1), ["tile=-1", "0 to choose"]),
    (dict(spec=3), ["spec=3 must say which axes"]),
    (dict(k=jnp.zeros((2, N, 8))), ["[batch, n, heads, width]", "[2, 60, 8]"]),
    (dict(v=jnp.zeros((1, N, 2, 8))), ["only in width"]),
    (dict(v=jnp.zeros((2, N, 2, 0))), ["must not be empty", "[2, 60, 2, 0]"]),
    (dict(q=[1.0]), ["must be arrays, got q list"]),
    (dict(q=np.full((1, 8, 2, 4), None)), ["got q object"]),
    (dict(k=jnp.zeros((2, N, 2, 8), int)), ["the same dtype", "k int32"]),
    (dict(v=jnp.zeros((2, N, 2, 8), complex)), ["float32", "v complex64"]),
    (
      dict(directions={"Local(3)": 0}),
      ["'Local(3)', which no", "not its text"],
    ),
    (dict(patterns="Block(8), (Local(3), Local(4))"), ["3 patterns; pass a"]),
    (dict(q=jnp.zeros((N, 4, 8))), ["all without batch", "k float32 [2, 60"]),
    (
      {name: jnp.zeros((N, 4, 8)) for name in "qkv"} | dict(segments_BL=[1]),
      ["integer array of shape [60]", "[1]"],
    ),
  ],
)
def test_wrong_arguments_are_rejected(change, words):
  q, k, v = inputs()
  settings = (
    dict(
      q=q,
      k=k,
      v=v,
      patterns=Block(8),
    )
    | change
  )
  arrays = [settings.pop(name) for name in ("q", "k", "v", "patterns")]

  with pytest.raises(ValueError) as error:
    attend(*arrays, **settings)
  assert "\n" not in str(error.value)
  for word in words:
    assert word in str(error.value)
