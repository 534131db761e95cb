"""What a config names, made: data source, network, optimizer."""

import dataclasses
import functools

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sparse_transformer import data
from sparse_transformer.model import transformer as model
from sparse_transformer.training import evaluate, step as training


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
  """The pieces of a run. Making one reads no data and computes nothing."""

  config: object

  @functools.cached_property
  def source(self):
    return data.source(self.config.data)

  @functools.cached_property
  def model(self):
    return model.configure(self.config, self.source)

  @functools.cached_property
  def optimizer(self):
    return training.make_optimizer(self.config)

  @functools.cached_property
  def apply(self):
    """The network as a function (params, tokens_BL, key=None)."""
    return training.make_apply(self.model)

  @functools.cached_property
  def losses(self):
    """Nats of each position, (params, tokens_BL) -> [B, L], compiled once."""
    return evaluate.make_losses(self.apply)

  def init(self):
    """The state before the first step."""
    return training.init_state(
      self.model, self.optimizer, self.config.train.seed
    )

  def step(self, state, tokens_BL):
    """One update, `training.train_step`: (new state, metrics)."""
    return training.train_step(
      state,
      tokens_BL,
      apply=self.apply,
      optimizer=self.optimizer,
      config=self.config,
    )

  def restore(self, checkpoints, step=None):
    """The state at a step of a run, by default its last."""
    return checkpoints.restore(jax.eval_shape(self.init), step)

  @functools.cached_property
  def batch_sharding(self):
    """Batches are split over all local devices, everything else is whole."""
    # Auto: the compiler propagates; jax's default asks for explicit types.
    mesh = jax.make_mesh(
      (jax.local_device_count(),), ("data",), axis_types=(AxisType.Auto,)
    )
    return NamedSharding(mesh, PartitionSpec("data"))
