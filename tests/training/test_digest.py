"""Tests of digests: any change of an array changes its digest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_transformer.training.checkpoints import saved_arrays


def array(dtype, shape=(3, 4, 5)):
  values = np.random.default_rng(0).normal(size=shape) * 100
  return jnp.asarray(values, dtype)


def of(x):
  return saved_arrays.digests({"x": x})["x"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_any_flipped_bit_changes_the_digest(dtype):
  x = np.array(array(dtype))
  before = of(x)
  rng = np.random.default_rng(1)
  for _ in range(8):
    flipped = x.copy()
    flipped.view(np.uint8).flat[rng.integers(x.nbytes)] ^= 1 << rng.integers(8)
    assert of(flipped) != before


def test_types_of_one_bit_and_of_64():
  flags = jnp.array([True, True, False])
  assert len({of(flags), of(~flags), of(flags[::-1])}) == 3
  with jax.enable_x64(True):
    x = np.array(array("float64"))
    before = of(x)
    x.view(np.uint8)[0, 0, 0] ^= 1  # of the lower half
    assert of(x) != before


def test_exchanged_values_and_another_order_of_axes_change_it():
  x = array("float32")
  swapped = x.at[0, 0, 0].set(x[2, 3, 4]).at[2, 3, 4].set(x[0, 0, 0])
  assert len({of(x), of(swapped), of(x[::-1]), of(x + 0.0 * x - 0.0)}) == 3
