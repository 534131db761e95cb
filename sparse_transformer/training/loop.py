"""The training loop of a run."""

import math
import pathlib
import shlex
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sparse_transformer import config as config_lib, data
from sparse_transformer.data import lazy
from sparse_transformer.figures import plots
from sparse_transformer.training import (
  checkpoint,
  evaluate,
  metrics,
  signals as signals_lib,
  workdir as workdir_lib,
)
from sparse_transformer.training.experiment import Experiment


def train(config, workdir):
  """Trains to config.train.steps and returns the final state.

  Writes into the workdir config.json, patterns.png, metrics.jsonl, TensorBoard
  events and checkpoints/<step>/. Raises workdir.Stopped at a signal, when what
  there is has been saved.
  """
  # -- What the config names; all that can be wrong with it is wrong here.
  experiment = Experiment(config)
  source, model = experiment.source, experiment.model
  check_settings(config)
  batches = make_batches(config, source.examples("train"))
  # A pass over shapes alone: what the network refuses, it refuses here.
  shapes = jax.eval_shape(experiment.init)
  jax.eval_shape(experiment.losses, shapes.params, batches[0])
  config_lib.check_config(workdir, config)

  workdir = pathlib.Path(workdir)
  with (
    workdir_lib.hold(workdir),
    signals_lib.Signals() as signals,
    checkpoint.Checkpoints(
      workdir,
      keep=config.checkpoint.keep,
      keep_best=config.checkpoint.keep_best,
      about=checkpoint.about(config, source),
      on_error=config.checkpoint.on_error,
    ) as checkpoints,
  ):
    state = first_state(experiment, checkpoints)
    config_lib.write_config(workdir, config, int(state.step))
    plots.save_patterns(
      workdir / "patterns.png", model.patterns, model.shape, model.length
    )
    step = jax.jit(experiment.step, donate_argnums=0)

    # -- Loop.
    first, last = int(state.step), config.train.steps
    throughput = metrics.Throughput()
    with metrics.Writer(
      workdir, step=first, steps=last, on_error=config.checkpoint.on_error
    ) as writer:
      log = Log(experiment, writer, metrics.read(workdir))
      if first and log.lacks_validation(first):  # it was stopped there
        validate(experiment, state, log, first, signals)
      for done in range(first + 1, last + 1):
        if signals.name:
          break
        batch = jax.device_put(batches[done - 1], experiment.batch_sharding)
        state, measured = step(state, batch)
        writer.advance()
        throughput.count(batch.size)
        log.watch(done, measured)
        if done == first + 1:
          jax.block_until_ready(state)
          throughput.restart()  # compilation is not throughput
        if is_due(done, config.train.log_every, last):
          log.training(done, measured, throughput)
        if is_due(done, config.eval.every, last):
          log.flush()
          if not validate(experiment, state, log, done, signals):
            break
          throughput.restart()
        if is_due(done, config.checkpoint.every, last):
          log.flush()
          checkpoints.save(state, log.validated)
          throughput.restart()
      log.flush()
      if last == 0 or signals.name:
        checkpoints.save(state, log.validated)
    checkpoints.finish()
    if signals.name:
      raise signals_lib.Stopped(
        f"{signals.name} at step {int(state.step)}, which is saved; start the"
        " command again to go on"
      )
  return state


def make_batches(config, examples):
  return data.batches(examples, config.train.batch_size, config.train.seed)


def first_state(experiment, checkpoints):
  """The last good checkpoint of the workdir, or the state the seed gives."""
  mesh = experiment.batch_sharding.mesh
  whole = NamedSharding(mesh, PartitionSpec())
  state = checkpoints.restore_last(jax.eval_shape(experiment.init))
  if state is None:
    return jax.jit(experiment.init, out_shardings=whole)()
  print(f"goes on from step {int(state.step)}")
  return jax.device_put(state, whole)


def is_due(step, every, last):
  """Whether periodic work falls on this step; it always does on the last."""
  return step == last or (every > 0 and step % every == 0)


class Log:
  """What a run tells of its steps, and where it draws the line.

  The metrics of a step are looked at while the next one runs, so that the
  device never waits.
  """

  def __init__(self, experiment, writer, lines):
    """lines: those that are there already, of `metrics.read`."""
    self._experiment, self._writer = experiment, writer
    self._config = experiment.config.train
    self._pending = None  # (step, metrics) nobody has looked at
    self.validated = None  # bits of the last validation
    self._logged = math.inf  # nats of the last line, what a spike is above
    self._skipped = []  # steps
    self._validations = set()
    for line in lines:
      if line["split"] == "train":
        self._logged = line["nats"]
      elif line["split"] == "validation":
        self._validations.add(line["step"])
        self.validated = line["bits_per_dim"]
      elif line["split"] == "skipped":
        self._skipped.append(line["step"])

  def lacks_validation(self, step):
    every = self._experiment.config.eval.every
    due = is_due(step, every, self._config.steps)
    return due and step not in self._validations

  def watch(self, step, measured):
    """Looks at the metrics of the step before, and remembers these."""
    self.flush()
    self._pending = step, measured

  def flush(self):
    """Looks at the metrics nobody has looked at."""
    if self._pending is None:
      return
    (step, measured), self._pending = self._pending, None
    values = {name: float(value) for name, value in measured.items()}
    for name in ("nats", *values):  # the loss first
      if not math.isfinite(values[name]):
        return self._bad(step, name, values[name])
    if (
      self._config.spike and values["nats"] > self._config.spike * self._logged
    ):
      self._writer.note(
        step, "spike", nats=values["nats"], examples=self._examples(step)
      )

  def _bad(self, step, name, value):
    examples = self._examples(step)
    if self._config.nonfinite == "stop":
      raise FloatingPointError(
        f"{name} is {value} at step {step}, whose batch holds the training"
        f" examples {', '.join(map(str, examples))}; the weights are as before"
        f" it; to compute it again: {replay_command(step)}"
      )
    self._skipped.append(step)
    self._writer.note(
      step, "skipped", metric=name, value=str(value), examples=examples
    )
    row = self._skipped[-self._config.max_skipped - 1 :]
    if row == list(range(step - self._config.max_skipped, step + 1)):
      raise FloatingPointError(
        f"{name} is {value} at step {step}, after {len(row) - 1} batches in a"
        " row were skipped (train.max_skipped)"
      )

  def _examples(self, step):
    """The training examples in the batch of a step, by number."""
    numbers = range(len(self._experiment.source.examples("train")))
    return make_batches(self._experiment.config, numbers)[step - 1].tolist()

  def training(self, step, measured, throughput):
    """One line of training metrics."""
    self.flush()
    values = {name: float(value) for name, value in measured.items()}
    if not all(map(math.isfinite, values.values())):
      return  # there is a line of its own
    values["bits_per_dim"] = values["nats"] / math.log(2)
    if rate := throughput.rate():  # unknown of the first step
      values["tokens_per_second"] = rate
    self._logged = values["nats"]
    self._writer.write(step, "train", **values)

  def validation(self, step, bits):
    """One line of validation."""
    if not math.isfinite(bits):
      raise FloatingPointError(
        f"bits_per_dim of validation is {bits} at step {step}; the last"
        " checkpoint is from before"
      )
    self.validated = bits
    self._writer.write(step, "validation", bits_per_dim=bits)


def validate(experiment, state, log, step, signals):
  """Bits per dim of the averaged weights on the validation split.

  Returns whether it came to its end: False after a signal.
  """
  config = experiment.config.eval
  windows = experiment.source.windows("validation")
  num = min(config.sequences or len(windows), len(windows))
  try:
    result = evaluate.bits_per_dim(
      experiment.losses,
      state.ema,
      signals.checked(lazy.Lazy(num, windows.__getitem__)),
      batch_size=config.batch_size,
      sharding=experiment.batch_sharding,
      name="validation",
    )
  except signals_lib.Stopped:
    return False
  log.validation(step, result["bits_per_dim"])
  return True


def replay_command(step):
  """The command line of this run that computes the batch of a step."""
  return shlex.join(["python", *sys.argv, f"--replay={step}"])


def replay(config, workdir, step):
  """Computes the batch of a step again, from the checkpoint before it."""
  experiment = Experiment(config)
  examples = experiment.source.examples("train")
  with checkpoint.Checkpoints(workdir) as checkpoints:
    before = [s for s in checkpoints.steps() if s < step]
    state = (
      experiment.restore(checkpoints, before[-1])
      if before
      else jax.jit(experiment.init)()
    )
  batch = make_batches(config, examples)[step - 1]
  numbers = make_batches(config, range(len(examples)))[step - 1]
  _, measured = jax.jit(experiment.step)(state, batch)
  print(f"step {step} with the weights of step {int(state.step)}:")
  for name, value in measured.items():
    print(f"  {name} {float(value):.6g}")
  losses = np.asarray(experiment.losses(state.params, batch)).mean(1)
  for number, loss in zip(numbers, losses, strict=True):
    print(f"  example {number}: {loss / math.log(2):.6g} bits/dim")


def check_settings(config):
  """Refuses settings of the run that make no sense."""
  devices, micro = jax.local_device_count(), config.train.accumulation
  if micro < 1 or config.train.batch_size % (devices * micro):
    raise ValueError(
      f"train.batch_size={config.train.batch_size} must be a multiple of"
      f" {devices} devices x train.accumulation={micro}"
    )
  if config.eval.batch_size < 1 or config.eval.batch_size % devices:
    raise ValueError(
      f"eval.batch_size={config.eval.batch_size} must be a multiple of"
      f" {devices} devices"
    )
  for group, name, least in (
    ("eval", "sequences", 0),
    ("train", "max_skipped", 0),
    ("checkpoint", "keep", 1),
    ("checkpoint", "keep_best", 0),
  ):
    if config[group][name] < least:
      raise ValueError(
        f"{group}.{name}={config[group][name]} must be at least {least}"
      )
  for group, name, known in (
    ("train", "nonfinite", ("stop", "skip")),
    ("checkpoint", "on_error", ("stop", "continue")),
  ):
    if config[group][name] not in known:
      raise ValueError(
        f"unknown {group}.{name}={config[group][name]!r}; known:"
        f" {', '.join(known)}"
      )
