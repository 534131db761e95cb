import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_transformer import attention
from sparse_transformer.patterns import Causal, Local, Strided


def arrays(n, heads=2, k=4, e=6, batch=2, seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  shapes = [(batch, n, heads, width) for width in (k, k, e)]
  return [jax.random.normal(*x) for x in zip(keys, shapes, strict=True)]


def by_the_formula(q, k, v, patterns):
  """Softmax over the keys of each row, pair by pair, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out, lse = np.zeros(v.shape), np.full(v.shape[:3], -np.inf)
  for b, i, h in np.ndindex(lse.shape):
    keys = patterns[h].keys(i, q.shape[1])
    if len(keys):
      scores = k[b, keys, h] @ q[b, i, h] / math.sqrt(q.shape[-1])
      lse[b, i, h] = np.log(np.sum(np.exp(scores)))
      out[b, i, h] = np.exp(scores - lse[b, i, h]) @ v[b, keys, h]
  return out, lse


@pytest.mark.parametrize("backend", ["dense", "blocked"])
def test_attention_is_the_formula(backend):
  patterns = Local(3) | Strided(4), Causal() - Local(2)
  q, k, v = arrays(13)
  found = attention.attend(q, k, v, patterns, backend=backend, return_lse=True)
  for x, y in zip(found, by_the_formula(q, k, v, patterns), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_one_pattern_serves_all_heads():
  q, k, v = arrays(9)
  one = attention.attend(q, k, v, Local(3))
  two = attention.attend(q, k, v, (Local(3), Local(3)))
  np.testing.assert_array_equal(one, two)


def test_dense_has_no_gradient_off_the_pattern():
  n, pattern = 11, Local(2) | Strided(4)
  q, k, v = arrays(n, heads=1, batch=1)

  def total(q, k, v, i):
    return attention.attend(q, k, v, pattern, backend="dense")[0, i].sum()

  gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
  # [out position, in position]
  dq, dk, dv = (
    np.stack([np.asarray(x != 0).any((0, 2, 3)) for x in grads])
    for grads in zip(*(gradient(q, k, v, i) for i in range(n)), strict=True)
  )
  matrix = pattern.matrix(n)
  np.testing.assert_array_equal(dv, matrix)
  assert not (dk & ~matrix).any() and dk.any()
  assert not (dq & ~np.eye(n, dtype=bool)).any() and dq.any()


def test_lse_is_returned_on_request_and_in_float32():
  q, k, v = (x.astype(jnp.bfloat16) for x in arrays(9))
  for backend in ("dense", "blocked"):
    out, lse = attention.attend(
      q, k, v, Causal(), backend=backend, return_lse=True
    )
    assert out.shape == (2, 9, 2, 6) and out.dtype == jnp.bfloat16
    assert lse.shape == (2, 9, 2) and lse.dtype == jnp.float32


@pytest.mark.parametrize(
  "change, words",
  [
    (dict(backend="dens"), ["'dens'", "auto, dense, blocked"]),
    (dict(tile=-1), ["tile=-1", "0 to choose"]),
    (dict(patterns=(Causal(),) * 3), ["3 patterns for 2 heads"]),
    (dict(q=jnp.zeros((2, 9, 4))), ["[batch, n, heads, width]", "(2, 9, 4)"]),
    (dict(k=jnp.zeros((2, 8, 2, 4))), ["one shape", "(2, 8, 2, 4)"]),
    (dict(v=jnp.zeros((1, 9, 2, 4))), ["differ in width only"]),
  ],
)
def test_wrong_arguments_are_refused_with_their_values(change, words):
  q, k, v = arrays(9)
  settings = dict(q=q, k=k, v=v, patterns=Causal()) | change
  qkvp = [settings.pop(name) for name in ("q", "k", "v", "patterns")]
  with pytest.raises(ValueError) as error:
    attention.attend(*qkvp, **settings)
  for word in words:
    assert word in str(error.value)


def test_auto_takes_the_next_backend_where_one_cannot(monkeypatch):
  def cannot(*_):
    raise NotImplementedError("not on Sundays")

  monkeypatch.setitem(attention.BACKENDS, "blocked", cannot)
  q, k, v = arrays(9)
  expected = attention.attend(q, k, v, Causal(), backend="dense")
  found = attention.attend(q, k, v, Causal(), backend="auto")
  np.testing.assert_array_equal(found, expected)
  with pytest.raises(NotImplementedError, match="Sundays"):
    attention.attend(q, k, v, Causal(), backend="blocked")
  monkeypatch.setitem(attention.BACKENDS, "dense", cannot)
  with pytest.raises(NotImplementedError, match="Sundays"):
    attention.attend(q, k, v, Causal(), backend="auto")
