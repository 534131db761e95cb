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

  def draw(*shape):
    return random.randn(*shape).astype(np.float32)

  x_BLD = jnp.asarray(draw(BATCH, LENGTH, WIDTH), dtype)
  kernel = 0.5 * draw(WIDTH, num)
  bias = -skew * np.arange(num, dtype=np.float32)
  weights = experts.Weights(
    kernel_in=draw(num, WIDTH, INNER) / np.float32(np.sqrt(WIDTH)),
    bias_in=draw(num, INNER),
    kernel_out=draw(num, INNER, WIDTH) / np.float32(np.sqrt(INNER)),
    bias_out=draw(num, WIDTH),
  )
  return x_BLD, (kernel, bias), weights


def logits_of(x_BLD, router):
  kernel, bias = router
  return x_BLD.astype(jnp.float32) @ kernel + bias[None, None]


def mixed(x_BLD, router, weights, k):
  chosen_BLK, factors_BLK = experts.choose(logits_of(x_BLD, router), k)
  return experts.mix(x_BLD, chosen_BLK, factors_BLK, weights)


def all_experts(x_BLD, weights):
  """What each expert returns for each position: [B, L, E, D]."""
  h = jnp.einsum("bld,edf->blef", x_BLD, weights.kernel_in)
  h += weights.bias_in[None, None]
  h *= jax.nn.sigmoid(1.702 * h)
  y = jnp.einsum("blef,efd->bled", h, weights.kernel_out)
  return y + weights.bias_out[None, None]


def dense(x_BLD, router, weights, k):
  """Softmax over all experts, and the k largest of it."""
  p_BLE = jax.nn.softmax(logits_of(x_BLD, router))
  smallest = jnp.sort(p_BLE, axis=-1)[..., -k, None]
  factors_BLE = jnp.where(p_BLE >= smallest, p_BLE, 0)
  return (all_experts(x_BLD, weights) * factors_BLE[..., None]).sum(2)


def with_gradients(function, k):
  """A function that returns results, and gradients of a weighted sum."""

  def run(*args):
    out, pullback = jax.vjp(functools.partial(function, k=k), *args)
    cotangent = jnp.cos(jnp.arange(out.size, dtype=jnp.float32))
    return out, pullback(cotangent.reshape(out.shape))

  return jax.jit(run)


@pytest.mark.parametrize(
  "num, k, skew",
  [
    (5, 2, 0.0),
    soak(5, 1, 0.0),
    (7, 3, 3.0),  # some experts are never chosen
  ],
)
def test_result_and_gradients_are_those_of_all_experts_dense(num, k, skew):
  args = inputs(num, skew=skew)
  found = with_gradients(mixed, k)(*args)
  expected = with_gradients(dense, k)(*args)

  def close(x, y):
    atol = 2e-6 * max(1, np.abs(y).max())
    np.testing.assert_allclose(
      x,
      y,
      rtol=0,
      atol=atol,
    )

  jax.tree.map(close, found, expected)


def test_result_in_bfloat16_is_that_in_float32_within_its_rounding():
  x_BLD, router, weights = inputs(dtype="bfloat16")
  run = jax.jit(functools.partial(mixed, k=2))
  found = run(x_BLD, router, weights)
  assert found.dtype == jnp.float32

  expected = run(x_BLD.astype(jnp.float32), router, weights)
  largest_error = np.abs(found - expected).max()
  assert 0 < largest_error < 0.02 * np.abs(expected).max()


# Losses.


def test_losses_are_those_of_the_definitions():
  logits = np.random.RandomState(0).randn(2, 9, 4).astype(np.float32)
  sums = np.exp(logits).sum(-1, keepdims=True)
  p = np.exp(logits) / sums
  chosen, _ = experts.choose(jnp.asarray(logits), 2)
  most_probable = np.argsort(-p, axis=-1)[..., :2]
  np.testing.assert_array_equal(chosen, most_probable)

  found = experts.measure(jnp.asarray(logits), chosen)
  share = np.bincount(np.ravel(chosen), minlength=4) / chosen.size
  mean_p = p.mean((0, 1))
  expected = {
    "expert_load": 4 * share,
    "load_balance": 4 * (share * mean_p).sum(),
    "router_z": (np.log(sums) ** 2).mean(),
  }
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-6)
