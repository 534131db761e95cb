"""Scores checkpoints of a run: what eval.py prints and saves."""

import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from sparse_transformer import data
from sparse_transformer.figures.curves import save_positions
from sparse_transformer.training import checkpoint, evaluate
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.signals import Signals, Stopped

Result = dict[str, Any]


def score_run(
  config: ConfigDict,
  workdir: str | os.PathLike,
  *,
  split: str,
  steps: Sequence[int | None],
  contexts: Sequence[int],
  weights: str,
) -> Iterator[Result]:
  """Scores each step with each context, and saves bits by position.

  Args:
    config: the run's config.
    workdir: its folder; results are written to `evaluations` in it.
    split: one of `data.SPLITS`.
    steps: steps of checkpoints; None is the last one, () are all.
    contexts: minimum numbers of positions before a scored one.
    weights: "ema" or "params", see `State`.

  Yields:
    JSON objects. After a signal, the last one covers what was scored until
    then, with `complete` false, and is not saved.

  Raises:
    ValueError: there is no such split, step or context.
    Stopped: a signal ended the work.
  """
  experiment = Experiment(config)
  source = experiment.source
  for min_context in contexts:  # finds errors before the work starts
    source.windows(split, min_context)
  with Signals() as signals, checkpoint.Checkpoints(workdir) as checkpoints:
    for step in steps or checkpoints.steps() or [None]:
      state = experiment.restore(checkpoints, step)
      for min_context in contexts:
        about = dict(
          split=split,
          step=int(state.step),
          min_context=min_context,
          weights=weights,
          unit=source.unit,
        )
        tally = evaluate.Tally(source.length)
        windows = source.windows(split, min_context)
        try:
          evaluate.bits_per_dim(
            experiment.losses,
            getattr(state, weights),
            signals.checked(windows),
            batch_size=config.eval.batch_size,
            sharding=experiment.batch_sharding,
            name=split,
            tally=tally,
          )
        except Stopped:
          yield tally.summary() | about | dict(complete=False)
          raise
        result = tally.summary() | about
        if isinstance(source, data.Images) and source.shape[2] > 1:
          result["by_channel"] = tally.by_channel(source.shape[2]).tolist()
        _save(workdir, result, tally.by_position())
        yield result


def _save(
  workdir: str | os.PathLike, result: Result, bits_L: np.ndarray
) -> None:
  """Writes a result with its bits by position, as JSON and as a picture."""
  folder = pathlib.Path(workdir) / "evaluations"
  folder.mkdir(exist_ok=True)
  stem = "{split}-step{step}-context{min_context}-{weights}".format(**result)
  bits = [None if np.isnan(x) else round(float(x), 6) for x in bits_L]
  text = json.dumps(result | dict(by_position=bits))
  (folder / f"{stem}.json").write_text(text + "\n")
  save_positions(folder / f"{stem}.png", bits_L, result)
