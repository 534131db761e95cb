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
from sparse_transformer.model.configure import Config
from sparse_transformer.model.dropout import drop
from sparse_transformer.model.linear import linear
from sparse_transformer.model.normalization import (
  add_and_normalize,
  normalize,
  unsupported,
)

# Marks a function that ends with a product, to be recomputed in the backward
# pass. Its operands are cheap to recompute and large to store, and the product
# itself is not needed.
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)
# The name of arrays that rematerialization must save. They are choices, made by
# comparing numbers that may round differently when they are recomputed.
NOT_RECOMPUTED = "choice"
DROPPED = "dropped"  # the name of dropout masks
# The layers that attention reads.
BEFORE_ATTENTION = "attention_norm", "query", "key", "value"
*_OUTPUTS, _BUCKETS = attention.SAVED_NAMES


class ResidualBlock(nnx.Module):
  """A residual block: adds attention a, and then an MLP b, to the stream x.

  Both branches first normalize their input. The MLP reads x + a, and its
  activation is h * sigmoid(1.702 h). Products are computed in the dtype of x;
  norms and sums in float32. Source: Child et al. 2019, sections 5.1 and 5.2.
  """

  # The name of the stack of such blocks in the parameters. It ends in "blocks".
  stack: ClassVar[str] = "blocks"

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.config = config

    # Norms store their parameters, and compute, in float32.
    norm = functools.partial(
      nnx.LayerNorm, config.width, epsilon=1e-5, rngs=rngs
    )
    layer = functools.partial(
      nnx.Linear,
      config.width,
      kernel_init=weight_init(config.width),
      rngs=rngs,
    )

    # The order of these lines determines the random numbers of each layer.
    key_width, value_width = config.widths
    self.attention_norm = norm()
    self.query = layer(config.qk_width)
    self.key = layer(key_width * config.num_key_heads)
    self.value = layer(value_width * config.num_key_heads)
    self.out = layer(
      config.width, kernel_init=weight_init(config.width, config.num_layers)
    )
    self.mlp_norm = norm()
    self._init_mlp(rngs)

  def _init_mlp(self, rngs):
    self.mlp_in, self.mlp_out = make_mlp(self.config, rngs)

  def __call__(
    self,
    x_BLD: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
    words: jax.Array | None = None,
  ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    """Computes the update, which the caller adds to the residual stream.

    The block contains only the linear layers around attention. The attention
    function, which knows the layer and its cache, is an argument.

    Args:
      x_BLD: the residual stream, rounded to the dtype of products.
      attend: (q_BLHK, k_BLGK, v_BLGE) -> (out_BLHE, anything).
      words: the bit masks of the values that the two branches drop, as
        `dropout.draw` returns them for the shape [2, B, L, D]; None applies no
        dropout.

    Returns:
      (a + b in float32, the second result of `attend`, measurements).
    """
    config = self.config
    b, n, _ = x_BLD.shape
    words_of_a, words_of_b = (None, None) if words is None else words

    q, k, v = self._enter_attention(x_BLD)
    out_BLHE, rest = attend(
      q.reshape(b, n, config.num_heads, -1),
      k.reshape(b, n, config.num_key_heads, -1),
      v.reshape(b, n, config.num_key_heads, -1),
    )

    after = self
    if self._is_fused(x_BLD):
      out_BLHE, after = self._split_after_attention(out_BLHE)

    # With any other setting, the whole block is recomputed anyway.
    leave = after._leave_attention
    if config.remat == "none":
      leave = _recomputed(leave)
    a_BLD, h_BLF = leave(x_BLD, out_BLHE, words_of_a)

    # The sum is in float32, because neither branch is rounded before it is
    # added.
    b_BLD, measured = after._leave_mlp(h_BLF, words_of_b)
    return a_BLD + b_BLD, rest, measured

  def _split_after_attention(self, out_BLHE):
    """Returns (the output of attention, the block with the layers after it).

    The backward pass computes the gradients of both results before it computes
    the gradient of attention. Otherwise, with kernels, the GPU compiler would
    postpone the gradients of weights to the end. Until then, it would keep the
    arrays of the MLP, the widest of a block, in memory.
    """
    is_before = lambda path, _: path[0] in BEFORE_ATTENTION
    split: Any = nnx.split(self, is_before, ...)
    graph, before, after = split
    out_BLHE, after = _together((out_BLHE, after))
    return out_BLHE, nnx.merge(graph, before, after)

  @_recomputed
  def _enter_attention(self, x_BLD):
    """Returns queries, keys and values, with all heads in one axis."""
    y_BLD = normalize(x_BLD, self.attention_norm, self._is_fused(x_BLD))
    for_query, for_key, for_value = _copies(y_BLD, 3)
    return (
      linear(for_query, self.query),
      linear(for_key, self.key),
      linear(for_value, self.value),
    )

  def _leave_attention(self, x_BLD, out_BLHE, words_BWD):
    """Runs the layers from the output of attention to the inside of the MLP.

    These layers form one function, so that the backward pass recomputes them
    together. Returns the branch a and the result of `_enter_mlp`.
    """
    a_BLD = linear(out_BLHE.reshape(x_BLD.shape), self.out)
    a_BLD, y_BLD = add_and_normalize(
      x_BLD,
      a_BLD,
      words_BWD,
      self.config.dropout,
      self.mlp_norm,
      self._is_fused(x_BLD),
    )
    return a_BLD, self._enter_mlp(y_BLD)

  # A subclass with a different MLP overrides these two methods, and
  # `_init_mlp`. The result of the first, which is the argument of the second,
  # is stored for the backward pass.
  def _enter_mlp(self, y_BLD):
    return linear(y_BLD, self.mlp_in)

  @_recomputed
  def _leave_mlp(self, h_BLF, words_BWD):
    """Returns (b, measurements)."""
    b_BLD = linear(activate(h_BLF), self.mlp_out)
    return self._drop(b_BLD, words_BWD), {}

  def _drop(self, x_BLD, words_BWD):
    return drop(x_BLD.astype(jnp.float32), words_BWD, self.config.dropout)

  def _is_fused(self, x_BLD):
    """Whether kernels compute norms, see `normalization`."""
    remat = self.config.remat
    if remat == "auto":
      remat = "block"  # as in `rematerialized`
    return unsupported(x_BLD, remat) is None


def rematerialized(apply: Callable, remat: str) -> Callable:
  """Returns a block that the backward pass recomputes, as `remat` says.

  Args:
    apply: a function (x_BLD, cache, layer, ...), where `layer` is a static
      argument.
    remat: one of `schema.REMATS`. "auto" is the same as "block", until a
      program is chosen.
  """
  if remat == "none":
    return apply

  # Choices are always saved. If the outputs of attention are saved too, its
  # backward pass needs only queries, keys and values, which are cheap to
  # recompute.
  names = [_BUCKETS, NOT_RECOMPUTED]
  if remat == "block_but_attention":
    # Dropout masks are packed, so they cost less memory than time.
    names += [*_OUTPUTS, DROPPED]
  return jax.checkpoint(
    apply,
    prevent_cse=False,
    static_argnums=2,
    policy=jax.checkpoint_policies.save_only_these_names(*names),
  )


def make_mlp(config: Config, rngs: nnx.Rngs) -> tuple[Any, Any]:
  """Creates the two layers of an MLP, with random weights.

  The inner layer has four times the width of the stream, or twice the width
  with `half_size`. The second layer ends a residual branch, so its initial
  weights are smaller.
  """
  width = config.width
  inner = width * (2 if config.half_size else 4)
  mlp_in = nnx.Linear(width, inner, kernel_init=weight_init(width), rngs=rngs)
  mlp_out = nnx.Linear(
    inner,
    width,
    kernel_init=weight_init(inner, config.num_layers),
    rngs=rngs,
  )
  return mlp_in, mlp_out


@jax.named_scope("activation")
def activate(h: jax.Array) -> jax.Array:
  """Applies the activation function of MLPs, an approximation of GELU."""
  return h * jax.nn.sigmoid(1.702 * h)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _copies(x: jax.Array, num: int) -> list[jax.Array]:
  """Copies x, once for each product that reads it.

  Without copies, compilers for GPUs would merge all products with the same
  array, and then split the result, which costs more than it saves.
  """
  return lax.optimization_barrier([x] * num)


@_copies.defjvp
def _copies_jvp(num, primals, tangents):
  # All copies have the same tangent, which needs no barrier.
  (x,) = primals
  (tangent,) = tangents
  return _copies(x, num), [tangent] * num


@jax.custom_vjp
def _together(tree: Any) -> Any:
  """Returns its argument; all gradients are computed before any is used."""
  return tree


_together.defvjp(
  lambda tree: (tree, None),
  lambda _, gradients: (lax.optimization_barrier(gradients),),
)


def weight_init(fan_in: int, num_layers: int = 0) -> nnx.Initializer:
  """Returns the initializer of weights.

  Args:
    fan_in: width of the inputs.
    num_layers: number of layers of the network, for weights that end a residual
      branch; 0 for other weights.

  The standard deviation is the same as in the released code,
  github.com/openai/distribution_augmentation. The paper states 0.125 /
  sqrt(d_in). If this is read as a standard deviation, the released code's value
  is 2.83 times as large.
  """
  std = math.sqrt(0.125 / fan_in)
  # Each layer adds two branches to the stream. With this factor, the scale of
  # the sum does not depend on the number of layers.
  return nnx.initializers.normal(std / math.sqrt(max(1, 2 * num_layers)))
