"""The residual blocks of the network."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparse_transformer.model import experts, pattern_params, sharding
from sparse_transformer.model.hyperparameters import Config

# Marks a function that ends with a product. The backward pass needs the
# operands, not the product: cheap to recompute, and large to keep.
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


class ResidualBlock(nnx.Module):
  """The update of the residual stream x: attention a and then an MLP b.

  Both branches normalize their input first; b is computed from x + a, with
  the activation h * sigmoid(1.702 h). Products are in the dtype of x; norms and
  sums are in float32.

  Source: Child et al. 2019, sections 5.1 and 5.2.
  """

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.config = config
    width = config.width
    norm = functools.partial(nnx.LayerNorm, width, epsilon=1e-5, rngs=rngs)
    linear = functools.partial(nnx.Linear, rngs=rngs)
    from_stream = _weight_init(config, width)
    self.attention_norm = norm()
    self.query = linear(width, config.qk_width, kernel_init=from_stream)
    of_keys, of_values = (
      x // config.num_heads * config.num_key_heads
      for x in (config.qk_width, width)
    )
    self.key = linear(width, of_keys, kernel_init=from_stream)
    self.value = linear(width, of_values, kernel_init=from_stream)
    self.out = linear(
      width, width, kernel_init=_weight_init(config, width, ends_branch=True)
    )
    self.mlp_norm = norm()
    self._init_mlp(rngs)
    self.dropout = nnx.Dropout(config.dropout)

  def _init_mlp(self, rngs):
    self.mlp_in, self.mlp_out = _make_mlp(self.config, rngs)

  def __call__(
    self,
    x_BLD: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
    rngs: jax.Array | None = None,
  ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    """Computes a + b.

    Args:
      x_BLD: the residual stream, rounded to the dtype of products.
      attend: (q_BLHK, k_BLGK, v_BLGE) -> (out_BLHE, whatever else it returns).
      rngs: two keys for dropout; None applies no dropout.

    Returns:
      (a + b in float32 [B, L, D], what else `attend` returned, auxiliary losses
      and other measurements of the MLP by name).
    """
    rng_a, rng_b = (None, None) if rngs is None else rngs
    attention: Callable = functools.partial(self._attention, attend, rng_a)
    if self.config.remat == "attention":
      names = jax.checkpoint_policies.save_only_these_names
      attention = jax.checkpoint(
        attention, policy=names(*pattern_params.SAVED_NAMES)
      )
    a_BLD, h_BLF, others = attention(x_BLD)
    b_BLD, measured = self._leave_mlp(h_BLF, rng_b)
    return a_BLD + b_BLD, others, measured

  def _attention(self, attend, rng, x_BLD):
    """(a, what `_enter_mlp` returns, what else `attend` returns)."""
    shape, num = x_BLD.shape[:2], self.config.num_key_heads
    nums = self.config.num_heads, num, num
    inputs = zip(self._enter_attention(x_BLD), nums, strict=True)
    out_BLHE, others = attend(*(x.reshape(*shape, n, -1) for x, n in inputs))
    leave = self._leave_attention
    if self.config.remat == "none":  # the others recompute all of it
      leave = _recomputed(leave)
    return *leave(x_BLD, out_BLHE, rng), others

  @_recomputed
  def _enter_attention(self, x_BLD):
    with jax.named_scope("norm"):
      y_BLD = self.attention_norm(x_BLD).astype(x_BLD.dtype)
    layers = self.query, self.key, self.value
    copies = _copies(y_BLD, len(layers))
    return [_linear(*x) for x in zip(copies, layers, strict=True)]

  def _leave_attention(self, x_BLD, out_BLHE, rng):
    a_BLD = _linear(out_BLHE.reshape(x_BLD.shape), self.out)
    a_BLD = self._drop(a_BLD, rng)
    with jax.named_scope("norm"):
      y_BLD = self.mlp_norm(x_BLD + a_BLD).astype(x_BLD.dtype)
    return a_BLD, self._enter_mlp(y_BLD)

  def _enter_mlp(self, y_BLD):
    return _linear(y_BLD, self.mlp_in)

  @_recomputed
  def _leave_mlp(self, h_BLF, rng):
    """(b, measurements)."""
    b_BLD = _linear(experts.activate(h_BLF), self.mlp_out)
    return self._drop(b_BLD, rng), {}

  @jax.named_scope("dropout")
  def _drop(self, x_BLD, rng):
    x_BLD = x_BLD.astype(jnp.float32)
    return self.dropout(x_BLD, deterministic=rng is None, rngs=rng)


class ExpertBlock(ResidualBlock):
  """A residual block with a mixture of experts in place of its MLP.

  The experts are MLPs, stacked along a first axis. A router, a linear layer in
  float32, chooses `experts_per_token` of them for each position.
  """

  def _init_mlp(self, rngs):
    config = self.config
    self.router = nnx.Linear(
      config.width,
      config.experts,
      use_bias=False,
      precision="highest",
      kernel_init=_weight_init(config, config.width),
      rngs=rngs,
    )
    split = nnx.split_rngs(splits=config.experts)
    make = split(nnx.vmap(functools.partial(_make_mlp, config)))
    self.experts_in, self.experts_out = make(rngs)

  def _enter_mlp(self, y_BLD):
    return y_BLD

  def _leave_mlp(self, y_BLD, rng):
    logits_BLE = self.router(y_BLD.astype(jnp.float32))
    chosen_BLK, factors_BLK = experts.choose(
      logits_BLE, self.config.experts_per_token
    )
    layers = self.experts_in, self.experts_out
    weights = [x[...] for layer in layers for x in (layer.kernel, layer.bias)]
    b_BLD = experts.mix(
      y_BLD, chosen_BLK, factors_BLK, experts.Weights(*weights)
    )
    return self._drop(b_BLD, rng), experts.measure(logits_BLE, chosen_BLK)


def _make_mlp(config, rngs):
  """The two layers of an MLP."""
  width, inner = config.width, config.mlp_width
  into = _weight_init(config, width)
  out = _weight_init(config, inner, ends_branch=True)
  return (
    nnx.Linear(width, inner, kernel_init=into, rngs=rngs),
    nnx.Linear(inner, width, kernel_init=out, rngs=rngs),
  )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _copies(x: jax.Array, num: int) -> list[jax.Array]:
  """Copies of x that compilers treat as different arrays.

  Compilers for GPUs would merge small products with the same operand, and then
  split the result.
  """
  return lax.optimization_barrier([x] * num)


@_copies.defjvp
def _copies_jvp(num, primals, tangents):
  return _copies(*primals, num), [*tangents] * num


@jax.named_scope("linear")
def _linear(x_BLD: jax.Array, layer: nnx.Linear) -> jax.Array:
  """Applies a linear layer; the result has the dtype of x."""
  precision, dtype = None, None
  if x_BLD.dtype == jnp.bfloat16 and sharding.size(*sharding.AXES) == 1:
    # Sums are rounded after the bias is added, so that compilers for GPUs fuse
    # product, bias and rounding. In the backward pass, this algorithm rounds
    # the cotangents; CPUs have no such algorithm for float16. Several devices
    # would exchange the sums in float32.
    precision, dtype = lax.DotAlgorithmPreset.BF16_BF16_F32, jnp.float32
  y_BLF = jnp.matmul(
    x_BLD,
    layer.kernel[...].astype(x_BLD.dtype),
    precision=precision,
    preferred_element_type=dtype,
  )
  if layer.bias is not None:
    y_BLF += layer.bias[...][None, None]
  return y_BLF.astype(x_BLD.dtype)


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
