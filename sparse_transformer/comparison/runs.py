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
from sparse_transformer.comparison import budget as budget_lib, process, record
from sparse_transformer.comparison.plan import Plan, experiments, read_json
from sparse_transformer.comparison.record import Run
from sparse_transformer.model.transformer import count_parameters
from sparse_transformer.training import loop, metrics
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.run import in_float32, open_run

# Fields of a run's result.json: after training, and after scoring.
TRAINED = (
  "steps",
  "seconds",
  "processor_seconds",
  "tokens_per_step",
  "tokens_per_second",
  "flops",
  "parameters",
  "peak_bytes",
  "unit",
)
SCORED = *TRAINED, "best_step", "validation"


def decide_steps(plan: Plan) -> None:
  """Writes the number of steps of each run into its steps.json, once.

  Runs with the same value have equally many steps.
  """
  paths = {choice: _steps_path(plan, choice) for choice in plan.choices}
  new = [choice for choice in plan.choices if not paths[choice].exists()]
  if new and plan.budget[0] in budget_lib.CLOCKS:
    print(f"measuring the steps of {', '.join(new)}", flush=True)
    configs = {
      str(paths[choice]): plan.config_of(choice).to_dict() for choice in new
    }
    task = f"the measurement of steps in {plan.root}"
    process.call(task, measure_steps, configs, plan.budget)
  for choice, path in paths.items():
    steps = (
      _read_steps(path)
      if path.exists()
      else budget_lib.count_steps(plan.config_of(choice), plan.budget)
    )
    for seed in range(plan.seeds):
      if not (of_seed := _steps_path(plan, choice, seed)).exists():
        _write(of_seed, steps)


def measure_steps(
  configs: Mapping[str, Mapping[str, Any]], budget: budget_lib.Budget
) -> None:
  """Writes the steps that a time allows with each config.

  Args:
    configs: configs, by the file to write the steps to.
    budget: the time of each run.
  """
  made = experiments(ConfigDict(x).lock() for x in configs.values())
  times = budget_lib.time_per_step(list(made), budget[0])
  for path, time in zip(configs, times, strict=True):
    _write(pathlib.Path(path), budget_lib.steps_within(budget, time))


def _steps_path(plan, choice, seed=0):
  return plan.workdir(choice, seed) / "steps.json"


def _read_steps(path):
  steps = read_json(path)
  if type(steps) is not int:
    raise ValueError(f"{path} must be a whole number, not {steps!r}; delete it")
  return steps


def run_all(plan: Plan) -> list[Run]:
  """Runs what has no result yet; returns all runs as in a record.

  None has been scored on the test split.
  """
  # Seed by seed: a stopped comparison is about as far with every choice.
  for seed in range(plan.seeds):
    for choice in plan.choices:
      path = plan.workdir(choice, seed) / "result.json"
      if not path.exists() or "validation" not in read_json(path, *TRAINED):
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
  result = read_json(workdir / "result.json", *SCORED)
  lines = metrics.read(workdir)
  if not any(line["split"] == "validation" for line in lines):
    raise ValueError(
      f"{workdir / 'metrics.jsonl'} has no validation, and the run has no"
      f" curve; delete {workdir} and run the same command to train it again"
    )
  return dict(
    choice=choice,
    seed=seed,
    **{name: result[name] for name in SCORED},
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
  steps = _read_steps(_steps_path(plan, choice, seed))
  config = plan.config_of(choice, seed, steps)
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
  if not path.exists():
    loop.train(config, workdir)
    # The peak is of training: scoring may take place in another process.
    _write(path, _trained(config, metrics.read(workdir)))
  result = read_json(path, *TRAINED)
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
  step = read_json(workdir / "result.json", *SCORED)["best_step"]
  with open_run(workdir, in_float32(ConfigDict(settings))) as opened:
    (result,) = opened.evaluations("test", [step])
  _write(workdir / "test.json", _score(result))


def _write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  atomic.write_text(path, json.dumps(content) + "\n")


def _score(result):
  names = "bits_per_dim", "standard_error", "examples", "tokens"
  return {name: result[name] for name in names}


def _trained(config, lines):
  """The result of training, with its speed as recorded in the metrics."""
  experiment = Experiment(config)
  lines = [line for line in lines if line["split"] in metrics.NEEDED]
  rates = [
    line["tokens_per_second"] for line in lines if "tokens_per_second" in line
  ]
  return dict(
    steps=config.train.steps,
    flops=config.train.steps * budget_lib.flops_per_step(config),
    parameters=count_parameters(experiment.model),
    peak_bytes=peak_bytes(),
    unit=experiment.source.unit,
    tokens_per_step=config.train.batch_size * experiment.source.length,
    tokens_per_second=statistics.median(rates) if rates else None,
    **{name: lines[-1][name] if lines else None for name in metrics.TIMES},
  )


def peak_bytes() -> int:
  """Peak memory of the device if known, else of this process."""
  stats = jax.local_devices()[0].memory_stats() or {}
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return stats.get("peak_bytes_in_use", size * unit)
