"""The linear layers of blocks."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparse_transformer.attention import platforms
from sparse_transformer.model import sharding


@jax.named_scope("linear")
def linear(x_BLD: jax.Array, layer: nnx.Linear) -> jax.Array:
  """Applies a linear layer. The result has the dtype of x."""
  # Weights are stored in float32, and rounded where they are used.
  kernel_DF = layer.kernel[...].astype(x_BLD.dtype)
  y_BLF = _multiply(x_BLD, kernel_DF)
  if layer.bias is not None:
    y_BLF += layer.bias[...][None, None]

  return y_BLF.astype(x_BLD.dtype)


def _multiply(x_BLD, kernel_DF):
  """Returns x @ kernel, in float32 or in the dtype of x."""
  # On several devices, the first of the following products would exchange sums
  # in float32, and the second would move positions between devices.
  is_one_device = sharding.size(sharding.AXES) == 1

  if is_one_device and x_BLD.dtype == jnp.bfloat16:
    # The product is rounded only after the bias is added, so that compilers for
    # GPUs fuse product, bias and rounding. In the backward pass, this algorithm
    # rounds the cotangents. It is not used for float16, because CPUs have no
    # such algorithm.
    return jnp.matmul(
      x_BLD,
      kernel_DF,
      precision=lax.DotAlgorithmPreset.BF16_BF16_F32,
      preferred_element_type=jnp.float32,
    )

  is_on_cpu = platforms.current_platform() == "cpu"
  if is_one_device and is_on_cpu and x_BLD.dtype == jnp.float32:
    return multiply_on_cpu(x_BLD, kernel_DF)

  return jnp.matmul(x_BLD, kernel_DF)


@jax.custom_vjp
def multiply_on_cpu(x_BLD: jax.Array, kernel_DF: jax.Array) -> jax.Array:
  """Returns x @ kernel. The gradient of the kernel is faster on CPUs.

  By default, JAX computes this gradient as the transpose of a product. For
  that, XLA copies an operand in another order, and runs the product at half the
  speed. This function instead computes one product for each half of the
  positions, as a batch, and adds the two, which needs no copy.
  """
  return jnp.matmul(x_BLD, kernel_DF)


def _multiply_forward(x_BLD, kernel_DF):
  return multiply_on_cpu(x_BLD, kernel_DF), (x_BLD, kernel_DF)


def _multiply_backward(saved, dy_BLF):
  x_BLD, kernel_DF = saved
  width, inner = kernel_DF.shape

  # A batch of one would be transposed again.
  num_halves = math.gcd(x_BLD.size // width, 2)
  x_HPD = x_BLD.reshape(num_halves, -1, width)
  dy_HPF = dy_BLF.reshape(num_halves, -1, inner)
  # XLA is up to twice as fast if the result has more columns than rows.
  if width > inner:
    dkernel_DF = jnp.einsum("hpf,hpd->hfd", dy_HPF, x_HPD).sum(0).T
  else:
    dkernel_DF = jnp.einsum("hpd,hpf->hdf", x_HPD, dy_HPF).sum(0)
  return jnp.matmul(dy_BLF, kernel_DF.T), dkernel_DF


multiply_on_cpu.defvjp(_multiply_forward, _multiply_backward)
