"""The residual block of the network."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_transformer.model.config import Config


class ResidualBlock(nnx.Module):
  """Adds attention a and then an MLP b to the residual stream: x + a + b.

  Both branches normalize their input first; b is computed from x + a, with
  the activation h * sigmoid(1.702 h).

  Source: Child et al. 2019, sections 5.1 and 5.2.
  """

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.config = config
    dtype = jnp.dtype(config.dtype)
    width, inner = config.width, config.mlp_width
    norm = functools.partial(
      nnx.LayerNorm, width, epsilon=1e-5, dtype=dtype, rngs=rngs
    )
    linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
    from_stream = _weight_init(config, width)
    self.attention_norm = norm()
    self.query = linear(width, config.qk_width, kernel_init=from_stream)
    self.key = linear(width, config.qk_width, kernel_init=from_stream)
    self.value = linear(width, width, kernel_init=from_stream)
    self.out = linear(
      width, width, kernel_init=_weight_init(config, width, ends_branch=True)
    )
    self.mlp_norm = norm()
    self.mlp_in = linear(width, inner, kernel_init=from_stream)
    self.mlp_out = linear(
      inner, width, kernel_init=_weight_init(config, inner, ends_branch=True)
    )
    self.dropout = nnx.Dropout(config.dropout)

  def __call__(
    self,
    x_BLD: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
    rng: jax.Array | None = None,
  ) -> tuple[jax.Array, Any]:
    """Applies the block.

    Args:
      x_BLD: the residual stream.
      attend: a `transformer.Attend` with all but its last three arguments
        bound: (q_BLHK, k_BLHK, v_BLHE) -> (out_BLHE, cache).
      rng: key for dropout; None applies no dropout.

    Returns:
      (the new residual stream, the cache that `attend` returned).
    """
    rng_a, rng_b = (None, None) if rng is None else jax.random.split(rng)
    attention: Callable = functools.partial(self._attention, attend)
    if self.config.remat == "attention":
      attention = jax.checkpoint(attention)
    a_BLD, cache = attention(x_BLD)
    a_BLD = self._drop(a_BLD, rng_a)
    b_BLD = self._drop(self._mlp(x_BLD + a_BLD), rng_b)
    return x_BLD + a_BLD + b_BLD, cache

  def _attention(self, attend, x_BLD):
    x_BLD = self.attention_norm(x_BLD)
    heads = *x_BLD.shape[:2], self.config.num_heads, -1
    out_BLHE, cache = attend(
      self.query(x_BLD).reshape(heads),
      self.key(x_BLD).reshape(heads),
      self.value(x_BLD).reshape(heads),
    )
    return self.out(out_BLHE.reshape(x_BLD.shape)), cache

  def _mlp(self, x_BLD):
    h_BLF = self.mlp_in(self.mlp_norm(x_BLD))
    return self.mlp_out(h_BLF * jax.nn.sigmoid(1.702 * h_BLF))

  def _drop(self, x_BLD, rng):
    return self.dropout(x_BLD, deterministic=rng is None, rngs=rng)


def _weight_init(
  config: Config, fan_in: int, ends_branch: bool = False
) -> nnx.Initializer:
  """Normal weights, scaled by 1/sqrt(2 N) at the end of a residual branch.

  The paper's 0.125 / sqrt(d_in), read as a standard deviation ("paper"), is
  2.83 times smaller than that of the released code ("code"):
  github.com/openai/distribution_augmentation, which trained its models.
  """
  if config.init == "paper":
    std = 0.125 / math.sqrt(fan_in)
  else:
    std = math.sqrt(0.125 / fan_in)
  return nnx.initializers.normal(
    std / math.sqrt(2 * config.num_layers) if ends_branch else std
  )
