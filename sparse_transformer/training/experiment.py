"""The objects that a config describes: data source, network, optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from sparse_transformer import data, model as model_lib, rules
from sparse_transformer.training import costs, evaluate, step as step_lib
from sparse_transformer.training.optimizer import make_optimizer

if TYPE_CHECKING:  # Orbax takes a second to import, and is not always needed
  from sparse_transformer.training.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
  """The pieces of a run. Construction reads no data and computes nothing.

  Attributes:
    config: the settings.
    devices: those that batches are split across; None for the local ones.

  Raises:
    ValueError: the config breaks one of the `rules`.
  """

  config: ConfigDict
  devices: tuple[jax.Device, ...] | None = None

  def __post_init__(self) -> None:
    rules.check(self.config)

  @functools.cached_property
  def source(self) -> data.Source:
    return data.source(self.config.data)

  @functools.cached_property
  def model(self) -> model_lib.Config:
    return model_lib.configure(self.config, self.source)

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformation:
    return make_optimizer(self.config)

  @functools.cached_property
  def apply(self) -> Callable[..., jax.Array]:
    """The network: (params, tokens_BL, rng=None) -> logits_BLV."""
    return model_lib.make_apply(self.model)

  @functools.cached_property
  def losses(self) -> evaluate.Losses:
    """Jitted (params, tokens_BL) -> nats of each position [B, L].

    Raises:
      Unsupported: the backend of attention cannot run on this machine.
    """
    costs.check_attention(self.config, self.model)
    return evaluate.make_losses(self.apply)

  def init(self) -> step_lib.State:
    """The state before the first step."""
    return step_lib.init_state(
      self.model, self.optimizer, self.config.train.seed
    )

  def step(
    self, state: step_lib.State, tokens_BL: jax.Array
  ) -> tuple[step_lib.State, dict[str, jax.Array]]:
    """One update: the new state and its metrics, see `train_step`."""
    return step_lib.train_step(
      state,
      tokens_BL,
      predict=model_lib.make_predict(self.model),
      optimizer=self.optimizer,
      config=self.config,
    )

  def batches(self, examples: Sequence) -> Sequence[np.ndarray]:
    """The batches of a run: `batches[i]` is for the step after i updates.

    Args:
      examples: the examples of the training split, or their numbers.
    """
    settings = self.config.train
    return data.batches(examples, settings.batch_size, settings.seed)

  def restore(
    self, checkpoints: Checkpoints, step: int | None = None
  ) -> step_lib.State:
    """The state at a step of a run, by default the last one saved."""
    return checkpoints.restore(jax.eval_shape(self.init), step)

  @functools.cached_property
  def mesh(self) -> Mesh:
    """The devices, along one axis. It is in context wherever kernels run."""
    devices = self.devices or tuple(jax.local_devices())
    # Auto: the compiler propagates shardings; JAX's default is explicit types.
    return jax.make_mesh(
      (len(devices),), ("data",), (AxisType.Auto,), devices=devices
    )

  @property
  def batch_sharding(self) -> NamedSharding:
    """Batches are split across devices; everything else is replicated."""
    return NamedSharding(self.mesh, PartitionSpec("data"))

  @property
  def replicated(self) -> NamedSharding:
    """The sharding of the state: replicated on all devices."""
    return NamedSharding(self.mesh, PartitionSpec())


def check_batch(config: ConfigDict, devices: int | None = None) -> None:
  """Checks that a training batch can be split into devices and micro-batches.

  Args:
    config: the experiment's config.
    devices: how many; None for the local ones.

  Raises:
    ValueError: it cannot.
  """
  train, devices = config.train, devices or jax.local_device_count()
  if train.batch_size % (devices * train.accumulation):
    raise ValueError(
      f"train.batch_size={train.batch_size} must be a multiple of {devices}"
      f" devices x train.accumulation={train.accumulation}"
    )


def check_eval_batch(config: ConfigDict) -> None:
  """Checks that a batch of evaluation can be split into devices.

  Raises:
    ValueError: it cannot.
  """
  size, devices = config.eval.batch_size, jax.local_device_count()
  if size % devices:
    raise ValueError(
      f"eval.batch_size={size} must be a multiple of {devices} devices"
    )
