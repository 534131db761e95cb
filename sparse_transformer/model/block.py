"""The residual blocks of the network."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparse_transformer import attention
from sparse_transformer.model import sharding
from sparse_transformer.model.configure import Config

# Marks a function that ends with a product. The backward pass needs the
# operands, not the product: cheap to recompute, and large to keep.
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)
# The name of arrays that rematerialization keeps: what was chosen by numbers
# that may round differently when they are recomputed.
NOT_RECOMPUTED = "choice"
*_OUTPUTS, _LABELS = attention.SAVED_NAMES


class ResidualBlock(nnx.Module):
  """The update of the residual stream x: attention a and then an MLP b.

  Both branches normalize their input first; b is computed from x + a, with the
  activation h * sigmoid(1.702 h). Products are in the dtype of x; norms and
  sums are in float32. Source: Child et al. 2019, sections 5.1 and 5.2.
  """

  stack: ClassVar[str] = "blocks"  # the name of such blocks in the parameters

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.config = config
    width, of_keys = config.width, config.num_key_heads
    norm = functools.partial(nnx.LayerNorm, width, epsilon=1e-5, rngs=rngs)
    linear = functools.partial(
      nnx.Linear, width, kernel_init=weight_init(width), rngs=rngs
    )
    self.attention_norm = norm()
    self.query = linear(config.qk_width)
    self.key = linear(config.head_width * of_keys)
    self.value = linear(config.widths[1] * of_keys)
    self.out = linear(width, kernel_init=weight_init(width, config.num_layers))
    self.mlp_norm = norm()
    self._init_mlp(rngs)
    self.dropout = nnx.Dropout(config.dropout)

  def _init_mlp(self, rngs):
    self.mlp_in, self.mlp_out = make_mlp(self.config, rngs)

  def __call__(
    self,
    x_BLD: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
    rngs: jax.Array | None = None,
  ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    """Returns (a + b in float32, what else `attend` returns, measurements).

    Args:
      x_BLD: the residual stream, rounded to the dtype of products.
      attend: (q_BLHK, k_BLGK, v_BLGE) -> (out_BLHE, anything else).
      rngs: two keys for dropout; None applies no dropout.
    """
    rng_a, rng_b = (None, None) if rngs is None else rngs
    attention: Callable = functools.partial(self._attention, attend, rng_a)
    if self.config.remat == "attention":
      attention = jax.checkpoint(attention, policy=_keeping())
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
    b_BLD = _linear(activate(h_BLF), self.mlp_out)
    return self._drop(b_BLD, rng), {}

  @jax.named_scope("dropout")
  def _drop(self, x_BLD, rng):
    x_BLD = x_BLD.astype(jnp.float32)
    return self.dropout(x_BLD, deterministic=rng is None, rngs=rng)


def rematerialized(apply: Callable, remat: str, layer: int) -> Callable:
  """Makes the backward pass recompute a block; argument `layer` is static."""
  if remat not in ("block", "block_but_attention"):
    return apply
  # With the outputs of attention saved, its backward pass needs only the
  # queries, keys and values, which are cheap to recompute.
  policy = _keeping(*(_OUTPUTS if remat == "block_but_attention" else ()))
  return jax.checkpoint(
    apply, prevent_cse=False, static_argnums=layer, policy=policy
  )


def _keeping(*names):
  """The policy that keeps arrays with these names, and choices of keys."""
  keep = jax.checkpoint_policies.save_only_these_names
  return keep(*names, _LABELS, NOT_RECOMPUTED)


def make_mlp(config: Config, rngs: nnx.Rngs) -> tuple[Any, Any]:
  """The two layers of an MLP."""
  width, inner = config.width, config.mlp_width
  into, out = weight_init(width), weight_init(inner, config.num_layers)
  return (
    nnx.Linear(width, inner, kernel_init=into, rngs=rngs),
    nnx.Linear(inner, width, kernel_init=out, rngs=rngs),
  )


@jax.named_scope("activation")
def activate(h: jax.Array) -> jax.Array:
  """The activation of all MLPs."""
  return h * jax.nn.sigmoid(1.702 * h)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _copies(x: jax.Array, num: int) -> list[jax.Array]:
  """Copies of x, whose products compilers for GPUs do not merge and split."""
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


def weight_init(fan_in: int, num_layers: int = 0) -> nnx.Initializer:
  """Normal weights; `num_layers` is for weights that end a residual branch.

  As in the released code, github.com/openai/distribution_augmentation: 2.83
  times the paper's 0.125 / sqrt(d_in), read as a standard deviation.
  """
  return nnx.initializers.normal(
    math.sqrt(0.125 / fan_in) / math.sqrt(max(1, 2 * num_layers))
  )
