"""Rotary positions: queries and keys are rotated by their positions."""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.model.options.option import Inputs, Layer, Option


class Rotary(Option):
  """`model.positions="rotary"`, instead of position embeddings."""

  @property
  def is_used(self) -> bool:
    return self.config.positions == "rotary"

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    # Only new keys are rotated here; cached keys were rotated when they were
    # new.
    positions_L = layer.first + jnp.arange(inputs.q_BLHK.shape[1])
    return inputs._replace(
      q_BLHK=rotate(inputs.q_BLHK, positions_L, self.config.rotary_base),
      k_BLGK=rotate(inputs.k_BLGK, positions_L, self.config.rotary_base),
    )


def rotate(x_BLHK: jax.Array, positions_L: jax.Array, base: float) -> jax.Array:
  """Rotates pairs of features by angles that depend on the position.

  Features i and i + K / 2 of a head form a pair. At position t, their angle is
  t * base^(-2i/K) radians.

  Args:
    x_BLHK: queries or keys, with any floating-point dtype; K must be even.
    positions_L: integers, the positions of queries or keys.
    base: base of the angles. With a larger base, positions can be distinguished
      over longer distances.

  Returns:
    The rotated features [B, L, H, K], in the dtype of `x_BLHK`.

  Source: Su et al. 2021, arXiv 2104.09864. In the paper, neighboring features
  form a pair.

  >>> x_BLHK = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
  >>> rotated = rotate(x_BLHK, jnp.array([1]), base=10_000.0)
  >>> [round(float(x), 3) for x in rotated.ravel()]
  [0.54, 0.841]
  """
  half = x_BLHK.shape[-1] // 2
  exponents_K = np.arange(half, dtype=np.float32) / half
  rates_K = base**-exponents_K

  # Angles are float32. They can be as large as the length of the sequence, and
  # 16-bit floats could not distinguish neighboring positions.
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
