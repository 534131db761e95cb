"""Evaluations of a run in bits per dim, saved in the folder `evaluations`."""

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
  """What to score, and how.

  Attributes:
    split: one of `data.SPLITS`.
    min_context: the minimum number of positions before a scored position. A
      larger number gives better scores but takes longer, because windows
      overlap.
    weights: "ema" for the averaged weights or "params" for the raw weights, see
      `State`.
    examples: the number of windows to score, from the first; None for all.
    order: the order in which the pixels of images are read, see
      `Arrangement.labels`.
  """

  split: str = "test"
  min_context: int = 0
  weights: str = "ema"
  examples: int | None = None
  order: tuple[str, ...] = ()

  def windows(self, source: data.Source) -> data.Lazy:
    """Returns the windows to score, as pairs (symbols [L], is scored [L]).

    Raises ValueError if the source does not have these windows, see
    `data.Source`.
    """
    windows = source.windows(self.split, self.min_context)
    number = len(windows) if self.examples is None else self.examples
    if number > len(windows):
      raise ValueError(
        f"--examples={number} must be at most {len(windows):,}, the number in"
        f" the {self.split} split"
      )
    labels = source.arrangement.labels(self.order)

    # Read a window only when it is scored, because a split may not fit in
    # memory.
    def window(i: int) -> tuple[np.ndarray, np.ndarray]:
      symbols, scored = windows[i]
      return source.arrangement.arrange(symbols, labels), scored

    return data.Lazy(number, window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """The score of a step of a run. Fields are in the order of its JSON.

  Attributes:
    split, min_context, weights: see `ScoreRequest`.
    step: the step that was scored.
    overrides: the settings that change the score, as {name: value}.
    command: the command that requested the score.
    dtype: the dtype of activations.
    unit: the unit of `bits_per_dim`, such as bits/byte.
    in_training: the same score as computed during training, if known.
    accuracy, accuracy_error: the fraction of labels that are predicted
      correctly, and its standard error.
    bits_per_dim: the mean bits per position; None if no position was scored.
    standard_error: the standard error of `bits_per_dim`; None for fewer than
      two blocks.
    examples: the number of windows that were scored.
    tokens: the number of positions that were scored.
    optimum: for generated data, the lowest bits per dim that are possible.
    by_channel: the bits per dim of each channel of images.
    classes: the names of the labels.
    bits_per_byte: for tokenized text, the bits per byte of the original text.
    unsaved: the reason why the score could not be written, or None.
    stage, amount: the weights that were scored and the amount of data, as words
      for `sentence`.
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
    """Returns the fields that `eval.py` prints and saves, if known."""
    # Include these always; null means that they cannot be computed.
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
    """Returns "test, step 700: 1.884 ± 0.017 bits/dim, 200 images" and similar.

    The number after ± is the standard error with two digits.
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

  # Show two digits of the error, and the value to the same precision.
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
    workdir: the folder of the run.
    steps: the steps to score, each as in `Saved.find`; ["all"] for all steps,
      [] for the last step.
    overrides: overrides of the config, {"group.field": value}.
    requests: what to score at each step.

  Yields:
    Each score as soon as it is known.

  Raises:
    ValueError: the data do not have the requested split, context or number of
      examples. This error is raised before anything is scored.
    OSError: a score could not be written. This error is raised after all scores
    have been yielded. signals.Stopped: a signal ended the evaluation.
  """
  saved = Saved(workdir)
  numbers = saved.steps() if steps == ["all"] else []
  numbers = numbers or [saved.find(x) for x in steps] or [saved.find()]
  runs = [open_run(workdir, overrides, x) for x in dict.fromkeys(numbers)]

  # Steps may have different configs. Steps with equal configs share an
  # experiment, so that its programs are compiled once.
  experiments = {run.experiment.config: run.experiment for run in runs}

  # Check all requests before the evaluation, which may take hours.
  avoided: dict[str, str] = {}
  for experiment in experiments.values():
    kernel_check.avoid_wrong(experiment)
    avoided |= registry.avoided()
    for request in requests:
      request.windows(experiment.source)

  # If a kernel fails its check for one config, avoid it for all, so that all
  # scores are computed in the same way.
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
        # Yield all scores first, and raise the error at the end.
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
    state: the state to score, from `run.restore`.
    request: what to score.
    command: the command that requests the score, which is saved with it.
    check_stop: a function called before each batch, which may raise an
      exception to stop.

  Raises ValueError if the data do not have the requested split, context or
  number of examples.
  """
  experiment = run.experiment
  config = experiment.config
  source = experiment.source
  mesh.check_batch(config, experiment.mesh.shape, "eval")

  # By default, GPUs and TPUs round the operands of float32 products to fewer
  # bits, so scores would differ between machines.
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

  # From here on, bits are arranged by pixel, regardless of the order in which
  # pixels were predicted.
  labels = source.arrangement.labels(request.order)
  tally.bits_L = source.arrangement.restore(tally.bits_L[None], labels)[0]
  details = _details(source, request.split, tally)
  score = dataclasses.replace(score, **details)

  # The folder of the run may not be writable, for example if the run belongs to
  # someone else.
  try:
    _save(run, score, tally.means())
  except OSError as error:
    return dataclasses.replace(score, unsaved=str(error))

  return score


def _in_training(run, request):
  """Returns the score from training; None if training used other windows."""
  if request == ScoreRequest("validation") and not run.config.eval.sequences:
    return run.saved.describe(run.step).get("validation") or None
  return None


def _amount(source, tally, min_context):
  """Returns how much was scored, such as "200 images"."""
  if isinstance(source, data.Stream):
    symbol = source.unit.removeprefix("bits/")
    return f"{tally.tokens:,} {symbol}s, min_context={min_context}"
  noun = "images" if isinstance(source, data.Images) else "examples"
  return f"{tally.windows:,} {noun}"


def _details(source, split, tally):
  """Returns the fields of a `Score` that apply only to some kinds of data."""
  if isinstance(source, data.Images):
    if source.optimum is not None:
      return dict(optimum=source.optimum)
    channels = source.shape[2]
    if channels > 1:
      return dict(by_channel=tally.means(channels).tolist())

  elif isinstance(source, data.Sequences):
    return dict(classes=list(source.classes))

  # Each token is scored once, and the scored tokens are the first of the split.
  elif num_bytes := source.num_bytes(split, tally.tokens):
    bits = float(tally.bits_L.sum())
    return dict(bits_per_byte=bits / num_bytes)

  return {}


def _overrides(run, request):
  """Returns the settings that change the score of a step, as JSON."""
  # Without overrides, the whole split is scored, in the usual order.
  overrides: dict[str, Any] = {}
  if request.examples is not None:
    overrides["examples"] = request.examples
  if request.order:
    overrides["order"] = ",".join(request.order)

  # Add other settings that change scores of the same weights.
  changes = run.changes(config_lib.TO_READ_OTHER_DATA)
  for name, (_, value) in changes.items():
    if schema.affects(name) not in config_lib.UNSCORED:
      overrides[name] = value

  # By default, scores are computed in float32, regardless of the dtype of the
  # run, so float32 is not an override.
  overrides.pop("model.dtype", None)
  dtype = run.experiment.config.model.dtype
  if dtype != "float32":
    overrides["model.dtype"] = dtype

  # If data were only moved, the path differs but the checksum does not.
  if run.has_other_data:
    digest = run.experiment.source.digest()
    if digest != run.saved.describe(run.step)["data"]:
      overrides["data.path"] = run.experiment.config.data.path
      overrides["data"] = digest

  return overrides


def _save(run, score, bits_L):
  """Writes a score and the mean bits by position, as JSON and as a picture."""
  experiment = run.experiment
  config = experiment.config.to_dict()
  result = score.json()
  name = (
    f"{score.split}-step{score.step}-context{score.min_context}-{score.weights}"
  )

  # Use a separate file for each kind of score, because a score with overrides
  # must not replace the score without them.
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

  # A classifier has only one loss per window, so there are no bits by position.
  if experiment.model.classifies:
    return
  if isinstance(experiment.source, data.Images):
    figure = curves.bits_by_pixel(bits_L, experiment.source.shape, result)
  else:
    figure = curves.bits_by_position(bits_L, result)
  style.save(figure, path.with_suffix(".png"))
