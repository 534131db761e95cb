"""Evaluations of a run in bits per dim: `evaluations/NAME.json`, and .png."""

import dataclasses
import functools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sparse_transformer import (
  atomic,
  config as config_lib,
  data,
  schema,
  version,
)
from sparse_transformer.attention import registry
from sparse_transformer.figures import curves, style
from sparse_transformer.signals import Signals
from sparse_transformer.training import kernel_check
from sparse_transformer.training.checkpoints.store import Saved
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.evaluation import scoring
from sparse_transformer.training.experiment import Run, open_run
from sparse_transformer.training.step import State


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
  """What to score.

  Attributes:
    split: one of `data.SPLITS`.
    min_context: the least number of positions before a scored one. A larger one
      gives better scores and takes longer, as windows overlap.
    weights: "ema", the average, or "params", see `State`.
    examples: how many windows, the first ones; None for all.
    order: of the pixels of images, see `Arrangement.labels`.
  """

  split: str = "test"
  min_context: int = 0
  weights: str = "ema"
  examples: int | None = None
  order: tuple[str, ...] = ()

  def windows(self, source: data.Source) -> data.Lazy:
    """The windows to score, pairs (symbols, which are scored).

    Raises ValueError if the source does not have them, see `data.Source`.
    """
    windows = source.windows(self.split, self.min_context)
    number = len(windows) if self.examples is None else self.examples
    if number > len(windows):
      raise ValueError(
        f"--examples={number} must be at most {len(windows):,}, those of the"
        f" {self.split} split"
      )
    labels = source.arrangement.labels(self.order)

    # Windows are read when they are scored: a split may not fit in memory.
    def window(i: int) -> tuple[np.ndarray, np.ndarray]:
      symbols, scored = windows[i]
      return source.arrangement.arrange(symbols, labels), scored

    return data.Lazy(number, window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """The score of a step of a run; fields are in the order of its JSON.

  Attributes:
    split, min_context, weights: those of the `ScoreRequest`.
    overrides: the settings that differ from those of the step's own score.
    command: the command that asked for it.
    dtype: the dtype of activations.
    unit: the unit of `bits_per_dim`, such as bits/byte.
    in_training: the same score, as it was computed during training.
    accuracy: the share of labels that are right, with `accuracy_error`.
    standard_error: that of `bits_per_dim`; None for fewer than two blocks.
    examples: how many windows were scored.
    tokens: how many positions were scored.
    optimum: the least bits per dim that are possible, for generated data.
    by_channel: the bits per dim of each channel of images.
    classes: the names of the labels.
    bits_per_byte: for text as tokens.
    unsaved: the reason why the score could not be written; None if it was.
    stage, amount: what is scored, on how much; words for `sentence`.
  """

  split: str
  step: int
  min_context: int
  weights: str
  overrides: Mapping[str, Any]
  command: str
  dtype: str
  unit: str
  in_training: float | None = None
  accuracy: float | None = None
  accuracy_error: float | None = None
  bits_per_dim: float | None
  standard_error: float | None
  examples: int
  tokens: int
  optimum: float | None = None
  by_channel: Sequence[float] | None = None
  classes: Sequence[str] | None = None
  bits_per_byte: float | None = None
  unsaved: str | None = None
  stage: str
  amount: str

  def json(self) -> dict[str, Any]:
    """The fields that `eval.py` prints and saves, without unknown ones."""
    # These are asked of each score: null says that they cannot be computed.
    always = {"bits_per_dim", "standard_error"}
    if self.accuracy is not None:
      always.add("accuracy_error")
    return {
      name: value
      for name, value in vars(self).items()
      if name not in ("stage", "amount")
      if name in always or value is not None
    }

  def sentence(self) -> str:
    """A line such as "test, step 700: 1.911 ± 0.017 bits/dim, 200 images".

    The number after ± is the standard error, with two digits.
    """
    bits = _with_error(self.bits_per_dim, self.standard_error)
    parts = [f"{bits} {self.unit}"]
    if self.accuracy is not None:
      accuracy = _with_error(self.accuracy, self.accuracy_error)
      parts.append(f"accuracy {accuracy}")
    parts.append(self.amount)
    parts += [f"{name}={x}" for name, x in self.overrides.items()]
    return f"{self.split}, {self.stage}: {', '.join(parts)}"


def _with_error(value, error):
  if not error or not math.isfinite(error):
    return f"{value:.4f}"

  # Two digits of the error say how many of the value mean something.
  digits = max(0, 1 - math.floor(math.log10(error)))
  return f"{value:.{digits}f} ± {error:.{digits}f}"


def evaluate_run(
  workdir: str | os.PathLike,
  steps: Sequence[str],
  overrides: Mapping[str, Any],
  requests: Sequence[ScoreRequest],
) -> Iterator[Score]:
  """Scores steps of a run, and saves the scores in its workdir.

  Args:
    workdir: the run's.
    steps: which ones, each as in `Saved.find`; ["all"] for all, [] for the
      last.
    overrides: of the config, {"group.field": value}.
    requests: what to score, at each step.

  Yields each score as soon as it is known.

  Raises:
    ValueError: the split, the context or so many examples do not exist; nothing
      was scored.
    OSError: at the end: a score could not be written.
    signals.Stopped: a signal ended it.
  """
  saved = Saved(workdir)
  numbers = saved.steps() if steps == ["all"] else []
  numbers = numbers or [saved.find(x) for x in steps] or [saved.find()]
  runs = [open_run(workdir, overrides, x) for x in dict.fromkeys(numbers)]

  # Steps may have different configs; those with equal ones share an experiment,
  # and are compiled once.
  experiments = {run.experiment.config: run.experiment for run in runs}

  # Errors of any request are found before the work starts, which may take
  # hours.
  avoided: dict[str, str] = {}
  for experiment in experiments.values():
    kernel_check.avoid_wrong(experiment)
    avoided |= registry.avoided()
    for request in requests:
      request.windows(experiment.source)

  # A kernel that is wrong for one config is avoided for all: scores of a table
  # are then computed alike.
  registry.avoid(avoided)
  unsaved = None
  with Signals() as signals:
    for opened in runs:
      experiment = experiments[opened.experiment.config]
      run = dataclasses.replace(opened, experiment=experiment)
      state = run.restore(with_data=True)

      for request in requests:
        context = request.min_context
        command = version.command(step=run.step, min_context=context)
        score = evaluate(run, state, request, command, signals.check)
        # The caller gets all scores, and the error at the end.
        unsaved = unsaved or score.unsaved
        yield score
        signals.check()
  if unsaved:
    raise OSError(f"the score cannot be written: {unsaved}")


def evaluate(
  run: Run,
  state: State,
  request: ScoreRequest = ScoreRequest(),
  command: str = "",
  check_stop: Callable[[], None] = lambda: None,
) -> Score:
  """Scores a state of a run, and saves the score in its workdir.

  Args:
    run: the run.
    state: from `run.restore`.
    request: what to score.
    command: the command that asks for it, which is saved with the score.
    check_stop: called before each batch; may raise an exception.

  Raises ValueError if the split, the context or so many examples do not exist.
  """
  experiment = run.experiment
  config = experiment.config
  source = experiment.source
  mesh.check_batch(config, experiment.mesh.shape, "eval")

  # By default, GPUs and TPUs round the operands of products in float32 to fewer
  # bits, by which scores would differ from machine to machine.
  precision = jax.default_matmul_precision.value
  if config.model.dtype == "float32":
    precision = precision or "highest"

  with jax.default_matmul_precision(precision):
    tally = scoring.score(
      functools.partial(experiment.losses, getattr(state, request.weights)),
      request.windows(source),
      batch_size=config.eval.batch_size,
      sharding=experiment.batch_sharding,
      block=scoring.BLOCK if isinstance(source, data.Stream) else None,
      check_stop=check_stop,
    )
  score = Score(
    split=request.split,
    step=run.step,
    min_context=request.min_context,
    weights=request.weights,
    overrides=_overrides(run, request),
    command=command,
    dtype=config.model.dtype,
    unit=source.unit,
    in_training=_in_training(run, request),
    accuracy=tally.accuracy,
    accuracy_error=tally.accuracy_error,
    bits_per_dim=tally.bits_per_dim,
    standard_error=tally.standard_error,
    examples=tally.windows,
    tokens=tally.tokens,
    stage=experiment.stage(run.step),
    amount=_amount(source, tally, request.min_context),
  )

  # From here on by pixel, whatever the order in which they were predicted.
  labels = source.arrangement.labels(request.order)
  tally.bits_L = source.arrangement.restore(tally.bits_L[None], labels)[0]
  details = _details(source, request.split, tally)
  score = dataclasses.replace(score, **details)

  # The run may be somebody else's, and its folder not writable.
  try:
    _save(run, score, tally.means())
  except OSError as error:
    return dataclasses.replace(score, unsaved=str(error))

  return score


def _in_training(run, request):
  """The score from training, if it is of the same windows; else None."""
  if request == ScoreRequest("validation") and not run.config.eval.sequences:
    return run.saved.describe(run.step).get("validation") or None
  return None


def _amount(source, tally, min_context):
  """How much was scored, in words: "200 images"."""
  if isinstance(source, data.Stream):
    symbol = source.unit.removeprefix("bits/")
    return f"{tally.tokens:,} {symbol}s, min_context={min_context}"
  noun = "images" if isinstance(source, data.Images) else "examples"
  return f"{tally.windows:,} {noun}"


def _details(source, split, tally):
  """The fields of a `Score` that only some kinds of data have."""
  if isinstance(source, data.Images):
    if source.optimum is not None:
      return dict(optimum=source.optimum)
    channels = source.shape[2]
    if channels > 1:
      return dict(by_channel=tally.means(channels).tolist())

  elif isinstance(source, data.Sequences):
    return dict(classes=list(source.classes))

  # The scored tokens are the first ones of the split, each scored once.
  elif num_bytes := source.num_bytes(split, tally.tokens):
    bits = float(tally.bits_L.sum())
    return dict(bits_per_byte=bits / num_bytes)

  return {}


def _overrides(run, request):
  """The settings that make a score differ from the step's own, as JSON."""
  # The step's own score is of the whole split, in the usual order.
  overrides: dict[str, Any] = {}
  if request.examples is not None:
    overrides["examples"] = request.examples
  if request.order:
    overrides["order"] = ",".join(request.order)

  # Other settings with which the weights can be read, and that change scores.
  changes = run.changes(config_lib.TO_READ_OTHER_DATA)
  for name, (_, value) in changes.items():
    if schema.affects(name) not in config_lib.UNSCORED:
      overrides[name] = value

  # By default scores are in float32, whatever dtype the run was trained in, so
  # that is no override.
  overrides.pop("model.dtype", None)
  dtype = run.experiment.config.model.dtype
  if dtype != "float32":
    overrides["model.dtype"] = dtype

  # Data that were moved have another path, but the same digest.
  if run.has_other_data:
    digest = run.experiment.source.digest()
    if digest != run.saved.describe(run.step)["data"]:
      overrides["data.path"] = run.experiment.config.data.path
      overrides["data"] = digest

  return overrides


def _save(run, score, bits_L):
  """Writes a score and its means by position as JSON, and as a picture."""
  experiment = run.experiment
  config = experiment.config.to_dict()
  result = score.json()
  name = (
    f"{score.split}-step{score.step}-context{score.min_context}-{score.weights}"
  )

  # Each kind of score has a file of its own: a score under overrides must not
  # replace the step's own.
  overrides = dict(score.overrides)
  if number := overrides.pop("examples", None):
    name += f"-examples{number}"
  if overrides:
    name += f"-overrides{zlib.crc32(json.dumps(overrides).encode()):08x}"

  path = run.workdir / "evaluations" / f"{name}.json"
  path.parent.mkdir(exist_ok=True)
  kept = dict(
    config={name: config[name] for name in ("data", "model", "attention")},
    by_position=[None if np.isnan(x) else round(float(x), 6) for x in bits_L],
  )
  atomic.write_json(path, result | kept)

  # A classifier's only loss is that of the label, which has no position.
  if experiment.model.classifies:
    return
  if isinstance(experiment.source, data.Images):
    figure = curves.bits_by_pixel(bits_L, experiment.source.shape, result)
  else:
    figure = curves.bits_by_position(bits_L, result)
  style.save(figure, path.with_suffix(".png"))
