"""Trains a model from a config file.

python train.py --config=configs/digits.py --workdir=runs/digits

Any field of the config can be set: --config.attention.pattern=fixed. Started
again in the same workdir, a run goes on from its last checkpoint.
"""

import math
import pathlib

import jax
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import config_flags

from sparse_transformer import (
  checkpoint,
  command,
  data,
  evaluate,
  metrics,
  plots,
  prepared,
)
from sparse_transformer.experiment import Experiment


def train(config, workdir):
  """Trains to config.train.steps and returns the final state.

  Writes into the workdir config.json, patterns.png, metrics.jsonl, TensorBoard
  events and checkpoints/<step>/.
  """
  # -- What the config names; all that can be wrong with it is wrong here.
  experiment = Experiment(config)
  source, model = experiment.source, experiment.model
  check_sizes(config)
  examples = source.examples("train")
  batches = data.batches(examples, config.train.batch_size, config.train.seed)
  # A pass over shapes alone: what the network refuses, it refuses here.
  shapes = jax.eval_shape(experiment.init)
  jax.eval_shape(experiment.losses, shapes.params, batches[0])
  checkpoint.write_config(workdir, config)
  workdir = pathlib.Path(workdir)
  plots.save_patterns(
    workdir / "patterns.png", model.patterns, model.shape, model.length
  )

  with checkpoint.Checkpoints(
    workdir, keep=config.checkpoint.keep
  ) as checkpoints:
    state = first_state(experiment, checkpoints)
    step = jax.jit(experiment.step, donate_argnums=0)

    # -- Loop.
    first, last = int(state.step), config.train.steps
    throughput = metrics.Throughput()
    with metrics.Writer(workdir, step=first, steps=last) as writer:
      for done in range(first + 1, last + 1):
        batch = jax.device_put(batches[done - 1], experiment.batch_sharding)
        state, measured = step(state, batch)
        writer.advance()
        throughput.count(batch.size)
        if done == first + 1:
          jax.block_until_ready(state)
          throughput.restart()  # compilation is not throughput
        if is_due(done, config.train.log_every, last):
          write_training(writer, done, measured, throughput)
        if is_due(done, config.eval.every, last):
          validate(experiment, state, writer, done)
          throughput.restart()
        if is_due(done, config.checkpoint.every, last):
          check_finite(done, measured)
          checkpoints.save(state)
          throughput.restart()
      if last == 0:
        checkpoints.save(state)
  return state


def first_state(experiment, checkpoints):
  """The last checkpoint of the workdir, or the state the seed gives."""
  mesh = experiment.batch_sharding.mesh
  whole = NamedSharding(mesh, PartitionSpec())
  if not checkpoints.steps():
    return jax.jit(experiment.init, out_shardings=whole)()
  state = experiment.restore(checkpoints)
  print(f"goes on from step {int(state.step)}")
  return jax.device_put(state, whole)


def is_due(step, every, last):
  """Whether periodic work falls on this step; it always does on the last."""
  return step == last or (every > 0 and step % every == 0)


def write_training(writer, step, measured, throughput):
  """One line of training metrics."""
  check_finite(step, measured)
  values = {name: float(value) for name, value in measured.items()}
  values["bits_per_dim"] = values["nats"] / math.log(2)
  if rate := throughput.rate():  # unknown of the first step
    values["tokens_per_second"] = rate
  writer.write(step, "train", **values)


def check_finite(step, measured):
  """Stops the run at a loss that is no number, before it is kept."""
  for name, value in measured.items():
    if not math.isfinite(value):
      raise FloatingPointError(
        f"{name} is {value} at step {step}; the last checkpoint is from before"
      )


def validate(experiment, state, writer, step):
  """Bits per dim of the averaged weights on the validation split."""
  config = experiment.config.eval
  windows = experiment.source.windows("validation")
  num = min(config.sequences or len(windows), len(windows))
  result = evaluate.bits_per_dim(
    experiment.losses,
    state.ema,
    prepared.Lazy(num, windows.__getitem__),
    batch_size=config.batch_size,
    sharding=experiment.batch_sharding,
    name="validation",
  )
  values = {"bits_per_dim": result["bits_per_dim"]}
  check_finite(step, values)
  writer.write(step, "validation", **values)


def check_sizes(config):
  """Refuses batch sizes that devices and micro-batches do not divide."""
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
  if config.eval.sequences < 0:
    raise ValueError(
      f"eval.sequences={config.eval.sequences} must be at least 1, or 0: all"
    )
  if config.checkpoint.keep < 1:
    raise ValueError(
      f"checkpoint.keep={config.checkpoint.keep} must be at least 1"
    )


def main(argv):
  command.check_arguments(argv)
  for name in ("config", "workdir"):
    if flags.FLAGS[name].value is None:
      raise ValueError(f"--{name} is missing; see --help")
  config = flags.FLAGS.config
  if not all(hasattr(config, group) for group in checkpoint.GROUPS):
    raise ValueError("--config must give the groups of configs/default.py")
  train(config, flags.FLAGS.workdir)


if __name__ == "__main__":
  config_flags.DEFINE_config_file(
    "config", None, "File with the experiment's config.", lock_config=True
  )
  flags.DEFINE_string("workdir", None, "Folder the run writes into.")
  command.run(main)
