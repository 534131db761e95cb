"""The recipe for NSA on a page, against a loop over its definitions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from helpers import runs

from sparse_transformer import patterns
from sparse_transformer.attention import attend

SIZES = dict(size=4, num=2, window=6)
LENGTH = 32
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def recipe():
  """The function on the page."""
  page = (runs.REPO / "docs" / "attend.md").read_text()
  blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
  (block,) = (x for x in blocks if x.startswith("def native_sparse"))
  code, _ = block.split("\n\n\n")
  names = dict(jax=jax, jnp=jnp, attend=attend, patterns=patterns)
  exec(code, names)
  return names["native_sparse_attention"]


def softmax_of(scores, v):
  """The mean of values by the exponentials of scores; 0 of no values."""
  if not len(scores):
    return np.zeros(v.shape[-1])
  weights = np.exp(scores - scores.max())
  return weights @ v / weights.sum()


def chosen_blocks(q_RK, mean_DK, t, size, num):
  """The blocks of the query heads of a key head, from their definition."""
  own = t // size
  if not own:
    return []

  total = np.zeros(own)
  for q_K in q_RK:
    exponentials = np.exp(mean_DK[:own] @ q_K / np.sqrt(WIDTH))
    total += exponentials / exponentials.sum()
  total[[0, own - 1]] = np.inf
  return np.argsort(-total, kind="stable")[:num]


def plain(q, k, v, gates, size, num, window):
  """NSA of one sequence [n, H, K], position by position, in float64."""
  out = np.zeros_like(q)
  num_blocks = len(q) // size
  group = HEADS // KEY_HEADS
  for g in range(KEY_HEADS):
    k_NK = k[:, g]
    v_NK = v[:, g]
    mean_k = k_NK.reshape(num_blocks, size, WIDTH).mean(1)
    mean_v = v_NK.reshape(num_blocks, size, WIDTH).mean(1)
    heads = range(g * group, (g + 1) * group)
    for t in range(len(q)):
      complete = (t + 1) // size
      blocks = chosen_blocks(q[t, heads], mean_k, t, size, num)
      own = np.arange(t // size * size, t + 1)
      at = [np.arange(size) + size * block for block in blocks] + [own]
      at = np.concatenate(at)
      near = np.arange(max(0, t - window + 1), t + 1)
      for h in heads:
        q_K = q[t, h] / np.sqrt(WIDTH)
        parts = (
          softmax_of(mean_k[:complete] @ q_K, mean_v[:complete]),
          softmax_of(k_NK[at] @ q_K, v_NK[at]),
          softmax_of(k_NK[near] @ q_K, v_NK[near]),
        )
        out[t, h] = sum(x * y for x, y in zip(gates[t, h], parts, strict=True))
  return out


def inputs():
  rng = np.random.default_rng(0)
  sizes = HEADS, KEY_HEADS, KEY_HEADS
  arrays = [rng.standard_normal((LENGTH, h, WIDTH)) for h in sizes]
  return *arrays, rng.random((LENGTH, HEADS, 3))


def test_recipe_is_native_sparse_attention():
  arrays = inputs()
  expected = plain(*arrays, **SIZES)
  batched = [jnp.asarray(x, jnp.float32)[None] for x in arrays]
  out = recipe()(*batched, **SIZES)
  np.testing.assert_allclose(out[0], expected, atol=2e-6)


def test_recipe_has_no_gradients_of_later_keys():
  q, k, v, gates = (jnp.asarray(x, jnp.float32)[None] for x in inputs())
  native_sparse_attention = recipe()
  seen = 13

  def early(k, v):
    out = native_sparse_attention(q, k, v, gates, **SIZES)
    return (out[:, : seen + 1] ** 2).sum()

  for gradient in jax.grad(early, (0, 1))(k, v):
    assert np.any(gradient[:, : seen + 1])
    assert not np.any(gradient[:, seen + 1 :])
