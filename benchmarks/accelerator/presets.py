"""Step time, memory and utilization of the configs.

On random tokens, so that no data are needed, in the dtype of the config.
"""

import functools
import importlib
import time

import jax
import numpy as np

from benchmarks import timing
from benchmarks.accelerator.child import Settings
from benchmarks.compiled import PRESETS
from sparse_transformer import machine
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.explanation import costs

# The paper's networks come first, and with other rematerialization last.
PAPER = "enwik8", "cifar10", "cifar10_15m", "imagenet64"
ROUND_SECONDS = 1.0
FIRST = np.int32(0)  # the step that the schedule is asked for
SMALL = {"model.num_layers": 2, "train.batch_size": 4, "model.width": 32}


def entries(settings: Settings) -> dict:
  """One for each config, the paper's first, also without rematerialization."""
  if settings.small:
    return {"digits": functools.partial(measure, "digits", SMALL)}
  names = [*PAPER, *(x for x in PRESETS if x not in PAPER)]
  found = {name: functools.partial(measure, name, {}) for name in names}
  for name in PAPER:
    changes = {"model.remat": "none"}
    found[f"{name}, remat none"] = functools.partial(measure, name, changes)
  return found


def measure(name: str, changes: dict) -> dict:
  """Compiles the training step of a config, and runs it if it fits."""
  config = importlib.import_module(f"configs.{name}").get_config()
  config.update_from_flattened_dict(changes)
  experiment = Experiment(config)
  model = experiment.model
  mesh.check_batch(config, experiment.mesh.shape)
  tokens_BL = np.random.default_rng(0).integers(
    model.vocab_size,
    size=(config.train.batch_size, model.length),
    dtype=np.uint8,
  )
  batch = jax.device_put(tokens_BL, experiment.batch_sharding)
  start = time.perf_counter()
  with jax.set_mesh(experiment.mesh):
    update = experiment.update.lower(experiment.like, batch, FIRST).compile()
  plan = update.memory_analysis()
  needed = (
    plan.argument_size_in_bytes
    + plan.output_size_in_bytes
    + plan.temp_size_in_bytes
    - plan.alias_size_in_bytes
  )
  found = {
    "batch": config.train.batch_size,
    "dtype": model.dtype,
    "remat": model.remat,
    "compile_seconds": time.perf_counter() - start,
    "compiled_bytes": needed,
  }
  memory = machine.free_memory()
  if memory and needed > memory:
    sizes = f"{needed / 2**30:.1f} of its {memory / 2**30:.1f} GiB"
    return found | {"skipped": f"a device needs {sizes}"}
  found["step"] = _time_steps(update, experiment.first_state(), batch)
  stats = jax.local_devices()[0].memory_stats() or {}
  found["peak_bytes"] = stats.get("peak_bytes_in_use")
  rate = config.train.batch_size * model.length / found["step"]["median"]
  return found | costs.speed(rate, model)


def _time_steps(update, state, batch):
  """Seconds of a step, which waits for the one before it only."""

  def step():
    nonlocal state
    state, _ = update(state, batch, FIRST)
    return state

  warm = timing.warm_up(step)
  return timing.interleave({0: step}, {0: warm}, least=ROUND_SECONDS)[0]
