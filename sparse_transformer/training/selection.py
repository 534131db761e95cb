"""Chooses the checkpoint of a run that is best on the validation split."""

import math
import sys

from sparse_transformer.training import evaluations, metrics
from sparse_transformer.training.checkpoint import Checkpoints
from sparse_transformer.training.evaluations import Evaluation
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.signals import Signals
from sparse_transformer.training.step import State


def best_step(
  experiment: Experiment,
  checkpoints: Checkpoints,
  weights: str = "ema",
  signals: Signals | None = None,
) -> tuple[int, float]:
  """The step whose weights score best on the entire validation split.

  All checkpoints of the run are scored, as training may have validated on a
  part of the split. Results are saved in `evaluations` in the workdir, and used
  again.

  Args:
    experiment: the run's network and data. For final scores, its config is
      `evaluations.in_float32`.
    checkpoints: the checkpoints of the run.
    weights: "ema" or "params", see `State`.
    signals: caught signals, which end the work.

  Returns:
    The step, the first if several are as good, and its validation bits per dim.

  Raises:
    FileNotFoundError: no checkpoint exists.
    ValueError: the run has no validation, or a batch of it does not fit here.
    signals.Stopped: a signal ended the work.
  """
  evaluations.check(experiment)
  checkpoints.check_step(None)  # there must be one
  lines = metrics.read(checkpoints.workdir)
  if not any(line["split"] == "validation" for line in lines):
    raise ValueError(
      "the best step is chosen by validation, but the run in"
      f" {checkpoints.workdir} has none yet; name a step, or train the run to"
      " its end"
    )
  bits = {}
  for step in checkpoints.steps():
    evaluation = Evaluation(
      experiment, checkpoints, step, "validation", weights=weights
    )
    result = evaluation.saved()
    if result is None:
      state = restore(experiment, checkpoints, step)
      if state is None:
        continue
      result = evaluation.run(state, signals=signals)
    bits[step] = result["bits_per_dim"]
  finite = {step: b for step, b in bits.items() if math.isfinite(b)}
  if not finite:
    raise ValueError(
      f"no checkpoint of the run in {checkpoints.workdir} has finite bits on"
      " the validation split"
    )
  return min(finite.items(), key=lambda item: item[::-1])


def restore(
  experiment: Experiment, checkpoints: Checkpoints, step: int
) -> State | None:
  """The state at a step; None if the run has deleted it meanwhile.

  A run that is training keeps only its last and best checkpoints. One that it
  has deleted is reported on standard error.
  """
  try:
    return experiment.restore(checkpoints, step)
  except (ValueError, FileNotFoundError):
    if step in checkpoints.steps():
      raise
    print(f"skipping step {step}, deleted meanwhile", file=sys.stderr)
    return None
