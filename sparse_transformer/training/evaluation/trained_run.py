"""A run as commands read it: its states, and evaluations in its workdir."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from ml_collections import ConfigDict

from sparse_transformer import atomic, config as config_lib, data
from sparse_transformer.figures import curves
from sparse_transformer.signals import Signals, Stopped
from sparse_transformer.training import metrics
from sparse_transformer.training.checkpoints.store import Checkpoints
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.evaluation import scoring
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import State

Result = dict[str, Any]


@contextlib.contextmanager
def open_run(
  workdir: str | os.PathLike, config: ConfigDict | None = None
) -> Iterator["Run"]:
  """Opens a run; within the context, a signal ends its evaluations.

  The config may override that of the run; None for the saved one.
  """
  if config is None:
    config = config_lib.read_config(workdir)
  experiment = Experiment(config)
  with Signals() as signals, Checkpoints(workdir) as checkpoints:
    yield Run(experiment, checkpoints, signals)


@dataclasses.dataclass(frozen=True)
class Run:
  """A run, see `open_run`.

  Evaluations are saved in the workdir, as `evaluations/NAME.json` and .png.
  Their activations have the dtype of the config; if that is float32, so is the
  precision of products, on all devices.
  """

  experiment: Experiment  # the run's network and data
  checkpoints: Checkpoints  # its checkpoints
  signals: Signals  # caught signals

  def state(
    self,
    step: int | Literal["best"] | None = None,
    with_data: bool = False,
    weights: str = "ema",
  ) -> State:
    """The state at a step; None for the last, "best" what `best` finds.

    It searches in float32, for these weights. With `with_data`, the data must
    be the run's.

    Raises:
      ValueError: the checkpoint is from another network, or on other data.
      Stopped: a signal ended the search for the best.
    """
    if step == "best":
      config = config_lib.in_float32(self.experiment.config)
      scored = dataclasses.replace(self, experiment=Experiment(config))
      step = int(scored.best(weights)["step"])
    state = self.checkpoints.restore(self.experiment.like, step)
    self.checkpoints.check(
      int(state.step),
      self.experiment.config,
      self._digest if with_data else None,
      config_lib.FREE_IN_EVALUATION,
    )
    return state

  @functools.cached_property
  def _digest(self):
    return self.experiment.source.digest()

  def best(self, weights: str = "ema") -> Result:
    """The best result on the entire validation split, of the first such step.

    All checkpoints are scored, as training may have validated on a part of the
    split. Saved results are used again.

    Raises:
      FileNotFoundError: no checkpoint exists.
      ValueError: the run has no validation.
      Stopped: a signal ended the work.
    """
    self._check()
    workdir = self.checkpoints.workdir
    if not any(x["split"] == "validation" for x in metrics.read(workdir)):
      raise ValueError(
        f"the best step is chosen by validation, but the run in {workdir} has"
        " none yet; name a step, or train the run to its end"
      )
    results: list[Result] = []
    for step in self.checkpoints.steps():
      saved = self._saved(self._about("validation", step, 0, weights))
      results += [saved] if saved else self._score("validation", step, weights)
    results = [x for x in results if math.isfinite(x["bits_per_dim"])]
    if not results:
      raise ValueError(
        f"no checkpoint of the run in {workdir} has finite bits on the"
        " validation split"
      )
    return min(results, key=lambda x: (x["bits_per_dim"], x["step"]))

  def evaluations(
    self,
    split: str,
    steps: Sequence[int | None] | Literal["best"] = (None,),
    contexts: Sequence[int] = (0,),
    weights: str = "ema",
  ) -> Iterator[Result]:
    """Scores each step with each context, and saves bits by position.

    Args:
      split: one of `data.SPLITS`.
      steps: steps of checkpoints; None for the last one. () for all, and one
        that is deleted meanwhile is skipped and reported. "best" for what
        `best` finds; results then include its `validation_bits_per_dim`.
      contexts: minimum numbers of positions before a scored one.
      weights: "ema" or "params", see `State`.

    Yields:
      JSON objects with `Tally.summary`. After a signal, the last one covers the
      windows scored until then, has `complete` false, and is not saved.

    Raises:
      ValueError: the split, step or context does not exist.
      Stopped: a signal ended the work.
    """
    if not contexts:
      raise ValueError("contexts is empty, but must have a number such as 0")
    for min_context in contexts:  # finds errors before the work starts
      self.experiment.source.windows(split, min_context)
    self._check()
    more = {}
    if steps == "best":
      best = self.best(weights)
      steps = [best["step"]]
      more = dict(validation_bits_per_dim=best["bits_per_dim"])
    asked = [self.checkpoints.check_step(step) for step in steps]
    for step in asked or self.checkpoints.steps():
      for result in self._score(split, step, weights, contexts, bool(asked)):
        yield result | more

  def _check(self) -> None:
    """Checks that there is a checkpoint, and that batches can be split."""
    config, sizes = self.experiment.config, self.experiment.mesh.shape
    mesh.check_batch(config, sizes, "eval")
    mesh.check_network(self.experiment.model, sizes)
    self.checkpoints.check_step(None)

  def _score(self, split, step, weights, contexts=(0,), must_exist=False):
    """Yields the result of a step for each context, and saves it.

    Unless it must exist, a checkpoint deleted meanwhile has no results.
    """
    try:
      state = self.state(step, with_data=True)
    except (ValueError, FileNotFoundError):
      if must_exist or step in self.checkpoints.steps():
        raise
      print(f"skipping step {step}, deleted meanwhile", file=sys.stderr)
      return
    source, settings = self.experiment.source, self.experiment.config
    shards = mesh.num_shards(self.experiment.mesh.shape)
    # By default, GPUs and TPUs round the operands of products in float32.
    precision = jax.default_matmul_precision.value
    if settings.model.dtype == "float32":
      precision = precision or "highest"
    # The error is over images or labels, or over blocks of symbols.
    block = scoring.BLOCK if isinstance(source, data.Stream) else None
    for min_context in contexts:
      about = self._about(split, step, min_context, weights)
      windows = source.windows(split, min_context)
      tally = scoring.Tally(len(windows[0][1]), block)
      try:
        with jax.default_matmul_precision(precision):
          summary = scoring.bits_per_dim(
            self.experiment.losses,
            getattr(state, weights),
            windows,
            # No larger than the split needs.
            batch_size=min(
              settings.eval.batch_size, -(-len(windows) // shards) * shards
            ),
            sharding=self.experiment.batch_sharding,
            name=split,
            tally=tally,
            check_stop=self.signals.check,
          )
      except Stopped:
        yield tally.summary() | about | dict(complete=False)
        raise
      result = about | summary
      if isinstance(source, data.Images):
        if source.optimum is not None:
          result["optimum"] = source.optimum
        if (channels := source.shape[2]) > 1:
          result["by_channel"] = tally.by_channel(channels).tolist()
      elif isinstance(source, data.Stream):
        if num := source.num_bytes(split):  # each token is scored once
          result["bits_per_byte"] = float(tally.bits_L.sum()) / num
      self._save(result, tally.by_position())
      yield result

  def _about(self, split, step, min_context, weights):
    """The fields of a result that say what is scored."""
    return dict(
      split=split,
      step=step,
      min_context=min_context,
      weights=weights,
      overrides=self._overrides(step),
      dtype=self.experiment.config.model.dtype,
      unit=self.experiment.source.unit,
    )

  def _overrides(self, step):
    """The settings that make a score another one than the checkpoint's own."""
    config, free = self.experiment.config, config_lib.FREE_IN_EVALUATION
    changes = self.checkpoints.check(step, config, None, free)
    found = {
      name: new
      for name, (_, new) in changes.items()
      if not name.startswith((*config_lib.UNSCORED_FIELDS, "model.dtype"))
    }
    if config.model.dtype != "float32":  # which scores are in by default
      found["model.dtype"] = config.model.dtype
    return found

  def _save(self, result, bits_L):
    """Writes a result, with the bits at each position, and a picture of it."""
    bits = [None if np.isnan(x) else round(float(x), 6) for x in bits_L]
    saved = result | dict(inputs=self._inputs(result), by_position=bits)
    path = self._path(result)
    path.parent.mkdir(exist_ok=True)
    atomic.write_json(path, saved)
    source = self.experiment.source
    if self.experiment.model.classifies:
      return  # labels have no positions
    if isinstance(source, data.Images):
      figure = curves.bits_by_pixel(bits_L, source.shape, result)
    else:
      figure = curves.bits_by_position(bits_L, result)
    with atomic.writing(path.with_suffix(".png")) as new:
      figure.savefig(new, format="png")

  def _saved(self, about):
    """The saved result; None unless it has the same weights and settings."""
    try:
      result, inputs = atomic.read_json(self._path(about)), self._inputs(about)
      source = self.experiment.source
      windows = source.windows(about["split"], about["min_context"])
      same = (
        inputs["checkpoint"] is not None
        and result.pop("inputs") == inputs
        and result["examples"] == len(windows)
        and math.isfinite(result["bits_per_dim"])
        and result.pop("by_position")
      )
      return result if same else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
      return None  # there is none, or it is damaged

  def _path(self, about):
    name = "{split}-step{step}-context{min_context}-{weights}".format(**about)
    if overrides := about["overrides"]:  # the run's own result stays
      digest = zlib.crc32(json.dumps(overrides).encode())
      name += f"-overrides{digest:08x}"
    return self.checkpoints.workdir / "evaluations" / f"{name}.json"

  def _inputs(self, about):
    """The inputs of a result: checkpoint, data and network, as JSON."""
    config = self.experiment.config.to_dict()
    groups = {name: config[name] for name in ("data", "model", "attention")}
    crc32 = self.checkpoints.fingerprint(about["step"])
    inputs = dict(checkpoint=crc32, config=groups, data=self._digest)
    return json.loads(json.dumps(inputs))
