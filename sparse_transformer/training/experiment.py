"""The objects that a config describes: data source, network, update.

An `Experiment` makes each of them when it is first used, so that a command pays
only for what it needs. A `Run` is an experiment with a checkpoint to read.
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
  """The pieces of a run. Construction reads no data and computes nothing.

  Attributes:
    config: the settings; the constructor also takes a ConfigDict.
    devices: the devices of the mesh; None for all of them.
    shared: a data source to use in place of a new one, such as that of another
      experiment with the same data.

  Raises ValueError if the config breaks a rule of `schema`.
  """

  config: schema.Config
  devices: tuple[jax.Device, ...] | None = None
  shared: data.Source | None = None
  _programs: dict[Any, Any] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )

  def __post_init__(self) -> None:
    object.__setattr__(self, "config", schema.typed(self.config))

  @functools.cached_property
  def source(self) -> data.Source:
    """The data that the config names."""
    return self.shared or data.source(self.config.data)

  @functools.cached_property
  def examples(self) -> Sequence[np.ndarray]:
    """The examples of the training split."""
    return self.source.examples("train")

  @functools.cached_property
  def numbers(self) -> Sequence[np.ndarray]:
    """The example numbers of each batch: `numbers[i]` [B] after i updates.

    They are a function of the seed, the step and the size of batches alone.
    """
    settings = self.config.train
    numbers = range(len(self.examples))
    return data.batches(numbers, settings.batch_size, settings.seed)

  def batch(self, updates: int) -> jax.Array:
    """Reads a batch onto the devices of the mesh.

    Args:
      updates: how many updates come before it, from 0.

    Returns integers [B, L]; of labelled data, rows [B, L + 2], see
    `data.Sequences`.
    """
    numbers = self.numbers[updates]
    arrangement = self.source.arrangement
    seed = self.config.train.seed

    # A row is a function of (seed, updates, i) alone: a run that resumes, on
    # any number of processes, sees the same batches.
    def read_row(i):
      labels = arrangement.draw(seed, updates, i)
      example = self.examples[int(numbers[i])]
      return arrangement.arrange(example, labels)

    shape = len(numbers), self.model.row_length
    return processes.place(read_row, shape, self.batch_sharding)

  def batch_like(self, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of a batch.

    By default the dtype is the smallest that holds all symbols. Labelled rows,
    which also hold numbers of symbols, may need a larger one.
    """
    return jax.ShapeDtypeStruct(
      (self.config.train.batch_size, self.model.row_length),
      dtype or np.min_scalar_type(self.model.vocab_size - 1),
      sharding=self.batch_sharding,
    )

  @functools.cached_property
  def model(self) -> model_lib.Config:
    """The network's config, whose vocabulary and length are the data's."""
    return model_lib.configure(self.config, self.source)

  def stage(self, step: int) -> str:
    """Names the weights of a step in a sentence, such as "step 700".

    Converted weights have step 0, although they are not random.
    """
    is_converted = self.config.train.init_from and not step
    return "converted weights" if is_converted else f"step {step:,}"

  @functools.cached_property
  def apply(self) -> Callable[..., jax.Array]:
    """The network: (params, tokens_BL, rng=None) -> logits."""
    return model_lib.make_apply(self.model)

  @functools.cached_property
  def losses(self) -> Callable[..., Any]:
    """What scores batches, see `step.make_losses`.

    Raises Unsupported if attention cannot run here.
    """
    # The backend is resolved before the network is traced: an error while
    # tracing would not name the setting.
    for request in costs.attention_requests(self.config, self.model):
      registry.resolve(self.model.backend, request)
    return step_lib.make_losses(self.apply)

  def init(self) -> step_lib.State:
    """The state before the first step."""
    params = model_lib.init_params(self.model, self.config.train.seed)
    optimizer = make_optimizer(self.config)
    return step_lib.init_state(params, optimizer, self.model.dtype)

  @functools.cached_property
  def like(self) -> step_lib.State:
    """The state as shapes, dtypes and shardings."""
    shapes = costs.abstract_state(self.config, self.model)
    return mesh_lib.split(self.mesh, shapes)

  @property
  def _shardings(self):
    return jax.tree.map(lambda x: x.sharding, self.like)

  def first_state(self) -> step_lib.State:
    """Computes `init` on the devices of the mesh.

    Each array is made in parts, where it belongs: one device may be too small
    for the whole state.
    """
    return jax.jit(self.init, out_shardings=self._shardings)()

  @functools.cached_property
  def step(self) -> Callable[..., tuple[step_lib.State, dict[str, jax.Array]]]:
    """`train_step`: (state, tokens_BL, schedule) -> (new state, metrics)."""
    return functools.partial(
      step_lib.train_step,
      predict=model_lib.make_predict(self.model),
      config=self.config,
    )

  @functools.cached_property
  def update(self) -> Any:
    """Jitted `step`: (state, tokens_BL, schedule) -> (new state, metrics).

    It reuses the memory of the state that it is given, which is lost.
    """
    # Metrics are copied to each device, so that any process can read them.
    everywhere = NamedSharding(self.mesh, PartitionSpec())
    return jax.jit(
      self.step,
      donate_argnums=0,
      out_shardings=(self._shardings, everywhere),
    )

  def compile_step(self, remat: str, dtype: Any = None) -> Any:
    """Compiles `update`, which may take minutes, once for the same arguments.

    Args:
      remat: what the backward pass recomputes, from `rematerialization.choose`.
      dtype: of batches; by default that of `batch_like`.

    Returns the compiled program, which is called as `update` is.
    """
    key = remat, dtype
    if key not in self._programs:
      inputs = self.like, self.batch_like(dtype), schedule(self.config)
      update = self.with_remat(remat).update
      with jax.set_mesh(self.mesh):
        self._programs[key] = update.lower(*inputs).compile()

    return self._programs[key]

  def with_remat(self, remat: str) -> "Experiment":
    """This experiment with another value of `model.remat`, on the same data."""
    config = self.config.replace(**{"model.remat": remat})
    return Experiment(config, self.devices, self.source)

  @functools.cached_property
  def mesh(self) -> Mesh:
    """The devices. Whatever runs the network sets it as the context."""
    mesh = mesh_lib.make(self.config, self.devices)
    mesh_lib.check_network(self.model, mesh.shape)
    return mesh

  @property
  def batch_sharding(self) -> NamedSharding:
    """The sharding of batches [B, L]."""
    return NamedSharding(self.mesh, PartitionSpec(sharding.SEQUENCES))


@dataclasses.dataclass(frozen=True)
class Run:
  """A saved step of a run, from `open_run`.

  Attributes:
    saved: the checkpoints of the run.
    step: the step to read.
    config: the config that trained this step; the fields that may change in any
      run, such as paths and devices, have their values from config.json.
    experiment: the experiment of this config under overrides.
  """

  saved: Saved
  step: int
  config: schema.Config
  experiment: Experiment

  @property
  def workdir(self) -> pathlib.Path:
    """The folder of the run, absolute."""
    return self.saved.workdir

  @property
  def has_other_data(self) -> bool:
    """Whether overrides name other data than the run's."""
    # Other fields of data, such as the length, would make another network:
    # `changes` refuses them.
    own = self.config.data
    used = self.experiment.config.data
    return (own.name, own.path) != (used.name, used.path)

  def changes(self, allowed: config_lib.Allowed) -> config_lib.Changes:
    """Compares the experiment's config with the one that trained the step.

    Args:
      allowed: what changes may affect, a policy of `config`.

    Returns {"group.field": (old, new)}.
    Raises ValueError if a change affects something else.
    """
    place = f"checkpoint {self.saved.path(self.step)}"
    config = self.experiment.config
    return config_lib.compare(self.config, config, allowed, place)

  def restore(self, with_data: bool = False) -> step_lib.State:
    """Restores the state at the step.

    Args:
      with_data: whether the caller reads data. These must then be the run's,
        unless overrides name others. Symbols and classes must be the run's in
        any case.

    Raises:
      FileNotFoundError: the checkpoint has just been deleted.
      ValueError: it is damaged, from another network, or on other data.
    """
    source = self.experiment.source

    # Fields are compared before arrays, whose shapes would not say which
    # setting differs.
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

  A run may have changed its config since that step. The experiment is the one
  that trained the step, under overrides.

  Args:
    workdir: the folder of the run.
    overrides: {"group.field": value}.
    step: see `Saved.find`.

  Raises:
    FileNotFoundError: it has no config, or no such step.
    ValueError: the checkpoint is damaged, or config.json is of another run.
  """
  saved = Saved(workdir)
  step = saved.find(step)
  saved.verify(step)

  # They differ after a run with --allow_changes: it writes config.json at its
  # start, and its first checkpoint later.
  made = saved.config(step)
  changes = config_lib.compare(
    before=made,
    after=config_lib.read_config(workdir),
    allowed=config_lib.WITH_ALLOW_CHANGES,
    place=f"checkpoint {saved.path(step)}",
  )

  # Paths and devices are today's, from config.json. All that affects weights or
  # scores is as in the checkpoint.
  free = {}
  edited = []
  for name, (_, value) in changes.items():
    if schema.affects(name) in config_lib.TO_RESUME:
      free[name] = value
    else:
      edited.append(f"--config.{name}={value}")

  # An earlier step is expected to have another config.
  if edited and step == saved.find():
    files.warn(
      f"step {step:,} of {workdir} was trained with another config"
      f" than config.json now has, and is used with its own, not with"
      f" {' '.join(edited)}"
    )

  config = made.replace(**free)
  experiment = Experiment(config.replace(**overrides or {}))
  return Run(saved=saved, step=step, config=config, experiment=experiment)
