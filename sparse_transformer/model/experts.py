"""A mixture of experts: each position passes through the few MLPs it chooses.

Every choice is computed, so what a position gets depends on that one alone.

S = positions of all sequences, K = choices of each, E = experts, D and F =
widths outside and inside of them. V tiles of T places hold choices by expert,
and run in turn, which fixes the order in which gradients are summed.
"""

import functools
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
from sparse_transformer.model.configure import Config

PER_TOKEN = 2  # experts that each position passes through
# Names of parameters with a first axis of layers, or of experts.
STACKED = "expert_blocks", "experts_in", "experts_out"
LOSSES = dict(load_balance=0.01, router_z=0.001)  # see `Option.losses`


class ExpertBlock(ResidualBlock):
  """A residual block with experts, stacked MLPs, in place of its MLP.

  A router, a linear layer in float32, chooses some for each position.
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
    split = nnx.split_rngs(splits=config.experts)
    make = split(nnx.vmap(functools.partial(make_mlp, config)))
    self.experts_in, self.experts_out = make(rngs)

  def _enter_mlp(self, y_BLD):
    return y_BLD

  def _leave_mlp(self, y_BLD, rng):
    logits_BLE = self.router(y_BLD.astype(jnp.float32))
    chosen_BLK, factors_BLK = choose(logits_BLE, PER_TOKEN)
    layers = self.experts_in, self.experts_out
    weights = [x[...] for layer in layers for x in (layer.kernel, layer.bias)]
    b_BLD = mix(y_BLD, chosen_BLK, factors_BLK, Weights(*weights))
    return self._drop(b_BLD, rng), measure(logits_BLE, chosen_BLK)


@functools.lru_cache(maxsize=64)
def block_kinds(config: Config) -> tuple[type[ResidualBlock], ...]:
  """The class of each layer's block: with `model.experts`, every second one."""
  has_experts = lambda layer: config.experts and layer % 2
  return tuple(
    ExpertBlock if has_experts(layer) else ResidualBlock
    for layer in range(config.num_layers)
  )


def num_active(config: Config, path: tuple[Any, ...], size: int) -> int:
  """How much of the parameter at a path one position uses."""
  is_shared = not {"experts_in", "experts_out"} & {key.key for key in path}
  return size if is_shared else size // config.experts * PER_TOKEN


class Weights(NamedTuple):
  """The weights of all experts, in float32."""

  kernel_in: jax.Array  # [E, D, F]
  bias_in: jax.Array  # [E, F]
  kernel_out: jax.Array  # [E, F, D]
  bias_out: jax.Array  # [E, D]


def choose(logits_BLE: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
  """The `num` experts of each position, and the factors of their outputs."""
  # Probabilities among all experts: among the chosen ones, a single one would
  # have no gradient.
  p_BLE = jax.nn.softmax(logits_BLE)
  chosen_BLK = lax.top_k(lax.stop_gradient(p_BLE), num)[1]
  chosen_BLK = checkpoint_name(chosen_BLK, NOT_RECOMPUTED)
  return chosen_BLK, jnp.take_along_axis(p_BLE, chosen_BLK, axis=-1)


def measure(logits_BLE: jax.Array, chosen_BLK: jax.Array) -> dict[str, Any]:
  """Auxiliary losses of a router, and how it uses the experts.

  `load_balance` is E times the sum over experts of their share of the choices
  times their mean probability (Fedus et al. 2021, arXiv 2101.03961, section
  2.2), `router_z` the mean squared log-sum-exp of the logits (Zoph et al. 2022,
  arXiv 2202.08906, section 3.3), `expert_load` [E] the choices of each expert,
  relative to their mean.
  """
  num_experts = logits_BLE.shape[-1]
  p_E = jax.nn.softmax(logits_BLE).mean((0, 1))
  is_chosen = jax.nn.one_hot(chosen_BLK, num_experts)
  load_E = num_experts * is_chosen.mean((0, 1, 2))
  return dict(
    load_balance=(load_E * p_E).sum(),
    router_z=(jax.nn.logsumexp(logits_BLE, axis=-1) ** 2).mean(),
    expert_load=load_E,
  )


def mix(
  x_BLD: jax.Array,
  chosen_BLK: jax.Array,
  factors_BLK: jax.Array,
  weights: Weights,
) -> jax.Array:
  """The sum of what the chosen experts return, times their factors: [B, L, D].

  On a mesh, each device computes its own positions, with its own part of each
  expert's inner width.
  """
  arrays = x_BLD, chosen_BLK, factors_BLK
  if sharding.size(*sharding.AXES) == 1:
    return _mix_positions(weights, *arrays)
  positions = sharding.positions(*chosen_BLK.shape[:2])
  axes = (None, None, "tensor"), (None, "tensor"), (None, "tensor"), ()
  of_weights: Any = [PartitionSpec(*x) for x in axes]

  def mix_part(weights, *arrays):
    is_first = lax.axis_index("tensor") == 0  # only one adds the bias
    bias_out = jnp.where(is_first, weights.bias_out, 0)
    weights = weights._replace(bias_out=bias_out)
    return lax.psum(_mix_positions(weights, *arrays), "tensor")

  return jax.shard_map(
    mix_part,
    in_specs=(Weights(*of_weights), positions, positions, positions),
    out_specs=positions,
    # The carry of a loop would have to vary over devices from its start.
    check_vma=False,
  )(weights, *arrays)


def _mix_positions(weights, x_BLD, chosen_BLK, factors_BLK):
  """`mix` on one device."""
  num_experts = len(weights.kernel_in)
  # A power of two, with four tiles for each expert: larger ones waste more
  # places, smaller ones read weights more often.
  mean = max(1, chosen_BLK.size // (4 * num_experts))
  tile = min(max(8, 1 << (mean.bit_length() - 1)), 256)
  groups = group_by_label(chosen_BLK.reshape(1, -1), num_experts, tile)
  groups = jax.tree.map(lambda x: x[0], groups)
  x_SD = x_BLD.reshape(-1, x_BLD.shape[-1])
  factors_SK = factors_BLK.reshape(len(x_SD), -1)
  return _mix_groups(x_SD, factors_SK, groups, weights).reshape(x_BLD.shape)


@jax.custom_vjp
def _mix_groups(x_SD, factors_SK, groups, weights):
  """`mix` of flat arrays, with the choices S * K + k in groups."""
  return _forward(x_SD, factors_SK, groups, weights)[0]


def _forward(x_SD, factors_SK, groups, weights):
  tokens_VT, factors_VT = _fill(factors_SK, groups)
  rounded, num = _prepare(weights, groups, x_SD.dtype)

  def compute(v, results):
    expert = _take(rounded, groups.labels[v])
    h_TF = _product(x_SD[tokens_VT[v]], expert.kernel_in)
    h_TF = (h_TF + expert.bias_in[None]).astype(x_SD.dtype)
    y_TD = _product(activate(h_TF), expert.kernel_out) + expert.bias_out[None]
    new = factors_VT[v][:, None] * y_TD, h_TF
    return _put(results, v, new)

  d, f = weights.kernel_in.shape[1:]
  results = (
    jnp.zeros((*tokens_VT.shape, d), jnp.float32),
    jnp.zeros((*tokens_VT.shape, f), x_SD.dtype),
  )
  y_VTD, h_VTF = lax.fori_loop(0, num, compute, results)
  out_SD = _sum_choices(y_VTD, groups, factors_SK.shape)
  return out_SD, (x_SD, factors_SK, groups, weights, h_VTF)


def _backward(saved, dout_SD):
  x_SD, factors_SK, groups, weights, h_VTF = saved
  tokens_VT, factors_VT = _fill(factors_SK, groups)
  dtype = x_SD.dtype
  rounded, num = _prepare(weights, groups, dtype)

  def compute(v, carry):
    results, grads = carry
    label, factors_T1 = groups.labels[v], factors_VT[v][:, None]
    expert = _take(rounded, label)
    x_TD, dout_TD = x_SD[tokens_VT[v]], dout_SD[tokens_VT[v]]
    a_TF, activate_vjp = jax.vjp(activate, h_VTF[v])
    # Gradient of the expert's output before it is multiplied by its factor.
    da_TF = _product(dout_TD.astype(dtype), expert.kernel_out.T)
    dfactors_T = (a_TF * da_TF).sum(1) + dout_TD @ expert.bias_out
    dy_TD = factors_T1 * dout_TD
    (dh_TF,) = activate_vjp((factors_T1 * da_TF).astype(dtype))
    dx_TD = _product(dh_TF, expert.kernel_in.T)
    new = Weights(
      kernel_in=_product(x_TD.T, dh_TF),
      bias_in=dh_TF.sum(0, dtype=jnp.float32),
      kernel_out=_product(a_TF.T, dy_TD.astype(dtype)),
      bias_out=dy_TD.sum(0),
    )
    grads = jax.tree.map(lambda g, x: g.at[label].add(x), grads, new)
    return _put(results, v, (dx_TD, dfactors_T)), grads

  shapes = (*tokens_VT.shape, x_SD.shape[1]), tokens_VT.shape
  results = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
  carry = results, jax.tree.map(jnp.zeros_like, weights)
  carry = lax.fori_loop(0, num, compute, carry)
  (dx_VTD, dfactors_VT), grads = carry
  dx_SD = _sum_choices(dx_VTD, groups, factors_SK.shape).astype(dtype)
  dfactors_SK = dfactors_VT.reshape(-1)[groups.slots].reshape(factors_SK.shape)
  return dx_SD, dfactors_SK, None, grads


_mix_groups.defvjp(_forward, _backward)


def _fill(factors_SK, groups):
  """(positions tokens_VT in the tiles, their factors_VT: 0 if empty)."""
  entries_VT = jnp.maximum(groups.entries, 0)
  factors_VT = factors_SK.reshape(-1)[entries_VT]
  factors_VT = jnp.where(groups.entries < 0, 0, factors_VT)
  return entries_VT // factors_SK.shape[1], factors_VT


def _sum_choices(y_VTD, groups, shape):
  """Sums the results of the choices of each position: [S, D]."""
  y_SKD = y_VTD.reshape(-1, y_VTD.shape[-1])[groups.slots.reshape(shape)]
  return y_SKD.sum(1)


def _prepare(weights, groups, dtype):
  """Weights with kernels in the dtype of products, number of filled tiles."""
  into, out = (x.astype(dtype) for x in (weights.kernel_in, weights.kernel_out))
  num = (groups.labels < len(into)).sum(dtype=jnp.int32)
  return weights._replace(kernel_in=into, kernel_out=out), num


def _product(x, y):
  return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def _put(arrays, i, values):
  return jax.tree.map(lambda x, y: x.at[i].set(y), arrays, values)


def _take(arrays, i):
  return jax.tree.map(lambda x: x[i], arrays)
