"""Scores checkpoints of a run: what eval.py prints."""

import os
from collections.abc import Generator, Sequence
from typing import Literal

from ml_collections import ConfigDict

from sparse_transformer.training import checkpoint, evaluations, selection
from sparse_transformer.training.evaluations import Evaluation, Result
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.signals import Signals, Stopped
from sparse_transformer.training.step import State


def score_run(
  config: ConfigDict,
  workdir: str | os.PathLike,
  *,
  split: str,
  steps: Sequence[int | None] | Literal["best"],
  contexts: Sequence[int],
  weights: str,
) -> Generator[Result, None, None]:
  """Scores each step with each context, and saves bits by position.

  Args:
    config: the run's config.
    workdir: its folder; results are written to `evaluations` in it.
    split: one of `data.SPLITS`.
    steps: steps of checkpoints; None is the last one, () are all. Of these, one
      that a training run deletes meanwhile is skipped, with a line on standard
      error. "best" is that of `best_step`, whose results have its bits as
      `validation_bits_per_dim`.
    contexts: minimum numbers of positions before a scored one.
    weights: "ema" or "params", see `State`.

  Yields:
    JSON objects. After a signal, the last one covers what was scored until
    then, with `complete` false, and is not saved.

  Raises:
    ValueError: the config is invalid or needs more memory than there is, or
      the split, step or context does not exist.
    Stopped: a signal ended the work.
  """
  experiment = Experiment(config)
  evaluations.check(experiment)
  if not contexts:
    raise ValueError("contexts is empty, but must have a number such as 0")
  for min_context in contexts:  # finds errors before the work starts
    experiment.source.windows(split, min_context)
  with Signals() as signals, checkpoint.Checkpoints(workdir) as checkpoints:
    checkpoints.check_step(None)  # there must be one
    best = {}
    if steps == "best":
      step, bits = selection.best_step(
        experiment, checkpoints, weights, signals
      )
      steps, best = [step], dict(validation_bits_per_dim=bits)
    asked = [checkpoints.check_step(step) for step in steps]
    for step in asked or checkpoints.steps():
      state: State | None
      if asked:
        state = experiment.restore(checkpoints, step)
      elif not (state := selection.restore(experiment, checkpoints, step)):
        continue
      for min_context in contexts:
        evaluation = Evaluation(
          experiment, checkpoints, step, split, min_context, weights
        )
        tally = evaluations.new_tally(experiment.source)
        try:
          result = evaluation.run(state, tally=tally, signals=signals)
        except Stopped:
          yield tally.summary() | evaluation.about | dict(complete=False)
          raise
        yield result | best
