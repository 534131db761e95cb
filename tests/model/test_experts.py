"""Tests of experts: exact, independent, deterministic, no leaks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import soak

from sparse_transformer.model.options import experts

BATCH = 2
LENGTH = 45
WIDTH = 6
INNER = 10


def inputs(num=5, dtype="float32", skew=0.0, seed=0):
  """(x_BLD, router, weights); with skew, most choose the first experts."""
  random = np.random.RandomState(seed)
  x_BLD = jnp.asarray(random.randn(BATCH, LENGTH, WIDTH), dtype)
  router = 0.5 * random.randn(WIDTH, num)
  weights = experts.Weights(
    random.randn(num, WIDTH, INNER) / np.sqrt(WIDTH),
    random.randn(num, INNER),
    random.randn(num, INNER, WIDTH) / np.sqrt(INNER),
    random.randn(num, WIDTH),
  )
  weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights)
  bias = -skew * np.arange(num)
  return x_BLD, (jnp.asarray(router, jnp.float32), jnp.float32(bias)), weights


def logits_of(x_BLD, router):
  kernel, bias = router
  return x_BLD.astype(jnp.float32) @ kernel + bias[None, None]


def mixed(x_BLD, router, weights, k):
  chosen_BLK, factors_BLK = experts.choose(logits_of(x_BLD, router), k)
  return experts.mix(x_BLD, chosen_BLK, factors_BLK, weights)


def all_experts(x_BLD, weights):
  """What each expert returns for each position: [B, L, E, D]."""
  h = jnp.einsum("bld,edf->blef", x_BLD, weights.kernel_in)
  h = h + weights.bias_in[None, None]
  h = h * jax.nn.sigmoid(1.702 * h)
  y = jnp.einsum("blef,efd->bled", h, weights.kernel_out)
  return y + weights.bias_out[None, None]


def dense(x_BLD, router, weights, k):
  """Softmax over all experts, and the k largest of it."""
  p_BLE = jax.nn.softmax(logits_of(x_BLD, router))
  smallest = jnp.sort(p_BLE, axis=-1)[..., -k, None]
  factors_BLE = jnp.where(p_BLE >= smallest, p_BLE, 0)
  return (all_experts(x_BLD, weights) * factors_BLE[..., None]).sum(2)


def with_gradients(function, k):
  cotangent = jnp.cos(jnp.arange(BATCH * LENGTH * WIDTH, dtype=jnp.float32))

  def run(*args):
    out, pullback = jax.vjp(functools.partial(function, k=k), *args)
    return out, pullback(cotangent.reshape(out.shape))

  return jax.jit(run)


@pytest.mark.parametrize(
  "num, k, skew", [(5, 2, 0.0), soak(5, 1, 0.0), (7, 3, 3.0)]
)
def test_result_and_gradients_are_those_of_all_experts_dense(num, k, skew):
  args = inputs(num, skew=skew)  # with skew, some experts are never chosen
  found, expected = (with_gradients(f, k)(*args) for f in (mixed, dense))
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    scale = np.abs(y).max()
    np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * max(1, scale))


def test_result_in_bfloat16_is_that_in_float32_within_its_rounding():
  x_BLD, *parameters = inputs(dtype="bfloat16")
  run = jax.jit(functools.partial(mixed, k=2))
  found = run(x_BLD, *parameters)
  assert found.dtype == jnp.float32
  expected = run(x_BLD.astype(jnp.float32), *parameters)
  assert 0 < np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


# Losses.


def test_losses_are_those_of_the_definitions():
  logits = np.random.RandomState(0).randn(2, 9, 4).astype(np.float32)
  sums = np.exp(logits).sum(-1, keepdims=True)
  p = np.exp(logits) / sums
  chosen, _ = experts.choose(jnp.asarray(logits), 2)

  np.testing.assert_array_equal(chosen, np.argsort(-p, axis=-1)[..., :2])

  found = experts.measure(jnp.asarray(logits), chosen)
  share = np.bincount(np.ravel(chosen), minlength=4) / chosen.size
  expected = {
    "expert_load": 4 * share,
    "load_balance": 4 * (share * p.mean((0, 1))).sum(),
    "router_z": (np.log(sums) ** 2).mean(),
  }

  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-6)
