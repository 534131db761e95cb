"""A run that is stopped halfway and resumed ends with the same bits."""

import functools
import tempfile

from benchmarks.accelerator.parts import Settings

STEPS = 20


def entries(settings: Settings, rank: int) -> dict:
  """One for each network."""
  from benchmarks.accelerator import training

  if rank:
    return {}
  return {
    name: functools.partial(check, experiment)
    for name, experiment in training.cut(settings.small).items()
  }


def check(experiment, record) -> dict:
  """Compares an interrupted training to one that was not."""
  from benchmarks.accelerator import training
  from sparse_transformer.training.checkpoint import Checkpoints

  del record
  expected = training.advance(experiment, experiment.first_state(), STEPS)
  with tempfile.TemporaryDirectory() as folder:
    with Checkpoints(folder, keep=1) as checkpoints:
      checkpoints.save(
        training.advance(experiment, experiment.first_state(), STEPS // 2)
      )
      checkpoints.finish()
      halfway = experiment.restore(checkpoints)
  resumed = training.advance(experiment, halfway, STEPS)
  return {"steps": STEPS} | training.difference(expected, resumed)
