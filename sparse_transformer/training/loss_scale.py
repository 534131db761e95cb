"""Dynamic loss scaling, with which gradients in float16 do not underflow.

The loss is multiplied by a power of two before it is differentiated, and its
gradient is divided by it, in float32. The scale doubles after many finite
gradients in a row; a non-finite one is skipped, and halves it.

Source: Micikevicius et al. 2018, "Mixed precision training", section 3.2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

FIRST, SMALLEST, LARGEST = 2.0**15, 1.0, 2.0**24
GROWTH_INTERVAL = 2000  # finite gradients in a row that double the scale


class LossScale(NamedTuple):
  """The state of loss scaling."""

  scale: jax.Array  # float32 scalar, what the loss is multiplied by
  finite: jax.Array  # int32, finite gradients since the scale last changed
  skipped: jax.Array  # int32, steps skipped so far because of their gradients


def init(dtype: str) -> LossScale | None:
  """The state before the first step; None for dtypes that need no scaling."""
  if dtype != "float16":
    return None
  zero = jnp.zeros((), jnp.int32)
  return LossScale(jnp.float32(FIRST), zero, jnp.copy(zero))


def update(
  old: LossScale, loss: jax.Array, gradient_norm: jax.Array
) -> LossScale:
  """The state after a step with this loss and this norm, both unscaled.

  A non-finite loss changes nothing: it does not depend on the scale.
  """
  is_finite = jnp.isfinite(gradient_norm)
  grows = old.finite + 1 >= GROWTH_INTERVAL
  larger = jnp.where(grows, jnp.minimum(2 * old.scale, LARGEST), old.scale)
  smaller = jnp.maximum(old.scale / 2, SMALLEST)
  new = LossScale(
    jnp.where(is_finite, larger, smaller),
    jnp.where(is_finite & ~grows, old.finite + 1, 0),
    old.skipped + ~is_finite,
  )
  return jax.tree.map(
    lambda new, old: jnp.where(jnp.isfinite(loss), new, old), new, old
  )
