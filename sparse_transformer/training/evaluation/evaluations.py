"""Evaluations of a run in bits per dim: `evaluations/NAME.json`, and .png."""

import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparse_transformer import atomic, config as config_lib, data, schema
from sparse_transformer.figures import curves, style
from sparse_transformer.signals import Stopped
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.evaluation import scoring
from sparse_transformer.training.experiment import Experiment, Run
from sparse_transformer.training.step import State

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Request:
  """What to score."""

  split: str = "test"  # one of `data.SPLITS`
  min_context: int = 0  # the least number of positions before a scored one
  weights: str = "ema"  # or "params", see `State`
  examples: int | None = None  # the first ones, or None for all
  order: tuple[str, ...] = ()  # of images, see `data.Orders.labels`
  command: str = ""  # that asks for it, kept with the result

  def windows(self, source: data.Source) -> data.Lazy:
    """Those to score, see `data.Source`; ValueError if they do not exist."""
    windows = source.windows(self.split, self.min_context)
    number = len(windows) if self.examples is None else self.examples
    if number > len(windows):
      raise ValueError(
        f"--examples={number} must be at most {len(windows):,}, those of the"
        f" {self.split} split"
      )
    labels = source.orders.labels(self.order)

    def window(i: int) -> tuple[np.ndarray, np.ndarray]:
      symbols, scored = windows[i]
      return source.orders.arrange(symbols, labels), scored

    return data.Lazy(number, window)


def evaluate(
  run: Run,
  state: State,
  request: Request = Request(),
  check_stop: Callable[[], None] = lambda: None,
) -> Result:
  """Scores a state of a run, and saves the result.

  Returns:
    What is scored, with `Tally.summary`, as JSON values. If `check_stop` raises
    `Stopped`, it covers the windows scored until then, has `complete` false,
    and is not saved. If it cannot be written, `unsaved` says why.

  Raises ValueError if the split, the context or so many examples do not exist.
  """
  experiment = run.experiment
  config, source = experiment.config, experiment.source
  mesh.check_batch(config, experiment.mesh.shape, "eval")
  windows = request.windows(source)
  asked = dict(examples=request.examples, order=",".join(request.order) or None)
  partly = {name: x for name, x in asked.items() if x is not None}
  block = scoring.BLOCK if isinstance(source, data.Stream) else None
  tally = scoring.Tally(len(windows[0][1]), block)
  about: Result = dict(
    split=request.split,
    step=run.step,
    min_context=request.min_context,
    weights=request.weights,
    overrides=partly | _overrides(run),
    command=request.command,
    dtype=config.model.dtype,
    unit=source.unit,
  )
  plain = dataclasses.replace(request, command="")
  if plain == Request("validation") and not run.config.eval.sequences:
    saved = run.saved.describe(run.step).get("validation")
    about |= dict(in_training=saved) if saved else {}
  # By default, GPUs and TPUs round the operands of products in float32.
  precision = jax.default_matmul_precision.value
  if config.model.dtype == "float32":
    precision = precision or "highest"
  try:
    with jax.default_matmul_precision(precision):
      summary = scoring.bits_per_dim(
        functools.partial(experiment.losses, getattr(state, request.weights)),
        windows,
        batch_size=config.eval.batch_size,
        sharding=experiment.batch_sharding,
        tally=tally,
        check_stop=check_stop,
      )
  except Stopped:
    return about | tally.summary() | dict(complete=False)
  labels = source.orders.labels(request.order)  # by pixel, whatever the order
  tally.bits_L = source.orders.restore(tally.bits_L[None], labels)[0]
  result = about | summary | _details(source, request.split, tally)
  try:
    _save(run, result, tally.means())
  except OSError as error:  # in the run of somebody else
    result["unsaved"] = str(error)
  return result


def sentence(result: Result, experiment: Experiment) -> str:
  """A result for readers: "test, step 700: 1.911 ± 0.017 bits/dim, 200 images".

  ± is the standard error, with two digits.
  """
  source, size = experiment.source, f"{result['examples']:,} examples"
  if isinstance(source, data.Stream):
    size = f"{result['tokens']:,} {source.unit.removeprefix('bits/')}s"
    size += f", min_context={result['min_context']}"
  elif isinstance(source, data.Images):
    size = f"{result['examples']:,} images"

  def shown(name: str, error: str) -> str:
    value, spread = result[name], result[error]
    if not (spread and math.isfinite(spread)):
      return f"{value:.4f}"
    digits = max(0, 1 - math.floor(math.log10(spread)))
    return f"{value:.{digits}f} ± {spread:.{digits}f}"

  parts = [f"{shown('bits_per_dim', 'standard_error')} {result['unit']}", size]
  if "accuracy" in result:
    parts.insert(1, f"accuracy {shown('accuracy', 'accuracy_error')}")
  parts += [f"{name}={x}" for name, x in result["overrides"].items()]
  stage = experiment.stage(result["step"])
  return f"{result['split']}, {stage}: {', '.join(parts)}"


def _details(source, split, tally):
  match source:
    case data.Images(optimum=float(optimum)):
      return dict(optimum=optimum)
    case data.Images(shape=(_, _, channels)) if channels > 1:
      return dict(by_channel=tally.means(channels).tolist())
    case data.Sequences(classes=names) if names:
      return dict(classes=[*names])
    # Each token is scored once, from the first.
    case data.Stream() if num := source.num_bytes(split, tally.tokens):
      return dict(bits_per_byte=float(tally.bits_L.sum()) / num)
  return {}


def _overrides(run):
  """The settings by which a score is not the checkpoint's own."""
  config = run.experiment.config
  changes = run.changes(config_lib.TO_READ_OTHER_DATA)
  scored = [x for x in changes if schema.affects(x) not in config_lib.UNSCORED]
  found = {x: changes[x][1] for x in scored}
  found["model.dtype"] = config.model.dtype
  if config.model.dtype == "float32":  # which scores are in by default
    del found["model.dtype"]
  if run.has_other_data:
    digest = run.experiment.source.digest()
    if digest != run.saved.describe(run.step)["data"]:  # it was not moved
      found |= {"data.path": config.data.path, "data": digest}
  return found


def _save(run, result, bits_L):
  experiment = run.experiment
  config, source = experiment.config.to_dict(), experiment.source
  more = dict(
    config={name: config[name] for name in ("data", "model", "attention")},
    by_position=[None if np.isnan(x) else round(float(x), 6) for x in bits_L],
  )
  name = "{split}-step{step}-context{min_context}-{weights}".format(**result)
  overrides = dict(result["overrides"])  # the run's own result stays
  if number := overrides.pop("examples", None):
    name += f"-examples{number}"
  if overrides:
    name += f"-overrides{zlib.crc32(json.dumps(overrides).encode()):08x}"
  path = run.workdir / "evaluations" / f"{name}.json"
  path.parent.mkdir(exist_ok=True)
  atomic.write_json(path, result | more)
  if experiment.model.classifies:
    return  # labels have no positions
  if isinstance(source, data.Images):
    figure = curves.bits_by_pixel(bits_L, source.shape, result)
  else:
    figure = curves.bits_by_position(bits_L, result)
  style.save(figure, path.with_suffix(".png"))
