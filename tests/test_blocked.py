import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from sparse_transformer import attention, blocked, patterns
from sparse_transformer.patterns import (
  Block,
  Causal,
  Local,
  Pattern,
  Strided,
  Summary,
)


class Fifths(Pattern):
  """A pattern of a user, with many rows that have no key."""

  def mask(self, q, k):
    return (k < q - 7) & (k % 5 == 3) & (q % 3 != 1)


PATTERNS = [
  Causal(),
  Local(1),
  Local(17),
  Strided(12),
  Block(20),
  Summary(20, 3),
  Summary(20, 3, 1),
  Local(12) | Strided(12),
  Block(20) | Summary(20, 4),
  Local(3) - Local(2),
  Fifths(),
]
SETTINGS = dict(stride=12, window=12, width=3, num_summaries=2)


def compute(q, k, v, cotangents, pattern, backend, tile):
  """(out, lse, dq, dk, dv); lse of rows without keys is put to 0."""

  def attend(q, k, v):
    out, lse = attention.attend(
      q, k, v, pattern, backend=backend, tile=tile, return_lse=True
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0)

  result, vjp = jax.vjp(attend, q, k, v)
  return *result, *vjp(cotangents)


run = jax.jit(compute, static_argnums=(4, 5, 6))


def arrays(n, heads, k=8, e=12, batch=2, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(n), 5)
  shapes = [(batch, n, heads, width) for width in (k, k, e, e)]
  shapes.append((batch, n, heads))
  q, k, v, *cotangents = (
    jax.random.normal(*x) for x in zip(keys, shapes, strict=True)
  )
  return *(x.astype(dtype) for x in (q, k, v, cotangents[0])), cotangents[1]


def check(n, pattern, tile, heads=2):
  q, k, v, dout, dlse = arrays(n, heads)
  inputs = q, k, v, (dout, dlse)
  # The reference runs without jit: compiled once a shape, not once a pattern.
  expected = compute(*inputs, pattern, "dense", 0)
  found = run(*inputs, pattern, "blocked", tile)
  for name, x, y in zip(
    "out lse dq dk dv".split(), found, expected, strict=True
  ):
    error = np.abs(x - y).max() / max(np.abs(y).max(), 1e-6)
    assert error < 2e-5, (name, error)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_blocked_is_dense_for_every_pattern(pattern):
  check(53, pattern, 16)


@pytest.mark.parametrize("pattern", [*PATTERNS[-4:-2], Fifths()], ids=str)
def test_blocked_is_dense_in_larger_tiles(pattern):
  check(96, pattern, 32)


@pytest.mark.parametrize(
  "n, tile", [(1, 16), (2, 0), (15, 16), (16, 16), (17, 16), (131, 0)]
)
def test_blocked_is_dense_for_any_length(n, tile):
  check(n, (Local(5) | Strided(5), Block(7) | Summary(7, 2)), tile)


@pytest.mark.parametrize("mode", patterns.MODES)
@pytest.mark.parametrize("name", patterns.FACTORIZATIONS)
def test_blocked_is_dense_for_every_factorization_and_mode(name, mode):
  layers = patterns.assign(name, mode, num_layers=2, num_heads=3, **SETTINGS)
  for heads in set(layers):
    check(61, heads, 16, heads=3)


@hypothesis.settings(deadline=None, max_examples=8)
@hypothesis.given(
  st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3),
  st.sampled_from([1, 7, 40, 89, 120]),
  st.sampled_from([0, 8, 16, 32]),
)
def test_blocked_is_dense_for_any_mix_of_heads(mix, n, tile):
  check(n, tuple(mix), tile, heads=len(mix))


def test_blocked_in_bfloat16_is_close_to_dense_in_float32():
  pattern = Local(12) | Strided(12)
  *low, dlse = arrays(96, 2, dtype=jnp.bfloat16)
  high = [x.astype(jnp.float32) for x in low]
  found = run(*low[:3], (low[3], dlse), pattern, "blocked", 16)
  expected = run(*high[:3], (high[3], dlse), pattern, "dense", 0)
  assert found[0].dtype == jnp.bfloat16 and found[1].dtype == jnp.float32
  for x, y in zip(found, expected, strict=True):
    # 8 bits of mantissa: weights, outputs and gradients each rounded once.
    error = np.abs(x.astype(jnp.float32) - y).max() / np.abs(y).max()
    assert error < 0.02


@pytest.mark.parametrize("backend", ["dense", "blocked"])
def test_row_without_keys_gives_zero(backend):
  q, k, v, dout, _ = arrays(40, 2)
  empty = ~Fifths().matrix(40).any(1)
  assert empty.any() and not empty.all()

  def attend(q, k, v):
    return attention.attend(
      q, k, v, Fifths(), backend=backend, tile=16, return_lse=True
    )

  (out, lse), vjp = jax.vjp(attend, q, k, v)
  assert (np.asarray(out)[:, empty] == 0).all()
  assert (np.asarray(lse)[:, empty] == -np.inf).all()
  assert np.isfinite(np.asarray(lse)[:, ~empty]).all()
  dq, dk, dv = vjp((dout, jnp.zeros_like(lse)))
  assert (np.asarray(dq)[:, empty] == 0).all()
  assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_merge_of_rows_without_keys_has_no_nan():
  nothing = jnp.zeros((1, 2, 1, 3)), jnp.full((1, 2, 1), -jnp.inf)
  something = jnp.ones((1, 2, 1, 3)), jnp.zeros((1, 2, 1))
  out, lse = blocked.merge(nothing, nothing)
  assert (out == 0).all() and (lse == -jnp.inf).all()
  for pair in ((nothing, something), (something, nothing)):
    out, lse = blocked.merge(*pair)
    assert (out == 1).all() and (lse == 0).all()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_gradient_is_exactly_zero_off_the_pattern(pattern):
  n = 35
  q, k, v, *_ = arrays(n, 1, k=2, e=2, batch=1)

  @jax.jit
  def jacobians(q, k, v):
    def attend(q, k, v):
      return attention.attend(q, k, v, pattern, backend="blocked", tile=16)

    return jax.jacrev(attend, argnums=(0, 1, 2))(q, k, v)

  # [out position, in position]: the largest of all widths.
  dq, dk, dv = (np.abs(x).max((0, 2, 3, 4, 6, 7)) for x in jacobians(q, k, v))
  matrix = pattern.matrix(n)
  assert (dv[~matrix] == 0).all() and (dk[~matrix] == 0).all()
  assert (dq[~np.eye(n, dtype=bool)] == 0).all()
  assert (dv[matrix] > 0).all()


@pytest.mark.parametrize(
  "pattern, limit",
  [
    (Local(128), 100),
    (Block(128), 100),
    (Strided(128), 150),
    (Summary(128, 32), 150),
    (Local(128) | Strided(128), 150),
    (Block(128) | Summary(128, 32), 150),
  ],
  ids=str,
)
def test_memory_of_forward_and_backward_is_linear(pattern, limit):
  def step(q, k, v, dout):
    attend = functools.partial(
      attention.attend, patterns=pattern, backend="blocked"
    )
    return jax.vjp(attend, q, k, v)[1](dout)

  x = jax.ShapeDtypeStruct((1, 12288, 4, 64), jnp.float32)
  compiled = jax.jit(step).lower(x, x, x, x).compile()
  assert compiled.memory_analysis().temp_size_in_bytes <= limit * 2**20
