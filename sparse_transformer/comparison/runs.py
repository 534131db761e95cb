"""The runs of a comparison, each in its own process and its own workdir."""

import json
import multiprocessing
import os
import pathlib
import resource
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from sparse_transformer import atomic, cli
from sparse_transformer.comparison.budget import (
  Budget,
  count_steps,
  flops_per_step,
)
from sparse_transformer.comparison.choices import (
  folder_name,
  with_steps,
  with_values,
)
from sparse_transformer.comparison.folder import read_json
from sparse_transformer.training import evaluate, loop, metrics
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.signals import Signals, Stopped

Result = dict[str, Any]  # the contents of a run's result.json
FIELDS = (
  "bits_per_dim",
  "steps",
  "seconds",
  "tokens_per_second",
  "peak_bytes",
  "flops",
  "unit",
)


def run_all(
  config: ConfigDict,
  root: pathlib.Path,
  field: str,
  choices: Sequence[str],
  budget: Budget,
  seeds: int,
  split: str,
) -> dict[str, list[Result]]:
  """Runs what has no result yet; returns results of each choice, by seed."""
  results: dict[str, list[Result]] = {choice: [] for choice in choices}
  # Seed by seed: a stopped comparison is about as far with every choice.
  for seed in range(seeds):
    for choice in choices:
      workdir = root / folder_name(choice) / f"seed{seed}"
      path = workdir / "result.json"
      if not path.exists():
        print(f"{field}={choice}, seed {seed}", flush=True)
        chosen = with_values(config, **{field: choice, "train.seed": seed})
        run_in_process(chosen, workdir, field, budget, split)
      results[choice].append(read_json(path, *FIELDS))
  return results


def run_in_process(
  config: ConfigDict,
  workdir: pathlib.Path,
  field: str,
  budget: Budget,
  split: str,
) -> None:
  """Calls `run` in a new process, to which it forwards requests to stop.

  Raises:
    Stopped: after a signal.
    OSError: if the run failed.
  """
  context = multiprocessing.get_context("spawn")
  receiver, sender = context.Pipe(duplex=False)
  inputs = config.to_dict(), str(workdir), field, budget, split
  process = context.Process(target=_run_and_exit, args=(sender, *inputs))
  with Signals() as signals:
    # Until the run handles signals itself, Ctrl-C is for this process alone.
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
      f"{signals.name} in {workdir}, whose progress is saved; run the same"
      " command to resume"
    )
  if process.exitcode:
    reason = f"it ended with status {process.exitcode}"
    if receiver.poll():
      reason = receiver.recv()
    raise OSError(
      f"the run in {workdir} failed: {reason}; the others are kept; run the"
      " same command to resume"
    )


def _run_and_exit(sender, *inputs):
  # In its own group, Ctrl-C cannot reach it and act as a second signal.
  os.setpgrp()
  try:
    run(*inputs)
  except Stopped:
    sys.exit(cli.STOPPED)
  except Exception as error:
    if (reason := cli.describe(error)) is None:
      raise
    sender.send(reason)
    sys.exit(1)


def run(
  settings: Mapping[str, Any],
  folder: str,
  field: str,
  budget: Budget,
  split: str,
) -> None:
  """Trains and evaluates one run, and writes its result.json."""
  workdir = pathlib.Path(folder)
  config = ConfigDict(settings).lock()
  steps = _steps(workdir, config, budget)
  config = with_steps(config, steps, field)
  state = loop.train(config, workdir)
  experiment = Experiment(config)
  score = evaluate.bits_per_dim(
    experiment.losses,
    state.ema,
    experiment.source.windows(split),
    batch_size=config.eval.batch_size,
    sharding=experiment.batch_sharding,
    name=split,
  )
  tokens = config.train.batch_size * experiment.source.length
  rates = [
    line["tokens_per_second"]
    for line in metrics.read(workdir)
    if "tokens_per_second" in line
  ]
  rate = statistics.median(rates) if rates else None
  result = score | dict(
    steps=steps,
    seconds=rate and steps * tokens / rate,
    tokens_per_second=rate,
    peak_bytes=peak_bytes(),
    flops=steps * flops_per_step(config),
    unit=experiment.source.unit,
    split=split,
  )
  atomic.write_text(workdir / "result.json", json.dumps(result) + "\n")


def _steps(workdir, config, budget):
  """The number of steps, determined once: resuming does not change it."""
  path = workdir / "steps.json"
  if not path.exists():
    steps = count_steps(config, budget)
    workdir.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, json.dumps(steps))
  return read_json(path)


def peak_bytes() -> int:
  """Peak memory of the device if known, else of this process."""
  stats = jax.local_devices()[0].memory_stats() or {}
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return stats.get("peak_bytes_in_use", size * unit)
