"""A run as commands read it: the experiment of a workdir, and its states."""

import os
from typing import Literal

from ml_collections import ConfigDict

from sparse_transformer import config as config_lib
from sparse_transformer.training.checkpoints.store import Checkpoints
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import State


def open_run(
  workdir: str | os.PathLike, config: ConfigDict | None = None
) -> tuple[Experiment, Checkpoints]:
  """The experiment of a run, and its checkpoints, which are only read.

  The config may override that of the run; None for the saved one.
  """
  if config is None:
    config = config_lib.read_config(workdir)
  return Experiment(config), Checkpoints(workdir)


def restore(
  experiment: Experiment,
  checkpoints: Checkpoints,
  step: int | Literal["best"] | None = None,
  with_data: bool = False,
) -> State:
  """The state at a step; None for the last, "best" by validation in training.

  With `with_data`, the data must be the run's.

  Raises:
    FileNotFoundError: no checkpoint exists, or it has just been deleted.
    ValueError: the checkpoint is from another network, or on other data.
  """
  state = checkpoints.restore(experiment.like, checkpoints.find(step))
  checkpoints.check(
    int(state.step),
    experiment.config,
    experiment.source.digest() if with_data else None,
    config_lib.FREE_IN_EVALUATION,
  )
  return state
