"""The runs of a comparison, each in its own process and its own workdir."""

import json
import pathlib
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from sparse_transformer import atomic
from sparse_transformer.comparison import process, record, steps as steps_lib
from sparse_transformer.comparison.budget import flops_per_step
from sparse_transformer.comparison.folder import read_json
from sparse_transformer.comparison.plan import Plan
from sparse_transformer.comparison.record import Run
from sparse_transformer.model.transformer import count_parameters
from sparse_transformer.training import loop, metrics
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.run import in_float32, open_run

# Fields of a run's result.json. One of a run that has been trained, but not
# scored, or one of an older version, may have the first alone.
OLD_FIELDS = "steps", "tokens_per_second", "peak_bytes", "flops", "unit"
FIELDS = (
  *OLD_FIELDS,
  "seconds",
  "processor_seconds",
  "tokens_per_step",
  "parameters",
  "best_step",
  "validation",
)


def run_all(plan: Plan) -> list[Run]:
  """Runs what has no result yet; returns all runs as in a record.

  None has been scored on the test split.
  """
  # Seed by seed: a stopped comparison is about as far with every choice.
  for seed in range(plan.seeds):
    for choice in plan.choices:
      path = plan.workdir(choice, seed) / "result.json"
      # One that lacks fields is of a run that is yet to be scored.
      if not path.exists() or not {*FIELDS} <= {*read_json(path, *OLD_FIELDS)}:
        print(f"{plan.field}={choice}, seed {seed}", flush=True)
        _call(run, plan, choice, seed)
  return [
    _read(plan, choice, seed)
    for choice in plan.choices
    for seed in range(plan.seeds)
  ]


def _read(plan, choice, seed):
  """A run as in a record."""
  workdir = plan.workdir(choice, seed)
  result = read_json(workdir / "result.json", *FIELDS)
  lines = metrics.read(workdir)
  if not any(line["split"] == "validation" for line in lines):
    raise ValueError(
      f"{workdir / 'metrics.jsonl'} has no validation, and the run has no"
      f" curve; delete {workdir} and run the same command to train it again"
    )
  return dict(
    choice=choice,
    seed=seed,
    **{name: result[name] for name in FIELDS},
    test=None,
    curve=record.curve(lines, "validation"),
    train=record.curve(lines, "train", record.MAX_TRAIN),
  )


def test_best(plan: Plan, runs: Sequence[Run]) -> None:
  """Scores the runs with the best value on the test split, each only once.

  Args:
    plan: what is compared.
    runs: from `run_all`; of the best, `test` is set.
  """
  best = record.best_choice(runs)
  for run in runs:
    if run["choice"] == best:
      path = plan.workdir(best, run["seed"]) / "test.json"
      if not path.exists():
        print(f"{plan.field}={best}, seed {run['seed']}: test", flush=True)
        _call(test, plan, best, run["seed"])
      run["test"] = read_json(path, "bits_per_dim", "standard_error")


def _call(function, plan, choice, seed):
  workdir = plan.workdir(choice, seed)
  config = plan.config_of(choice, seed, steps_lib.read(workdir))
  task = f"the run in {workdir}"
  process.call(task, function, config.to_dict(), str(workdir))


def run(settings: Mapping[str, Any], folder: str) -> None:
  """Trains a run and scores it on the validation split.

  Writes its result.json. If there is one without a score, the run is not
  trained.

  Args:
    settings: its config.
    folder: its workdir.
  """
  workdir = pathlib.Path(folder)
  config = ConfigDict(settings).lock()
  path = workdir / "result.json"
  if path.exists():
    peak = read_json(path, *OLD_FIELDS)["peak_bytes"]
  else:
    loop.train(config, workdir)
    peak = peak_bytes()
  experiment = Experiment(config)
  result = _speed(config, experiment, metrics.read(workdir)) | dict(
    steps=config.train.steps,
    flops=config.train.steps * flops_per_step(config),
    parameters=count_parameters(experiment.model),
    peak_bytes=peak,
    unit=experiment.source.unit,
  )
  # If scoring is stopped, another process must not take its peak for this one.
  _write(path, result)
  with open_run(workdir, in_float32(config)) as opened:
    best = opened.best()
  (workdir / "test.json").unlink(missing_ok=True)  # of another checkpoint
  _write(path, result | dict(best_step=best["step"], validation=_score(best)))


def test(settings: Mapping[str, Any], folder: str) -> None:
  """Scores the best checkpoint of a run on the test split, as test.json.

  Args:
    settings: config of the run.
    folder: its workdir.
  """
  workdir = pathlib.Path(folder)
  step = read_json(workdir / "result.json", *FIELDS)["best_step"]
  with open_run(workdir, in_float32(ConfigDict(settings))) as opened:
    (result,) = opened.evaluations("test", [step])
  _write(workdir / "test.json", _score(result))


def _write(path, result):
  atomic.write_text(path, json.dumps(result) + "\n")


def _score(result):
  names = "bits_per_dim", "standard_error", "examples", "tokens"
  return {name: result[name] for name in names}


def _speed(config, experiment, lines):
  """How long training took, as far as the metrics of the run say it."""
  tokens = config.train.batch_size * experiment.source.length
  lines = [line for line in lines if line["split"] in metrics.NEEDED]
  rates = [
    line["tokens_per_second"] for line in lines if "tokens_per_second" in line
  ]
  rate = statistics.median(rates) if rates else None
  seconds, processor_seconds = (
    # A run that an older version began, and this one resumed, lacks the first.
    lines[-1][name] if lines and all(name in x for x in lines) else None
    for name in metrics.TIMES
  )
  if seconds is None and rate:
    seconds = config.train.steps * tokens / rate
  return dict(
    tokens_per_step=tokens,
    tokens_per_second=rate,
    seconds=seconds,
    processor_seconds=processor_seconds,
  )


def peak_bytes() -> int:
  """Peak memory of the device if known, else of this process."""
  stats = jax.local_devices()[0].memory_stats() or {}
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return stats.get("peak_bytes_in_use", size * unit)
