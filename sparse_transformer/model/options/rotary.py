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
  """Rotates number i of a head, with number i + K / 2, by at * base^(-2i/K).

  Source: Su et al. 2021, arXiv 2104.09864; they pair neighbors.
  """
  half = x_BLHK.shape[-1] // 2
  rates = base ** (-np.arange(half, dtype=np.float32) / half)
  angles_LK = at_L.astype(jnp.float32)[:, None] * rates[None]
  cos, sin = (f(angles_LK)[None, :, None] for f in (jnp.cos, jnp.sin))
  x, y = jnp.split(x_BLHK.astype(jnp.float32), 2, -1)
  rotated = jnp.concatenate([x * cos - y * sin, y * cos + x * sin], -1)
  return rotated.astype(x_BLHK.dtype)
