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
    at_L = layer.first + jnp.arange(inputs.q_BLHK.shape[1])
    return inputs._replace(
      q_BLHK=rotate(inputs.q_BLHK, at_L, self.config.rotary_base),
      k_BLGK=rotate(inputs.k_BLGK, at_L, self.config.rotary_base),
    )


def rotate(x_BLHK: jax.Array, at_L: jax.Array, base: float) -> jax.Array:
  """Rotates each pair of numbers of a head by an angle that its position sets.

  Numbers i and i + K / 2 are a pair, and are rotated by at * base^(-2i/K).

  Args:
    x_BLHK: queries or keys, of any floating dtype.
    at_L: their positions, integers.
    base: of the angles; larger ones distinguish positions further apart.

  Returns:
    The rotated numbers [B, L, H, K], of the same dtype.

  Source: Su et al. 2021, arXiv 2104.09864; they pair neighbors.
  """
  half = x_BLHK.shape[-1] // 2
  rates = base ** (-np.arange(half, dtype=np.float32) / half)
  angles_LK = at_L.astype(jnp.float32)[:, None] * rates[None]
  cos_BLHK = jnp.cos(angles_LK)[None, :, None]
  sin_BLHK = jnp.sin(angles_LK)[None, :, None]

  x, y = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
  rotated_x = x * cos_BLHK - y * sin_BLHK
  rotated_y = y * cos_BLHK + x * sin_BLHK
  rotated = jnp.concatenate([rotated_x, rotated_y], axis=-1)
  return rotated.astype(x_BLHK.dtype)
