"""Scores checkpoints of a run: what eval.py prints and saves."""

import json
import os
import pathlib
import sys
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from sparse_transformer import data
from sparse_transformer.figures import curves
from sparse_transformer.training import checkpoint, evaluate, memory_limits
from sparse_transformer.training.experiment import Experiment, check_eval_batch
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
) -> Generator[Result, None, None]:
  """Scores each step with each context, and saves bits by position.

  Args:
    config: the run's config.
    workdir: its folder; results are written to `evaluations` in it.
    split: one of `data.SPLITS`.
    steps: steps of checkpoints; None is the last one, () are all. Of these, one
      that a training run deletes meanwhile is skipped, with a line on standard
      error.
    contexts: minimum numbers of positions before a scored one.
    weights: "ema" or "params", see `State`.

  Yields:
    JSON objects. After a signal, the last one covers what was scored until
    then, with `complete` false, and is not saved.

  Raises:
    ValueError: the config is invalid or needs more memory than there is, or
      there is no such split, step or context.
    Stopped: a signal ended the work.
  """
  experiment = Experiment(config)
  source = experiment.source
  check_eval_batch(config)
  memory_limits.check_inference(config, source, config.eval.batch_size)
  if not contexts:
    raise ValueError("contexts is empty, but must have a number such as 0")
  for min_context in contexts:  # finds errors before the work starts
    source.windows(split, min_context)
  with Signals() as signals, checkpoint.Checkpoints(workdir) as checkpoints:
    for step in steps:
      checkpoints.check_step(step)
    for step in steps or checkpoints.steps() or [None]:
      try:
        state = experiment.restore(checkpoints, step)
      except (ValueError, FileNotFoundError):
        if steps or step is None or step in checkpoints.steps():
          raise
        print(f"skipping step {step}, deleted meanwhile", file=sys.stderr)
        continue
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
  curves.bits_by_position(bits_L, result).savefig(folder / f"{stem}.png")
