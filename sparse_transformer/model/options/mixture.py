"""Experts: in every second block, a mixture of MLPs in place of the MLP."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

from sparse_transformer.model import experts
from sparse_transformer.model.block import ResidualBlock, make_mlp, weight_init
from sparse_transformer.model.hyperparameters import Config
from sparse_transformer.model.options.option import Option

PER_TOKEN = 2  # experts that each position passes through


class ExpertBlock(ResidualBlock):
  """A residual block with a mixture of experts in place of its MLP.

  The experts are MLPs, stacked along a first axis. A router, a linear layer in
  float32, chooses `PER_TOKEN` of them for each position.
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
    chosen_BLK, factors_BLK = experts.choose(logits_BLE, PER_TOKEN)
    layers = self.experts_in, self.experts_out
    weights = [x[...] for layer in layers for x in (layer.kernel, layer.bias)]
    b_BLD = experts.mix(
      y_BLD, chosen_BLK, factors_BLK, experts.Weights(*weights)
    )
    return self._drop(b_BLD, rng), experts.measure(logits_BLE, chosen_BLK)


class Mixture(Option):
  """`model.experts`."""

  stacked = "expert_blocks", "experts_in", "experts_out"
  losses = dict(load_balance=0.01, router_z=0.001)

  @property
  def is_used(self) -> bool:
    return self.config.experts > 0

  def check(self) -> None:
    if self.config.experts < PER_TOKEN:
      raise ValueError(
        f"model.experts={self.config.experts} must be at least {PER_TOKEN}, as"
        " many as each position passes through, or 0 for none"
      )
    if self.config.num_layers < 2:
      raise ValueError(
        f"model.experts={self.config.experts}, but every second block has them:"
        f" model.num_layers={self.config.num_layers} must be at least 2"
      )


@functools.lru_cache(maxsize=64)
def block_kinds(config: Config) -> tuple[type[ResidualBlock], ...]:
  """The class of each layer's block."""
  has_experts = lambda layer: config.experts and layer % 2
  return tuple(
    ExpertBlock if has_experts(layer) else ResidualBlock
    for layer in range(config.num_layers)
  )


def num_active(config: Config, path: tuple[Any, ...], size: int) -> int:
  """How many numbers of the parameter at a path one position uses."""
  is_shared = not {"experts_in", "experts_out"} & {key.key for key in path}
  return size if is_shared else size // config.experts * PER_TOKEN
