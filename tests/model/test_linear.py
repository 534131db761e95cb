"""Tests of linear layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_transformer.model import linear


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (3, 5), (4, 16)])
@pytest.mark.parametrize("inner", [3, 8, 12])
def test_product_on_cpus_equals_numpy_in_values_and_gradients(shape, inner):
  rng = np.random.default_rng(0)
  x_BLD = rng.normal(size=(*shape, 8))
  kernel_DF = rng.normal(size=(8, inner))
  dy_BLF = rng.normal(size=(*shape, inner))

  def run(x_BLD, kernel_DF, dy_BLF):
    y_BLF, pullback = jax.vjp(linear.multiply_on_cpu, x_BLD, kernel_DF)
    return y_BLF, *pullback(dy_BLF)

  arguments = (jnp.float32(x) for x in (x_BLD, kernel_DF, dy_BLF))
  y, dx, dkernel = jax.jit(run)(*arguments)

  close = dict(rtol=1e-5, atol=1e-5)
  expected = np.einsum("bld,blf->df", x_BLD, dy_BLF)
  np.testing.assert_allclose(y, x_BLD @ kernel_DF, **close)
  np.testing.assert_allclose(dx, dy_BLF @ kernel_DF.T, **close)
  np.testing.assert_allclose(dkernel, expected, **close)


@pytest.mark.parametrize("width, inner", [(64, 128), (128, 64)])
def test_gradient_of_a_kernel_on_cpus_copies_no_operand(width, inner):
  def run(x_BLD, kernel_DF):
    return jnp.sum(linear.multiply_on_cpu(x_BLD, kernel_DF) ** 2)

  x_BLD, kernel_DF = jnp.zeros((4, 512, width)), jnp.zeros((width, inner))
  program = jax.jit(jax.grad(run, 1)).lower(x_BLD, kernel_DF).compile()

  # The operands of the plain gradient, as XLA copies them for its product.
  transposed = "f32[64,2048]", "f32[128,2048]"
  assert not any(shape in program.as_text() for shape in transposed)
