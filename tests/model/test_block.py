"""Tests of model/block.py."""

import math

import jax
import jax.numpy as jnp
import networks
import numpy as np
from flax import nnx
from networks import LENGTH

from sparse_transformer import attention
from sparse_transformer.model.block import ResidualBlock
from sparse_transformer.patterns import Local, Strided


def run(config, heads):
  """What a block adds, as a jitted function (params, x_BLD, rng=None)."""
  graph = nnx.graphdef(
    nnx.eval_shape(lambda: ResidualBlock(config, rngs=nnx.Rngs(0)))
  )
  attend = lambda q, k, v: (attention.attend(q, k, v, heads), None)
  return jax.jit(
    lambda params, x, rng=None: nnx.merge(graph, params)(x, attend, rng)[0]
  )


def test_block_is_the_formula_of_the_paper():
  config = networks.config(half_size=True, width=8)
  params = networks.random_params(config, std=0.7)["blocks"]
  first = jax.tree.map(lambda p: p[0], params)
  pattern = Local(4), Strided(6)
  x = np.random.default_rng(0).normal(size=(LENGTH, 8)).astype(np.float32)
  found = run(config, pattern)(first, x[None])

  p = jax.tree.map(lambda x: np.asarray(x, np.float64), first)

  def linear(x, p):
    return x @ p["kernel"] + p["bias"]

  def norm(x, p):
    variance = x.var(-1, keepdims=True)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + 1e-5)
    return x * p["scale"] + p["bias"]

  def attention(x):
    q, k, v = (linear(x, p[name]) for name in ("query", "key", "value"))
    assert q.shape == k.shape == (LENGTH, 4) and v.shape == (LENGTH, 8)
    heads = []
    for head in (0, 1):
      q_h, k_h, v_h = (np.split(x, 2, axis=1)[head] for x in (q, k, v))
      weights = np.exp(q_h @ k_h.T / math.sqrt(2))
      weights *= pattern[head].matrix(LENGTH)
      heads.append(weights @ v_h / weights.sum(1, keepdims=True))
    return linear(np.concatenate(heads, 1), p["out"])

  def mlp(x):
    x = linear(x, p["mlp_in"])
    assert x.shape == (LENGTH, 16)
    return linear(x / (1 + np.exp(-1.702 * x)), p["mlp_out"])

  a = attention(norm(x, p["attention_norm"]))
  b = mlp(norm(x + a, p["mlp_norm"]))
  np.testing.assert_allclose(found[0], a + b, rtol=1e-4, atol=1e-4)


def test_dropout_is_applied_at_the_end_of_each_branch():
  config = networks.config(dropout=0.25, width=64)
  params = networks.random_params(config, std=0.1)["blocks"]
  block = run(config, (Local(4),) * 2)
  x = np.random.default_rng(0).normal(size=(2, LENGTH, 64)).astype(np.float32)
  for silent in "out", "mlp_out":  # only the other branch is left
    first = jax.tree.map(lambda p: p[0], params)
    first[silent] = jax.tree.map(jnp.zeros_like, first[silent])
    complete = np.asarray(block(first, x))
    rngs = jax.random.split(jax.random.key(2))
    dropped = np.asarray(block(first, x, rngs))
    is_zero = dropped == 0
    # 2,560 draws: 0.25 is met within 0.01 (one standard deviation).
    assert abs(is_zero.mean() - 0.25) < 0.04
    np.testing.assert_allclose(
      dropped[~is_zero], complete[~is_zero] / 0.75, atol=1e-5
    )
