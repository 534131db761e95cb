"""Training steps of the configs: their time, memory, utilization and kernels.

Steps use the dtype of the config, and random tokens, so that they need no data.
"""

import functools

import jax
import numpy as np

from benchmarks import compiled, timing
from benchmarks.accelerator import kernels
from benchmarks.accelerator.child import Settings
from sparse_transformer import machine, schema
from sparse_transformer.training import costs, optimizer, rematerialization
from sparse_transformer.training.experiment import Experiment

# The first is enwik8 with `model.remat=auto`, which chooses one of the others.
PROFILED = (
  "enwik8",
  *(f"enwik8 model.remat={x}" for x in schema.REMATS),
  "cifar10_15m",
  "cifar10",
)
# Table 2 of the paper gives the times of their steps.
TABLE_2 = (
  *("enwik8_dense", "enwik8", "enwik8_strided"),
  *("cifar10_dense", "cifar10_fixed", "cifar10"),
)
COMMANDS = "--xla_gpu_enable_command_buffer="
TRITON = "--xla_gpu_enable_triton_gemm=false"
# {preset: its variants}. A variant sets fields of the config, or XLA's flags.
VARIANTS = {
  "enwik8": (
    TRITON,
    COMMANDS,
    f"--xla_gpu_enable_cublaslt=true {TRITON}",
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_exhaustive_tiling_search=true",
  ),
  "cifar10_15m": (
    "train.batch_size=64",
    *(f"model.remat={x}" for x in schema.REMATS),
    COMMANDS,
  ),
  "enwik8_dense": tuple(f"attention.backend={x}" for x in ("cudnn", "triton")),
}
ROUND_SECONDS = 1.0
SMALL = "digits model.num_layers=4 train.batch_size=4 model.width=32"


def of_profile(settings: Settings) -> dict:
  """Returns an entry for each profiled preset."""
  presets = [SMALL] if settings.small else PROFILED
  return {x: functools.partial(measure, x, profile=True) for x in presets}


def of_presets(settings: Settings) -> dict:
  """Returns an entry for each config, with those of Table 2 first."""
  others = "cifar10_15m", "imagenet64", *compiled.PRESETS
  presets = [SMALL] if settings.small else dict.fromkeys((*TABLE_2, *others))
  return {preset: functools.partial(measure, preset) for preset in presets}


def of_variants(settings: Settings) -> dict:
  """Returns the entries of presets and their variants.

  Each preset is measured again after its variants, which shows the noise.
  """
  variants = {SMALL: (COMMANDS,)} if settings.small else VARIANTS
  return {
    f"{base} {change}".strip(): functools.partial(vary, base, change)
    for base, changes in variants.items()
    for change in ("", *changes, "again")
  }


def vary(base: str, change: str) -> dict:
  """Measures a variant, whose process was started with its flags of XLA."""
  fields = (x for x in change.split() if not x.startswith("--xla"))
  return measure(" ".join((base, *fields))) | dict(base=base, change=change)


def measure(preset: str, *, profile: bool = False) -> dict:
  """Returns the time and memory of a training step.

  Args:
    preset: a preset of `benchmarks.compiled`.
    profile: whether to add the time of its kernels.
  """
  config = compiled.config_of(preset)
  config = config.replace(**compiled.changes_for(config, jax.device_count()))
  experiment = Experiment(config)
  model, like = experiment.model, experiment.batch_like()
  rng = np.random.default_rng(0)
  tokens_BL = rng.integers(model.vocab_size, size=like.shape, dtype=like.dtype)
  batch = jax.device_put(tokens_BL, like.sharding)
  # Create the state first, because the memory that is then free determines the
  # choice of `model.remat=auto`.
  state = experiment.first_state()
  chosen = rematerialization.choose(experiment)
  update = chosen.program
  schedule = optimizer.schedule(config)

  def step():  # waits only for the previous step
    nonlocal state
    state, _ = update(state, batch, schedule)
    return state

  warm = timing.warm_up(step)
  (times,) = timing.interleave({0: step}, {0: warm}, ROUND_SECONDS).values()
  size, peak = config.train.batch_size, machine.peak_memory()
  found = dict(batch=size, remat=chosen.remat, step=times, peak_bytes=peak)
  found |= costs.speed(size * model.length / times["median"], model)
  return found | (kernels.profile(step, update.as_text()) if profile else {})
