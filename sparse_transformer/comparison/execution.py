"""The runs of a comparison, each in its own process and its own workdir."""

import itertools
import math
import pathlib
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from sparse_transformer import atomic, config as config_lib
from sparse_transformer.comparison import budget as budget_lib, jobs, record
from sparse_transformer.comparison.plan import Plan
from sparse_transformer.comparison.record import Run
from sparse_transformer.model.transformer import count_parameters
from sparse_transformer.training import loop, metrics
from sparse_transformer.training.evaluation.trained_run import open_run
from sparse_transformer.training.experiment import Experiment

RESULT = "result.json"  # in the workdir of a run
NUMBERS = "steps", "peak_bytes", "parameters", "tokens_per_step"
SPLITS = "validation", "test"


def tune(
  plan: Plan, among: Sequence[jobs.Share] = jobs.ALONE
) -> dict[str, dict[str, float | None]]:
  """{choice: {candidate: bits on the validation split, None if it diverged}}.

  Each has one run, of a seed that is not compared. Runs what has no result yet,
  as many at a time as there are shares of the machine.

  Raises:
    ValueError: every candidate of a choice diverged.
  """
  scores: dict[str, dict] = {choice: {} for choice in plan.choices}
  pairs = itertools.product(plan.candidates, plan.choices)
  cases = [(choice, candidate, None) for candidate, choice in pairs]
  results = _scored(plan, cases, "validation", among)
  for (choice, candidate, _), result in zip(cases, results, strict=True):
    bits = result["validation"]["bits_per_dim"]
    scores[choice][candidate] = bits if math.isfinite(bits) else None
  for choice, of_choice in scores.items():
    if all(bits is None for bits in of_choice.values()):
      raise ValueError(
        f"--tune: with {plan.field}={choice}, training diverged with every"
        f" value of {plan.tuned}; give other values"
      )
  return scores


def train(
  plan: Plan,
  tuned: Mapping[str, str],
  among: Sequence[jobs.Share] = jobs.ALONE,
) -> None:
  """Runs what has no result yet, and scores it on the validation split.

  Args:
    plan: the runs.
    tuned: {choice: the best candidate}, "" if nothing is tuned.
    among: the shares of the machine for runs at the same time.
  """
  # Seed by seed: a stopped comparison is about as far with every choice.
  pairs = itertools.product(plan.seeds, plan.choices)
  cases = [(choice, tuned[choice], seed) for seed, choice in pairs]
  _scored(plan, cases, "validation", among)


def run_all(
  plan: Plan,
  tuned: Mapping[str, str],
  among: Sequence[jobs.Share] = jobs.ALONE,
) -> list[Run]:
  """`train`; returns a record's runs.

  Those with the best value on the validation split, and no others, are then
  scored on the test split.
  """
  train(plan, tuned, among)
  found = [
    _recorded(plan.workdir(choice, seed=seed), choice, seed)
    for choice in plan.choices
    for seed in plan.seeds
  ]
  best = record.best_choice(found)
  cases = [(best, tuned[best], seed) for seed in plan.seeds]
  results = _scored(plan, cases, "test", among)
  for of_best, result in zip(
    record.of_choice(found, best), results, strict=True
  ):
    of_best["test"] = result["test"]
  return found


def _scored(
  plan: Plan,
  cases: Iterable[tuple[str, str, int | None]],
  split: str,
  among: Sequence[jobs.Share],
) -> list[dict[str, Any]]:
  """The results of runs with their scores on a split, computed if missing.

  A case is (choice, candidate, seed), as in `Plan`.
  """
  tasks, paths = [], []
  for choice, candidate, seed in cases:
    workdir = plan.workdir(choice, candidate, seed)
    paths.append(workdir / RESULT)
    if paths[-1].exists() and split in _read(paths[-1]):
      continue
    more = ": test" if split == "test" else ""
    config = plan.config_of(choice, candidate, seed)
    label = f"{plan.label(choice, candidate)}, seed {config.train.seed}{more}"
    function = try_run if seed is None else run
    inputs = config, workdir, split, plan.limit(seed)
    tasks.append(jobs.Task(label, workdir, function, inputs))
  jobs.call(tasks, among)
  return [_read(path, split) for path in paths]


def _read(path, *fields):
  """A result, whose numbers are numbers."""
  result = record.read_json(path, *NUMBERS, *fields)
  scores = [x for x in map(result.get, SPLITS) if x is not None]
  try:
    numbers = [*(result[name] for name in NUMBERS)]
    numbers += [score["bits_per_dim"] for score in scores]
    is_sound = not any(map(math.isnan, numbers))
  except (TypeError, KeyError):
    is_sound = False
  if not is_sound:
    raise ValueError(
      f"{path} cannot be read: a number is missing; delete it: compare writes"
      " it again"
    )
  return result


def _recorded(workdir, choice, seed):
  """A run as in a record, not yet scored on the test split."""
  result = _read(workdir / RESULT, "best_step", "validation")
  lines = metrics.read(workdir)
  if not any(line["split"] == "validation" for line in lines):
    raise ValueError(
      f"{workdir / 'metrics.jsonl'} has no validation, and the run has no"
      f" curve; delete {workdir} and run the same command to train it again"
    )
  curves = dict(
    curve=record.curve(lines, "validation"),
    train=record.curve(lines, "train", record.MAX_TRAIN),
  )
  return dict(choice=choice, seed=seed) | result | dict(test=None) | curves


def run(
  config: ConfigDict,
  workdir: pathlib.Path,
  split: str,
  limit: budget_lib.Budget | None = None,
) -> None:
  """Adds a run's score on a split to its result; first trains it if needed.

  A run with a result has been trained. Its best checkpoint on validation is
  scored. A limit is for `loop.train`.
  """
  path = workdir / RESULT
  if not path.exists():
    steps = int(loop.train(config, workdir, limit=limit).step)
    # The peak is of training: scoring may take place in another process.
    _write(path, _trained(config, steps, metrics.read(workdir)))
  with open_run(workdir, config_lib.in_float32(config)) as opened:
    found = opened.best()
    if split != "validation":
      (found,) = opened.evaluations(split, [found["step"]])
  score = {"best_step": found["step"], split: _score(found)}
  _write(path, _read(path) | score)


def try_run(config: ConfigDict, workdir: pathlib.Path, *inputs: Any) -> None:
  """`run` of a candidate: if training diverges, its score is infinite."""
  try:
    run(config, workdir, *inputs)
  except FloatingPointError as error:
    print(f"diverged: {error}", flush=True)
    score = {"validation": {"bits_per_dim": math.inf}}
    _write(workdir / RESULT, dict.fromkeys(NUMBERS, 0) | score)


def _write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  atomic.write_json(path, content)


def _score(result):
  names = "bits_per_dim", "bits_per_byte", "standard_error", "examples"
  more = "accuracy", "accuracy_error", "tokens"
  return {x: result[x] for x in (*names, *more) if x in result}


def _trained(config, steps, lines):
  """The result of training, with its times as recorded in the metrics."""
  experiment = Experiment(config)
  lines = [line for line in lines if line["split"] in metrics.NEEDED]
  return dict(
    steps=steps,
    flops=budget_lib.flops(config, steps),
    keys=budget_lib.keys(experiment),
    parameters=count_parameters(experiment.model),
    peak_bytes=peak_bytes(),
    unit=experiment.source.unit,
    tokens_per_step=config.train.batch_size * experiment.model.length,
    **{name: lines[-1][name] if lines else None for name in metrics.TIMES},
  )


def peak_bytes() -> int:
  """Peak memory of the device if known, else of this process."""
  stats = jax.local_devices()[0].memory_stats() or {}
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return stats.get("peak_bytes_in_use", size * unit)
