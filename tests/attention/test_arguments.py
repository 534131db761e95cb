"""What `attend` makes of segments, slices of the queries and missing axes."""

import functools

import catalogue
import executor_laws as laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_transformer.attention import attend
from sparse_transformer.patterns import (
  LSH,
  AdaptiveSpan,
  Block,
  Causal,
  Local,
  Routing,
  Strided,
  TopBlocks,
)

N, HEADS, GROUP = 60, 4, 2
SPAN, ROUTING = AdaptiveSpan(16, 8), Routing(3, 8)
CONTENT = LSH(8, 4, 2), TopBlocks(4, 3) | Local(4), ROUTING, SPAN
ENDS = 17, 38  # of the first documents
DOCUMENTS = np.digitize(np.arange(N), ENDS)


def inputs(seed=0):
  return laws.random_inputs(N, HEADS, group=GROUP, seed=seed)[:3]


def directions(pattern):
  known = {
    SPAN: jnp.array([3.0, 7.0, 0.0, 12.0]),
    ROUTING: jax.random.normal(jax.random.key(5), (HEADS, 3, 8)),
  }
  return {
    content: known[content]
    for content in pattern.contents()
    if content in known
  }


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(pattern, backend, q, k, v, segments=None, first=None):
  settings = dict(directions=directions(pattern), backend=backend, tile=8)
  settings |= dict(segments_BL=segments, first=first)
  return attend(q, k, v, pattern, **settings)


def value_and_gradients(function, *arrays):
  out, vjp = jax.vjp(function, *arrays)
  return out, *vjp(jnp.cos(jnp.arange(out.size).reshape(out.shape)))


@pytest.mark.parametrize("backend", laws.ANYWHERE)
def test_local_on_packed_documents_is_local_on_each(backend):
  q, k, v = inputs()
  segments = jnp.asarray(np.stack([DOCUMENTS] * 2))

  def packed(q, k, v):
    return run(Local(9), backend, q, k, v, segments)

  def one_by_one(q, k, v):
    parts = zip(*(jnp.split(x, ENDS, 1) for x in (q, k, v)), strict=True)
    return jnp.concatenate([attend(*x, Local(9)) for x in parts], 1)

  found = value_and_gradients(packed, q, k, v)
  expected = value_and_gradients(one_by_one, q, k, v)
  for x, y in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5)


# The last documents are one: equal segments need not be next to each other.
@pytest.mark.parametrize(
  "documents", [DOCUMENTS, DOCUMENTS % 2], ids=["", "two"]
)
@pytest.mark.parametrize("backend", ["auto", "dense"])
@pytest.mark.parametrize(
  "pattern", [*CONTENT, Local(9) | Strided(7), Causal()], ids=str
)
def test_a_document_does_not_see_the_others(pattern, backend, documents):
  segments = jnp.asarray(np.stack([documents, documents[::-1]]))
  arrays, others = inputs(), inputs(seed=1)
  is_kept = (segments == 1)[..., None, None]
  changed = [
    jnp.where(is_kept, x, y) for x, y in zip(arrays, others, strict=True)
  ]
  with laws.settings_for(backend):
    found = run(pattern, backend, *arrays, segments)
    other = run(pattern, backend, *changed, segments)
  differs = np.abs(found - other).max((2, 3)) > 0
  assert not differs[segments == 1].any() and differs.any()


@pytest.mark.parametrize("backend", ["auto", "dense"])
@pytest.mark.parametrize("count, first", [(1, 59), (23, 20), (60, 0)])
def test_a_slice_of_the_queries_gives_rows_of_the_whole(count, first, backend):
  patterns = [*catalogue.CAUSAL[::9], TopBlocks(4, 3) | Local(4), SPAN]
  q, k, v = inputs()
  segments = jnp.asarray(np.stack([DOCUMENTS] * 2))
  for pattern in patterns if count == 23 else patterns[-3:]:

    def sliced(q, k, v, first, pattern=pattern):
      q = jax.lax.dynamic_slice_in_dim(q, first, count, 1)
      return run(pattern, backend, q, k, v, segments, first)

    def rows(q, k, v, pattern=pattern):
      out = run(pattern, "dense", q, k, v, segments)
      return jax.lax.dynamic_slice_in_dim(out, first, count, 1)

    traced = functools.partial(sliced, first=jnp.int32(first))
    found = value_and_gradients(traced, q, k, v)
    expected = value_and_gradients(rows, q, k, v)
    for x, y in zip(found, expected, strict=True):
      np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("pattern", [Local(9) | Strided(7), *CONTENT[:2]])
def test_arrays_may_lack_the_axis_of_the_batch(pattern):
  q, k, v = inputs()
  expected = run(pattern, "auto", q, k, v, jnp.asarray([DOCUMENTS] * 2))
  single = functools.partial(attend, patterns=pattern, tile=8)
  found = jax.vmap(lambda *x: single(*x, segments_BL=DOCUMENTS))(q, k, v)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  out, lse = single(q[0], k[0], v[0], return_lse=True)
  assert out.shape == (N, HEADS, 12) and lse.shape == (N, HEADS)


def test_scale_may_not_be_exact_in_16_bits():
  q, k, v = (x.astype(jnp.bfloat16) for x in inputs())
  found = attend(q, k, v, Local(9), scale=0.3)
  wide = (x.astype(jnp.float32) for x in (q, k, v))
  expected = attend(*wide, Local(9), scale=0.3)
  np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.02)


@pytest.mark.parametrize(
  "change, words",
  [
    (
      dict(k=jnp.zeros((2, N, 3, 8)), v=jnp.zeros((2, N, 3, 8))),
      ["3 heads of k and v must divide the 4 heads of q"],
    ),
    (
      dict(segments_BL=jnp.zeros((2, N, 1), int)),
      ["integers [2, 60]", "int32"],
    ),
    (dict(segments_BL=jnp.zeros((2, N))), ["integers [2, 60]", "float32"]),
    (dict(segments_BL=jnp.zeros((N,), int)), ["integers [2, 60]"]),
    (dict(q=jnp.zeros((2, 5, 4, 8))), ["q has 5 positions and k 60", "first="]),
    (dict(q=jnp.zeros((2, 5, 4, 8)), first=56), ["first=56", "0 and 55"]),
    (dict(q=jnp.zeros((2, 5, 4, 8)), first=-1), ["first=-1", "0 and 55"]),
    (dict(q=jnp.zeros((2, 5, 4, 8)), first=1.5), ["first=1.5", "an integer"]),
    (
      dict(q=jnp.zeros((2, 5, 4, 8)), first=0, patterns=LSH(8, 4)),
      ["LSH(8, 4)", "queries of all positions", "attend_next"],
    ),
    (dict(sinks_H=jnp.zeros(3)), ["sinks must be [4]", "[3]"]),
    (dict(sinks_H=jnp.zeros(4, int)), ["floating point", "int32"]),
    (dict(softcap=-1.0), ["softcap=-1.0", "above 0"]),
    (dict(softcap=float("inf")), ["softcap=inf"]),
    (dict(scale="big"), ["scale='big'", "before tracing"]),
    (dict(scale=jnp.float32(1)), ["scale=", "multiply q"]),
    (dict(q=jnp.zeros((N, 4, 8))), ["all without batch"]),
  ],
)
def test_wrong_arguments_are_rejected(change, words):
  q, k, v = inputs()
  settings = dict(q=q, k=k, v=v, patterns=Block(8)) | change
  arrays = [settings.pop(name) for name in ("q", "k", "v", "patterns")]
  with pytest.raises(ValueError) as error:
    attend(*arrays, **settings)
  assert "\n" not in str(error.value)
  for word in words:
    assert word in str(error.value)
