"""A mixture of experts: each position passes through a few chosen MLPs.

Experts have no capacity limit: every choice is computed, so the result of a
position depends on no other position.

Axes: S = positions of all sequences, K = choices of each position, E = experts,
D = width of an expert's input and output, F = width of its hidden layer.
Choices are grouped by expert into V tiles of T places. Tiles run one after
another, which fixes the order in which gradients are summed.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from sparse_transformer.attention import group_by_label
from sparse_transformer.model import sharding
from sparse_transformer.model.block import (
  NOT_RECOMPUTED,
  ResidualBlock,
  activate,
  make_mlp,
  weight_init,
)
from sparse_transformer.model.options.option import Option

PER_TOKEN = 2  # experts that each position passes through


class Experts(Option):
  """`model.experts`: every second MLP is replaced by a mixture of experts."""

  # stacked by expert, within stacks of blocks
  stacked = ("experts_in", "experts_out")
  losses = dict(load_balance=0.01, router_z=0.001)

  @property
  def is_used(self) -> bool:
    return self.config.experts > 0

  def block(self, layer: int, kind: type[ResidualBlock]) -> type[ResidualBlock]:
    return ExpertBlock if layer % 2 else kind

  def num_active(self, path: tuple[Any, ...], size: int) -> int:
    # A position uses only the weights of the experts that it chooses.
    names = {key.key for key in path}
    if names.isdisjoint(("experts_in", "experts_out")):
      return size
    return size // self.config.experts * PER_TOKEN


class ExpertBlock(ResidualBlock):
  """A residual block with a mixture of experts in place of its MLP.

  Each expert is an MLP, and the parameters of all experts are stacked. The
  router, a linear layer in float32, chooses experts for each position.
  """

  stack = "expert_blocks"

  def _init_mlp(self, rngs):
    config = self.config
    self.router = nnx.Linear(
      config.width,
      config.experts,
      use_bias=False,
      precision="highest",
      kernel_init=weight_init(config.width),
      rngs=rngs,
    )
    # Each expert is an MLP that is drawn with its own random numbers.
    split = nnx.split_rngs(splits=config.experts)
    make = split(nnx.vmap(functools.partial(make_mlp, config)))
    self.experts_in, self.experts_out = make(rngs)

  def _enter_mlp(self, y_BLD):
    # Nothing is computed yet, because the first product needs the choice of
    # experts.
    return y_BLD

  def _leave_mlp(self, y_BLD, words_BWD):
    logits_BLE = self.router(y_BLD.astype(jnp.float32))
    chosen_BLK, factors_BLK = choose(logits_BLE, PER_TOKEN)

    weights = Weights(
      kernel_in=self.experts_in.kernel[...],
      bias_in=self.experts_in.bias[...],
      kernel_out=self.experts_out.kernel[...],
      bias_out=self.experts_out.bias[...],
    )
    b_BLD = mix(y_BLD, chosen_BLK, factors_BLK, weights)
    return self._drop(b_BLD, words_BWD), measure(logits_BLE, chosen_BLK)


class Weights(NamedTuple):
  """The weights of all E experts, in float32."""

  kernel_in: jax.Array  # [E, D, F]
  bias_in: jax.Array  # [E, F]
  kernel_out: jax.Array  # [E, F, D]
  bias_out: jax.Array  # [E, D]


def choose(logits_BLE: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
  """Chooses the `num` most probable experts of each position.

  Args:
    logits_BLE: logits of the router, float32.
    num: K, the number of experts that a position passes through.

  Returns:
    (indices of the chosen experts [B, L, num], the factors that multiply their
    outputs [B, L, num]).
  """
  # Factors are probabilities among all experts. If they were normalized over
  # the chosen experts, a single choice would always get 1, and have no
  # gradient.
  p_BLE = jax.nn.softmax(logits_BLE)
  _, chosen_BLK = lax.top_k(lax.stop_gradient(p_BLE), num)
  chosen_BLK = checkpoint_name(chosen_BLK, NOT_RECOMPUTED)
  return chosen_BLK, jnp.take_along_axis(p_BLE, chosen_BLK, axis=-1)


def measure(logits_BLE: jax.Array, chosen_BLK: jax.Array) -> dict[str, Any]:
  """Computes auxiliary losses of a router, and the load of each expert.

  Returns:
    A dict of three values. `load_balance` is E times a sum over experts, in
    which the share of choices that an expert gets is multiplied by its mean
    probability (Fedus et al. 2021, arXiv 2101.03961, section 2.2). `router_z`
    is the mean squared log-sum-exp of the logits (Zoph et al. 2022, arXiv
    2202.08906, section 3.3). `expert_load` [E] is the number of choices of each
    expert, divided by the mean over experts.
  """
  num_experts = logits_BLE.shape[-1]
  mean_p_E = jax.nn.softmax(logits_BLE).mean((0, 1))

  # Choices have no gradient, so the loss balances the load through
  # probabilities only.
  is_chosen_BLKE = jax.nn.one_hot(chosen_BLK, num_experts)
  load_E = num_experts * is_chosen_BLKE.mean((0, 1, 2))
  z_BL = jax.nn.logsumexp(logits_BLE, axis=-1)
  return dict(
    load_balance=(load_E * mean_p_E).sum(),
    router_z=(z_BL**2).mean(),
    expert_load=load_E,
  )


def mix(
  x_BLD: jax.Array,
  chosen_BLK: jax.Array,
  factors_BLK: jax.Array,
  weights: Weights,
) -> jax.Array:
  """Computes the weighted sum of the chosen experts' outputs: [B, L, D].

  On a mesh, each device processes its own positions with its own slice of each
  expert's hidden layer.

  Args:
    x_BLD: the input of all experts, in the dtype of matrix products.
    chosen_BLK: indices of the chosen experts, int32.
    factors_BLK: factors of their outputs, float32.
    weights: weights of all experts.
  """
  if sharding.size(sharding.AXES) == 1:
    return _mix_positions(weights, x_BLD, chosen_BLK, factors_BLK)

  def mix_part(weights, x_BLD, chosen_BLK, factors_BLK):
    is_first = lax.axis_index("tensor") == 0  # only one device adds the bias
    bias_out = jnp.where(is_first, weights.bias_out, 0)
    weights = weights._replace(bias_out=bias_out)
    part_BLD = _mix_positions(weights, x_BLD, chosen_BLK, factors_BLK)
    return lax.psum(part_BLD, "tensor")

  specs: Any = dict(
    kernel_in=PartitionSpec(None, None, "tensor"),
    bias_in=PartitionSpec(None, "tensor"),
    kernel_out=PartitionSpec(None, "tensor"),
    bias_out=PartitionSpec(),
  )
  positions = sharding.positions(*chosen_BLK.shape[:2])
  return jax.shard_map(
    mix_part,
    in_specs=(Weights(**specs), positions, positions, positions),
    out_specs=positions,
    # The check would reject the loops of `_mix_positions`, because their
    # results start as zeros, which are equal on all devices, and then differ.
    check_vma=False,
  )(weights, x_BLD, chosen_BLK, factors_BLK)


def _mix_positions(weights, x_BLD, chosen_BLK, factors_BLK):
  """Applies the experts to the positions of one device."""
  # Sort the choices of all positions by expert into tiles.
  num_experts = len(weights.kernel_in)
  tile = _tile(chosen_BLK.size, num_experts)
  chosen_1N = chosen_BLK.reshape(1, -1)
  rows = group_by_label(chosen_1N, num_experts, tile)
  groups = jax.tree.map(operator.itemgetter(0), rows)

  width = x_BLD.shape[-1]
  x_SD = x_BLD.reshape(-1, width)
  factors_SK = factors_BLK.reshape(len(x_SD), -1)
  out_SD = _mix_groups(x_SD, factors_SK, groups, weights)
  return out_SD.reshape(x_BLD.shape)


def _tile(num_choices, num_experts):
  """Returns the number of places in a tile, a power of two.

  Each expert gets about four tiles. Larger tiles would leave more places empty,
  and smaller tiles would read the weights more often.
  """
  mean = max(1, num_choices // (4 * num_experts))
  power = 1 << (mean.bit_length() - 1)
  return min(max(8, power), 256)


@jax.custom_vjp
def _mix_groups(x_SD, factors_SK, groups, weights):
  """Mixes flat arrays. Entry s * K + k is choice k of position s."""
  return _forward(x_SD, factors_SK, groups, weights)[0]


def _forward(x_SD, factors_SK, groups, weights):
  """Returns the sums, and the arrays that the backward pass needs.

  Of the intermediate results, only the first product h is stored; the others
  are recomputed.
  """
  tokens_VT, factors_VT = _fill(factors_SK, groups)
  rounded, num_filled = _prepare(weights, groups, x_SD.dtype)

  def compute(v, results):
    expert = _take(rounded, groups.labels[v])
    x_TD = x_SD[tokens_VT[v]]
    h_TF = _product(x_TD, expert.kernel_in)
    h_TF += expert.bias_in[None]
    h_TF = h_TF.astype(x_SD.dtype)

    y_TD = _product(activate(h_TF), expert.kernel_out)
    y_TD += expert.bias_out[None]
    y_TD *= factors_VT[v][:, None]
    return _put(results, v, (y_TD, h_TF))

  # Empty tiles come last and are not run, so their rows stay zero.
  _, d, f = weights.kernel_in.shape
  results = (
    jnp.zeros((*tokens_VT.shape, d), jnp.float32),
    jnp.zeros((*tokens_VT.shape, f), x_SD.dtype),
  )
  y_VTD, h_VTF = lax.fori_loop(0, num_filled, compute, results)
  out_SD = _sum_choices(y_VTD, groups, factors_SK.shape)
  return out_SD, (x_SD, factors_SK, groups, weights, h_VTF)


def _backward(saved, dout_SD):
  """Returns the gradients; None for the groups, which are integers.

  Tiles run one after another, so that the gradients of an expert are summed in
  a fixed order.
  """
  x_SD, factors_SK, groups, weights, h_VTF = saved
  dtype = x_SD.dtype
  tokens_VT, factors_VT = _fill(factors_SK, groups)
  rounded, num_filled = _prepare(weights, groups, dtype)

  def compute(v, carry):
    results, grads = carry
    label = groups.labels[v]
    expert = _take(rounded, label)
    x_TD = x_SD[tokens_VT[v]]
    dout_TD = dout_SD[tokens_VT[v]]
    factors_T1 = factors_VT[v][:, None]
    a_TF, activate_vjp = jax.vjp(activate, h_VTF[v])

    # The gradient of the activation, before the factor is applied.
    da_TF = _product(dout_TD.astype(dtype), expert.kernel_out.T)
    # A factor's gradient is the product of dout and the expert's output, which
    # is a @ kernel_out + bias_out; so the output need not be stored.
    dfactors_T = (a_TF * da_TF).sum(1)
    dfactors_T += dout_TD @ expert.bias_out

    dy_TD = factors_T1 * dout_TD
    (dh_TF,) = activate_vjp((factors_T1 * da_TF).astype(dtype))
    dx_TD = _product(dh_TF, expert.kernel_in.T)

    new = Weights(
      kernel_in=_product(x_TD.T, dh_TF),
      bias_in=dh_TF.sum(0, dtype=jnp.float32),
      kernel_out=_product(a_TF.T, dy_TD.astype(dtype)),
      bias_out=dy_TD.sum(0),
    )
    # Tiles of the same expert add to the same weights.
    grads = jax.tree.map(lambda g, x: g.at[label].add(x), grads, new)
    return _put(results, v, (dx_TD, dfactors_T)), grads

  results = (
    jnp.zeros((*tokens_VT.shape, x_SD.shape[1]), jnp.float32),
    jnp.zeros(tokens_VT.shape, jnp.float32),
  )
  carry = results, jax.tree.map(jnp.zeros_like, weights)
  carry = lax.fori_loop(0, num_filled, compute, carry)
  (dx_VTD, dfactors_VT), grads = carry

  dx_SD = _sum_choices(dx_VTD, groups, factors_SK.shape).astype(dtype)
  dfactors_SK = dfactors_VT.reshape(-1)[groups.slots].reshape(factors_SK.shape)
  return dx_SD, dfactors_SK, None, grads


_mix_groups.defvjp(_forward, _backward)


def _fill(factors_SK, groups):
  """Returns the position and the factor at each place of each tile, [V, T].

  Empty places get position 0 and factor 0.
  """
  entries_VT = jnp.maximum(groups.entries, 0)
  tokens_VT = entries_VT // factors_SK.shape[1]
  factors_VT = factors_SK.reshape(-1)[entries_VT]
  return tokens_VT, jnp.where(groups.entries < 0, 0, factors_VT)


def _sum_choices(y_VTD, groups, shape):
  """Sums the results of the choices of each position: [S, D].

  Each position gathers its results, because a scatter might add them in any
  order.
  """
  y_SKD = y_VTD.reshape(-1, y_VTD.shape[-1])[groups.slots.reshape(shape)]
  return y_SKD.sum(1)


def _prepare(weights, groups, dtype):
  """Casts kernels to the dtype of products, and counts the filled tiles."""
  rounded = weights._replace(
    kernel_in=weights.kernel_in.astype(dtype),
    kernel_out=weights.kernel_out.astype(dtype),
  )
  is_filled_V = groups.labels < len(weights.kernel_in)
  return rounded, is_filled_V.sum(dtype=jnp.int32)


def _product(x, y):
  # 16-bit products are accumulated in float32.
  return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def _put(arrays, i, values):
  """Sets entry i of each array."""
  return jax.tree.map(lambda x, y: x.at[i].set(y), arrays, values)


def _take(arrays, i):
  """Returns entry i of each array."""
  return jax.tree.map(lambda x: x[i], arrays)
