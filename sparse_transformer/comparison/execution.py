"""The runs of a comparison, each in its own process and its own workdir."""

import itertools
import math
import multiprocessing
import os
import pathlib
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from sparse_transformer import atomic, cli, config as config_lib
from sparse_transformer.comparison import budget as budget_lib, record
from sparse_transformer.comparison.plan import Plan
from sparse_transformer.comparison.record import Run
from sparse_transformer.model.transformer import count_parameters
from sparse_transformer.signals import STOPPED, Signals, Stopped
from sparse_transformer.training import loop, metrics
from sparse_transformer.training.analysis import costs
from sparse_transformer.training.evaluation.trained_run import open_run
from sparse_transformer.training.experiment import Experiment

RESULT = "result.json"  # in the workdir of a run
NUMBERS = "steps", "peak_bytes", "parameters", "tokens_per_step"
SPLITS = "validation", "test"


def tune(plan: Plan) -> dict[str, dict[str, float | None]]:
  """{choice: {candidate: bits on the validation split, None if it diverged}}.

  Each has one run, of a seed that is not compared. Runs what has no result yet.

  Raises:
    ValueError: every candidate of a choice diverged.
  """
  scores: dict[str, dict] = {choice: {} for choice in plan.choices}
  for candidate, choice in itertools.product(plan.candidates, plan.choices):
    result = _scored(plan, choice, candidate, None, "validation")
    bits = result["validation"]["bits_per_dim"]
    scores[choice][candidate] = bits if math.isfinite(bits) else None
  for choice, of_choice in scores.items():
    if all(bits is None for bits in of_choice.values()):
      raise ValueError(
        f"--tune: with {plan.field}={choice}, training diverged with every"
        f" value of {plan.tuned}; give other values"
      )
  return scores


def run_all(plan: Plan, tuned: Mapping[str, str]) -> list[Run]:
  """Runs what has no result yet; returns a record's runs.

  Those with the best value on the validation split, and no others, are then
  scored on the test split.

  Args:
    plan: the runs.
    tuned: {choice: the best candidate}, "" if nothing is tuned.
  """
  # Seed by seed: a stopped comparison is about as far with every choice.
  for seed in plan.seeds:
    for choice in plan.choices:
      _scored(plan, choice, tuned[choice], seed, "validation")
  found = [
    _recorded(plan.workdir(choice, seed=seed), choice, seed)
    for choice in plan.choices
    for seed in plan.seeds
  ]
  best = record.best_choice(found)
  for seed, of_best in zip(
    plan.seeds, record.of_choice(found, best), strict=True
  ):
    of_best["test"] = _scored(plan, best, tuned[best], seed, "test")["test"]
  return found


def _scored(plan, choice, candidate, seed, split):
  """The result of a run with its score on a split, computed if missing."""
  workdir = plan.workdir(choice, candidate, seed)
  path = workdir / RESULT
  if not path.exists() or split not in _read(path):
    more = ": test" if split == "test" else ""
    config = plan.config_of(choice, candidate, seed)
    of_seed = f"seed {config.train.seed}{more}"
    print(f"{plan.label(choice, candidate)}, {of_seed}", flush=True)
    function = try_run if seed is None else run
    inputs = config, workdir, split, plan.limit(seed)
    call(f"the run in {workdir}", function, *inputs)
  return _read(path, split)


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
  return {x: result[x] for x in (*names, "tokens") if x in result}


def _trained(config, steps, lines):
  """The result of training, with its times as recorded in the metrics."""
  experiment = Experiment(config)
  lines = [line for line in lines if line["split"] in metrics.NEEDED]
  return dict(
    steps=steps,
    flops=steps * budget_lib.flops_per_step(config),
    keys=costs.keys_per_query(experiment.model),
    parameters=count_parameters(experiment.model),
    peak_bytes=peak_bytes(),
    unit=experiment.source.unit,
    tokens_per_step=config.train.batch_size * experiment.source.length,
    **{name: lines[-1][name] if lines else None for name in metrics.TIMES},
  )


def peak_bytes() -> int:
  """Peak memory of the device if known, else of this process."""
  stats = jax.local_devices()[0].memory_stats() or {}
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return stats.get("peak_bytes_in_use", size * unit)


def call(task: str, function: Callable[..., None], *inputs: Any) -> None:
  """Calls a function in a new process, whose memory is freed when it ends.

  Signals are forwarded to it. Messages name the task. The function is found by
  its name, and its inputs are pickled.

  Raises:
    Stopped: after a signal.
    OSError: the function failed.
  """
  context = multiprocessing.get_context("spawn")
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(
    target=_call_and_exit, args=(sender, function, *inputs)
  )
  with Signals() as signals:
    # Until the process handles signals itself, Ctrl-C is for this one alone.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.start()
    signal.signal(signal.SIGINT, handler)
    while process.is_alive() and not signals.name:
      process.join(0.1)
    if process.is_alive():
      process.terminate()
      process.join()
  if signals.name:
    raise Stopped(
      f"{signals.name} in {task}; what it has saved is kept; run the same"
      " command to resume"
    )
  if process.exitcode:
    reason = f"it ended with status {process.exitcode}"
    if receiver.poll():
      reason = receiver.recv()
    raise OSError(
      f"{task} failed: {reason}; finished runs are kept; run the same command"
      " to resume"
    )


def _call_and_exit(sender, function, *inputs):
  # In a separate group, so that Ctrl-C cannot act as a second signal.
  os.setpgrp()
  try:
    function(*inputs)
  except Stopped:
    sys.exit(STOPPED)
  except Exception as error:
    if (reason := cli.describe(error)) is None:
      raise
    sender.send(reason)
    sys.exit(1)
