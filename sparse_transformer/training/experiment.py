"""The objects that a config describes: data source, network, update.

An `Experiment` creates each object when it is first used, so that a command
takes no time for objects that it does not need. A `Run` is an experiment with a
checkpoint to read.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparse_transformer import (
  config as config_lib,
  data,
  model as model_lib,
  schema,
)
from sparse_transformer.attention import registry
from sparse_transformer.data import files
from sparse_transformer.model import sharding
from sparse_transformer.training import costs, step as step_lib
from sparse_transformer.training.checkpoints.store import Saved
from sparse_transformer.training.distributed import mesh as mesh_lib, processes
from sparse_transformer.training.optimizer import make_optimizer, schedule


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
  """The objects of a run. Construction reads no data and computes nothing.

  Attributes:
    config: the config; the constructor also accepts a ConfigDict.
    devices: the devices of the mesh, or None for all devices.
    shared: a data source to use instead of a new one, for example that of
      another experiment with the same data, or None.

  Raises ValueError if a field of the config is invalid, see `schema`.
  """

  config: schema.Config
  devices: tuple[jax.Device, ...] | None = None
  shared: data.Source | None = None
  _traces: dict[Any, Any] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )
  _programs: dict[Any, Any] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )

  def __post_init__(self) -> None:
    object.__setattr__(self, "config", schema.typed(self.config))

  @functools.cached_property
  def source(self) -> data.Source:
    """The data source that the config names."""
    return self.shared or data.source(self.config.data)

  @functools.cached_property
  def examples(self) -> Sequence[np.ndarray]:
    """The examples of the training split."""
    return self.source.examples("train")

  @functools.cached_property
  def numbers(self) -> Sequence[np.ndarray]:
    """The indices [B] of the examples in each batch.

    `numbers[i]` contains the indices for the batch that follows i updates. For
    given data, the indices depend only on the seed, i and the batch size.
    """
    settings = self.config.train
    numbers = range(len(self.examples))
    return data.batches(numbers, settings.batch_size, settings.seed)

  def batch(self, updates: int) -> jax.Array:
    """Reads a batch onto the devices of the mesh.

    Args:
      updates: the number of updates before this batch.

    Returns:
      Integers [B, L]; for labelled data, rows [B, L + 2], see `data.Sequences`.
    """
    numbers = self.numbers[updates]
    arrangement = self.source.arrangement
    seed = self.config.train.seed

    # A row depends only on (seed, updates, i), so that a resumed run sees the
    # same batches on any number of processes.
    def read_row(i):
      labels = arrangement.draw(seed, updates, i)
      example = self.examples[int(numbers[i])]
      return arrangement.arrange(example, labels)

    shape = len(numbers), self.model.row_length
    return processes.place(read_row, shape, self.batch_sharding)

  def batch_like(self, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of a batch.

    By default, the dtype is the smallest that can represent all symbols.
    Labelled rows may need a larger dtype, because they also contain the lengths
    of sequences.
    """
    return jax.ShapeDtypeStruct(
      (self.config.train.batch_size, self.model.row_length),
      dtype or np.min_scalar_type(self.model.vocab_size - 1),
      sharding=self.batch_sharding,
    )

  @functools.cached_property
  def model(self) -> model_lib.Config:
    """The config of the network, with the vocabulary and length of the data."""
    return model_lib.configure(self.config, self.source)

  def stage(self, step: int) -> str:
    """Returns how a sentence refers to the weights of a step.

    The result is "step 700", for example. For step 0 of a run that `convert`
    made, it is "converted weights", because these weights are not random.
    """
    is_converted = self.config.train.init_from and not step
    return "converted weights" if is_converted else f"step {step:,}"

  @functools.cached_property
  def apply(self) -> Callable[..., jax.Array]:
    """The network: (params, tokens_BL, rng=None) -> logits."""
    return model_lib.make_apply(self.model)

  @functools.cached_property
  def losses(self) -> Callable[..., Any]:
    """The function that scores batches, see `step.make_losses`.

    Raises Unsupported if no backend can run the attention on these devices.
    """
    # Resolve backends before the network is traced, because an error during
    # tracing would not name the setting.
    for request in costs.attention_requests(self.config, self.model):
      registry.resolve(self.model.backend, request)
    return step_lib.make_losses(self.apply)

  def init(self) -> step_lib.State:
    """Returns the state before the first step, with random weights."""
    params = model_lib.init_params(self.model, self.config.train.seed)
    optimizer = make_optimizer(self.config)
    return step_lib.init_state(params, optimizer, self.model.dtype)

  @functools.cached_property
  def like(self) -> step_lib.State:
    """The shapes, dtypes and shardings of the state."""
    shapes = costs.abstract_state(self.config, self.model)
    return mesh_lib.split(self.mesh, shapes)

  @property
  def _shardings(self):
    return jax.tree.map(lambda x: x.sharding, self.like)

  def first_state(self) -> step_lib.State:
    """Computes `init` on the devices of the mesh.

    Each device creates only its own part of each array, because one device may
    be too small for the whole state.
    """
    return jax.jit(self.init, out_shardings=self._shardings)()

  @functools.cached_property
  def train_step(
    self,
  ) -> Callable[..., tuple[step_lib.State, dict[str, jax.Array]]]:
    """A step of training: (state, tokens_BL, schedule) -> (state, metrics)."""
    return functools.partial(
      step_lib.train_step,
      predict=model_lib.make_predict(self.model),
      config=self.config,
    )

  @functools.cached_property
  def update(self) -> Any:
    """Jitted `train_step`: (state, tokens_BL, schedule) -> (state, metrics).

    The argument `state` is donated, so callers must not use it afterwards.
    """
    # Replicate metrics over all devices, so that any process can read them.
    everywhere = NamedSharding(self.mesh, PartitionSpec())
    return jax.jit(
      self.train_step,
      donate_argnums=0,
      out_shardings=(self._shardings, everywhere),
    )

  def trace_step(self, remat: str, dtype: Any = None) -> Any:
    """Traces `update`, which takes about a second.

    Args:
      remat: what the backward pass recomputes, an item of `schema.REMATS`.
      dtype: the dtype of batches; by default, that of `batch_like`.

    Returns:
      A `jax.stages.Traced`, which `compile_step` compiles.
    """
    key = remat, dtype
    if key not in self._traces:
      inputs = self.like, self.batch_like(dtype), schedule(self.config)
      update = self.with_remat(remat).update
      with jax.set_mesh(self.mesh):
        self._traces[key] = update.trace(*inputs)

    return self._traces[key]

  def compile_step(self, remat: str, dtype: Any = None) -> Any:
    """Compiles `update`, which may take minutes.

    Returns the existing program if `update` was already compiled with the same
    arguments.

    Args:
      remat, dtype: as in `trace_step`.

    Returns:
      The compiled program, which is called like `update`.
    """
    key = remat, dtype
    if key not in self._programs:
      traced = self.trace_step(remat, dtype)
      with jax.set_mesh(self.mesh):
        self._programs[key] = traced.lower().compile()

    return self._programs[key]

  def with_remat(self, remat: str) -> "Experiment":
    """Returns an experiment with another `model.remat` and the same data."""
    config = self.config.replace(**{"model.remat": remat})
    return Experiment(config, self.devices, self.source)

  @functools.cached_property
  def mesh(self) -> Mesh:
    """The mesh of devices. To run the network, set it with `jax.set_mesh`.

    Raises ValueError if the mesh does not fit the devices or the network.
    """
    mesh = mesh_lib.make(self.config, self.devices)
    mesh_lib.check_network(self.model, mesh.shape)
    return mesh

  @property
  def batch_sharding(self) -> NamedSharding:
    """The sharding of batches [B, L]."""
    return NamedSharding(self.mesh, PartitionSpec(sharding.SEQUENCES))


@dataclasses.dataclass(frozen=True)
class Run:
  """A saved step of a run, as returned by `open_run`.

  Attributes:
    saved: the checkpoints of the run.
    step: the step to read.
    config: the config with which this step was trained. Fields that any resumed
      run may change, such as paths and devices, have their values from
      config.json.
    experiment: the experiment of this config with overrides applied.
  """

  saved: Saved
  step: int
  config: schema.Config
  experiment: Experiment

  @property
  def workdir(self) -> pathlib.Path:
    """The absolute path of the folder of the run."""
    return self.saved.workdir

  @property
  def has_other_data(self) -> bool:
    """Whether overrides select other data than the run was trained on."""
    # Other fields of data, such as the length, would change the network, so
    # `changes` rejects them.
    own = self.config.data
    used = self.experiment.config.data
    return (own.name, own.path) != (used.name, used.path)

  def changes(self, allowed: config_lib.Allowed) -> config_lib.Changes:
    """Compares the experiment's config with the one that trained the step.

    Args:
      allowed: the effects that changes may have, as a policy of `config`.

    Returns:
      {"group.field": (old, new)} for each field that differs.

    Raises ValueError if a change affects something that is not allowed.
    """
    place = f"checkpoint {self.saved.path(self.step)}"
    config = self.experiment.config
    return config_lib.compare(self.config, config, allowed, place)

  def restore(self, with_data: bool = False) -> step_lib.State:
    """Restores the state at the step.

    Args:
      with_data: whether the caller reads data. If so, the data must be the same
        as in the run, unless overrides name other data. Symbols and classes
        must always be the same as in the run.

    Raises:
      FileNotFoundError: the checkpoint has just been deleted.
      ValueError: the checkpoint is damaged, belongs to another network, or was
        trained on other data.
    """
    source = self.experiment.source

    # Compare fields before arrays are read, because an error about shapes would
    # not name the setting that differs.
    if with_data and self.has_other_data:
      self.changes(config_lib.TO_READ_OTHER_DATA)
    else:
      self.changes(config_lib.TO_READ)
      if with_data:
        self.saved.check_data(self.step, source.digest())
    self.saved.check_symbols(self.step, source)
    return self.saved.restore(self.experiment.like, self.step)


def open_run(
  workdir: str | os.PathLike,
  overrides: Mapping[str, Any] | None = None,
  step: int | str | None = None,
) -> Run:
  """Opens a run at a step.

  The config of the run may have changed since that step. The experiment uses
  the config with which the step was trained, with overrides applied.

  Args:
    workdir: the folder of the run.
    overrides: {"group.field": value}.
    step: which step to open, see `Saved.find`.

  Raises:
    FileNotFoundError: the run has no config, or does not have this step.
    ValueError: the checkpoint is damaged, or config.json is from another run.
  """
  saved = Saved(workdir)
  step = saved.find(step)
  saved.verify(step)

  # The configs differ if a run resumed with --allow_changes, because it writes
  # config.json at its start and its first checkpoint only later.
  made = saved.config(step)
  changes = config_lib.compare(
    before=made,
    after=config_lib.read_config(workdir),
    allowed=config_lib.WITH_ALLOW_CHANGES,
    place=f"checkpoint {saved.path(step)}",
  )

  # Fields such as paths and devices are current in config.json. Fields that
  # affect weights or scores must be those of the checkpoint.
  free = {}
  edited = []
  for name, (_, value) in changes.items():
    if schema.affects(name) in config_lib.TO_RESUME:
      free[name] = value
    else:
      edited.append(f"--config.{name}={value}")

  # Warn only about the last step, because earlier steps are expected to have a
  # different config.
  if edited and step == saved.find():
    files.warn(
      f"step {step:,} of {workdir} was trained with a config that differs from"
      f" config.json; it is used with its own config, not with"
      f" {' '.join(edited)}"
    )

  config = made.replace(**free)
  experiment = Experiment(config.replace(**overrides or {}))
  return Run(saved=saved, step=step, config=config, experiment=experiment)
