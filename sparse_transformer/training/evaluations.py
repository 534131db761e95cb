"""The evaluations of a run: made once, and saved in its workdir."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from sparse_transformer import atomic, data
from sparse_transformer.figures import curves
from sparse_transformer.training import evaluate, memory_limits, mesh
from sparse_transformer.training.checkpoint import Checkpoints
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.signals import Signals
from sparse_transformer.training.step import State

Result = dict[str, Any]


def in_float32(config: ConfigDict) -> ConfigDict:
  """A copy of a config whose activations are float32, as for final scores.

  The rounding of bfloat16 shifts the bits of a deep network, which may be by as
  much as published results differ.
  """
  groups = config.to_dict()
  groups["model"]["dtype"] = "float32"
  return ConfigDict(groups).lock()


def check(experiment: Experiment) -> None:
  """Checks that evaluation fits the devices and their memory.

  Raises:
    ValueError: it does not.
  """
  config, sizes = experiment.config, experiment.mesh.shape
  mesh.check_eval_batch(config, sizes)
  mesh.check_network(experiment.model, sizes)
  memory_limits.check_inference(
    config, experiment.source, config.eval.batch_size
  )


def new_tally(source: data.Source) -> evaluate.Tally:
  """A tally whose error is over images, or over blocks of a stream."""
  of_images = isinstance(source, data.Images)
  return evaluate.Tally(source.length, None if of_images else evaluate.BLOCK)


def score(
  experiment: Experiment,
  params: Any,
  split: str,
  min_context: int = 0,
  *,
  tally: evaluate.Tally | None = None,
  signals: Signals | None = None,
) -> Result:
  """Scores parameters on an entire split.

  Args:
    experiment: the network and its data; activations have its dtype. If it is
      float32, so is the precision of products, on all devices.
    params: parameters of the network.
    split: one of `data.SPLITS`.
    min_context: minimum number of positions before a scored one.
    tally: `new_tally` to add to; it has what was scored even if an exception
      ends the work.
    signals: caught signals, which end the work.

  Returns:
    `Tally.summary` of the split.
  """
  windows: Sequence = experiment.source.windows(split, min_context)
  # By default, GPUs and TPUs round the operands of products in float32.
  precision = jax.default_matmul_precision.value
  if experiment.config.model.dtype == "float32":
    precision = precision or "highest"
  with jax.default_matmul_precision(precision):
    return evaluate.bits_per_dim(
      experiment.losses,
      params,
      windows,
      batch_size=experiment.config.eval.batch_size,
      sharding=experiment.batch_sharding,
      name=split,
      tally=tally or new_tally(experiment.source),
      check_stop=signals.check if signals else None,
    )


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """One checkpoint on one split: `evaluations/NAME.json` and .png of a run.

  Attributes:
    experiment: the run's network and data, with the overrides that apply.
    checkpoints: the checkpoints of the run.
    step: step of the checkpoint.
    split: one of `data.SPLITS`.
    min_context: minimum number of positions before a scored one.
    weights: "ema" or "params", see `State`.
  """

  experiment: Experiment
  checkpoints: Checkpoints
  step: int
  split: str
  min_context: int = 0
  weights: str = "ema"

  @property
  def about(self) -> Result:
    """What is scored, as the result says it."""
    return dict(
      split=self.split,
      step=self.step,
      min_context=self.min_context,
      weights=self.weights,
      dtype=self.experiment.config.model.dtype,
      unit=self.experiment.source.unit,
    )

  def saved(self) -> Result | None:
    """The saved result; None unless it is of the same weights and settings."""
    try:
      result = atomic.read_json(self._path)
      windows = self.experiment.source.windows(self.split, self.min_context)
      same = (
        self.checkpoints.fingerprint(self.step) is not None
        and result.pop("inputs") == self._inputs
        and result["examples"] == len(windows)
        and math.isfinite(result["bits_per_dim"])
        and result.pop("by_position")
      )
      return result if same else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
      return None  # there is none, or it is damaged

  def run(
    self,
    state: State,
    *,
    tally: evaluate.Tally | None = None,
    signals: Signals | None = None,
  ) -> Result:
    """Scores the checkpoint, and saves the result with bits by position.

    Args:
      state: the contents of the checkpoint.
      tally: see `score`.
      signals: see `score`.
    """
    source = self.experiment.source
    tally = tally or new_tally(source)
    params = getattr(state, self.weights)
    result = self.about | score(
      self.experiment,
      params,
      self.split,
      self.min_context,
      tally=tally,
      signals=signals,
    )
    if isinstance(source, data.Images) and source.shape[2] > 1:
      result["by_channel"] = tally.by_channel(source.shape[2]).tolist()
    bits_L = tally.by_position()
    bits = [None if np.isnan(x) else round(float(x), 6) for x in bits_L]
    saved = result | dict(inputs=self._inputs, by_position=bits)
    self._path.parent.mkdir(exist_ok=True)
    atomic.write_text(self._path, json.dumps(saved) + "\n")
    picture = curves.bits_by_position(bits_L, result)
    picture.savefig(self._path.with_suffix(".png"))
    return result

  @property
  def _path(self) -> pathlib.Path:
    stem = "{split}-step{step}-context{min_context}-{weights}"
    name = stem.format(**self.about)
    return self.checkpoints.workdir / "evaluations" / f"{name}.json"

  @property
  def _inputs(self) -> Result:
    """What the result depends on: checkpoint, data and network, as JSON."""
    config = self.experiment.config.to_dict()
    groups = {name: config[name] for name in ("data", "model", "attention")}
    crc32 = self.checkpoints.fingerprint(self.step)
    return json.loads(json.dumps(dict(checkpoint=crc32, config=groups)))
