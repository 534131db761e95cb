"""The runs of a comparison, each in its own process and its own workdir."""

import math
import multiprocessing
import os
import pathlib
import resource
import signal
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from sparse_transformer import atomic, cli, config as config_lib
from sparse_transformer.comparison import budget as budget_lib, record
from sparse_transformer.comparison.plan import Plan, experiments
from sparse_transformer.comparison.record import Run
from sparse_transformer.model.transformer import count_parameters
from sparse_transformer.signals import STOPPED, Signals, Stopped
from sparse_transformer.training import loop, metrics
from sparse_transformer.training.evaluation.trained_run import open_run
from sparse_transformer.training.experiment import Experiment

RESULT = "result.json"  # in the workdir of a run
NUMBERS = "steps", "peak_bytes", "parameters", "tokens_per_step"
SPLITS = "validation", "test"


def decide_steps(plan: Plan) -> dict[str, int]:
  """The number of training steps with each value.

  Those of a time are measured once, and kept in steps.json.
  """
  if steps := plan.steps():
    return steps
  path = plan.root / "steps.json"
  if not path.exists():
    print(f"measuring the steps of {', '.join(plan.choices)}", flush=True)
    call(f"the measurement of steps in {plan.root}", measure_steps, plan, path)
  return record.read_json(path, *plan.choices)


def measure_steps(plan: Plan, path: pathlib.Path) -> None:
  """Writes {choice: steps that the time of the plan allows} to a file."""
  made = experiments(map(plan.config_of, plan.choices))
  times = budget_lib.time_per_step(list(made), plan.budget[0])
  steps = [budget_lib.steps_within(plan.budget, time) for time in times]
  _write(path, dict(zip(plan.choices, steps, strict=True)))


def run_all(plan: Plan, steps: Mapping[str, int]) -> list[Run]:
  """Runs what has no result yet, in steps by choice; returns a record's runs.

  Those with the best value on the validation split, and no others, are then
  scored on the test split.
  """
  # Seed by seed: a stopped comparison is about as far with every choice.
  for seed in range(plan.seeds):
    for choice in plan.choices:
      _scored(plan, choice, seed, steps, "validation")
  found = [
    _recorded(plan.workdir(choice, seed), choice, seed)
    for choice in plan.choices
    for seed in range(plan.seeds)
  ]
  best = record.best_choice(found)
  for seed, of_best in enumerate(record.of_choice(found, best)):
    of_best["test"] = _scored(plan, best, seed, steps, "test")["test"]
  return found


def _scored(plan, choice, seed, steps, split):
  """The result of a run with its score on a split, computed if missing."""
  workdir = plan.workdir(choice, seed)
  path = workdir / RESULT
  if not path.exists() or split not in _read(path):
    more = ": test" if split == "test" else ""
    print(f"{plan.field}={choice}, seed {seed}{more}", flush=True)
    config = plan.config_of(choice, seed, steps[choice])
    call(f"the run in {workdir}", run, config, workdir, split)
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


def run(config: ConfigDict, workdir: pathlib.Path, split: str) -> None:
  """Adds a run's score on a split to its result; first trains it if needed.

  A run with a result has been trained. Its best checkpoint on validation is
  scored.
  """
  path = workdir / RESULT
  if not path.exists():
    loop.train(config, workdir)
    # The peak is of training: scoring may take place in another process.
    _write(path, _trained(config, metrics.read(workdir)))
  with open_run(workdir, config_lib.in_float32(config)) as opened:
    found = opened.best()
    if split != "validation":
      (found,) = opened.evaluations(split, [found["step"]])
  score = {"best_step": found["step"], split: _score(found)}
  _write(path, _read(path) | score)


def _write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  atomic.write_json(path, content)


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
