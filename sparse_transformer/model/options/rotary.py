"""Rotary positions: queries and keys are rotated by their positions."""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.model.options.option import Inputs, Layer, Option


class Rotary(Option):
  """`model.positions="rotary"`, in place of embeddings of positions."""

  @property
  def is_used(self) -> bool:
    return self.config.positions == "rotary"

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    # Cached keys were rotated when they were new.
    positions_L = layer.first + jnp.arange(inputs.q_BLHK.shape[1])
    return inputs._replace(
      q_BLHK=rotate(inputs.q_BLHK, positions_L, self.config.rotary_base),
      k_BLGK=rotate(inputs.k_BLGK, positions_L, self.config.rotary_base),
    )


def rotate(x_BLHK: jax.Array, positions_L: jax.Array, base: float) -> jax.Array:
  """Rotates each pair of numbers of a head by an angle that its position sets.

  Numbers i and i + K / 2 are a pair. Their angle at position t is
  t * base^(-2i/K) radians.

  Args:
    x_BLHK: queries or keys, of any floating dtype; K is even.
    positions_L: their positions, integers.
    base: of the angles; larger ones distinguish positions further apart.

  Returns:
    The rotated numbers [B, L, H, K], of the same dtype.

  Source: Su et al. 2021, arXiv 2104.09864; they pair neighbors.

  >>> x_BLHK = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
  >>> rotated = rotate(x_BLHK, jnp.array([1]), base=10_000.0)
  >>> [round(float(x), 3) for x in rotated.ravel()]
  [0.54, 0.841]
  """
  half = x_BLHK.shape[-1] // 2
  exponents_K = np.arange(half, dtype=np.float32) / half
  rates_K = base**-exponents_K

  # Angles reach the length of the sequence: 16-bit floats could not tell
  # neighbors apart.
  angles_LK = positions_L.astype(jnp.float32)[:, None] * rates_K[None]
  angles_BLHK = angles_LK[None, :, None]
  cos = jnp.cos(angles_BLHK)
  sin = jnp.sin(angles_BLHK)

  x, y = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
    [
      x * cos - y * sin,
      y * cos + x * sin,
    ],
    axis=-1,
  )
  return rotated.astype(x_BLHK.dtype)
