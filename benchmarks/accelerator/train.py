"""Part 7: cifar10_15m, trained for some minutes.

The warm-up and the decay of the learning rate are fitted to the steps that the
time allows, so that the curve is that of a short run, not the start of a long
one.
"""

import dataclasses
import functools
import math
import time

import jax
import numpy as np

from benchmarks.accelerator import training
from benchmarks.accelerator.parts import Settings
from sparse_transformer import data
from sparse_transformer.training import evaluate

NAME, MINUTES = "cifar10_15m", 8.0
SMALL_NAME, SMALL_MINUTES = "digits", 0.05
OVERHEAD = 2.0  # minutes for compiling and validation
POINTS = 60  # of the curve
VALIDATED = 256  # images
HELD_OUT = 0.04  # of the images of a .npy file, for validation


def entries(settings: Settings) -> dict:
  """A single one."""
  name = SMALL_NAME if settings.small else NAME
  longest = SMALL_MINUTES if settings.small else MINUTES
  minutes = min(longest, max(settings.minutes - OVERHEAD, settings.minutes / 2))
  changes = training.SMALL[name] if settings.small else {}
  return {name: functools.partial(train, name, changes, minutes, settings.data)}


def train(name: str, changes: dict, minutes: float, path: str, record) -> dict:
  """Trains a config for some minutes, and validates it."""
  experiment = training.load(name, **changes)
  try:
    source = find(experiment, path)
    batches = functools.partial(_batch, experiment, source.examples("train"))
    first = batches(0)
  except (OSError, ModuleNotFoundError) as error:
    if path:
      raise
    return {"skipped": f"no data: {' '.join(str(error).split())[:300]}"}
  seconds = _seconds_per_step(experiment, first)
  steps = max(2, int(60 * minutes / seconds))
  fitted = {"train.steps": steps, "optimizer.warmup_steps": steps // 20}
  experiment = training.load(name, **changes | fitted)
  found = {"steps": steps, "minutes": minutes, "curve": []}
  state, start = experiment.first_state(), time.perf_counter()
  every = max(1, steps // POINTS)
  for step in range(steps):
    with jax.set_mesh(experiment.mesh):
      state, measured = experiment.update(state, batches(step))
    if (step + 1) % every == 0:
      found["curve"].append(
        {
          "step": step + 1,
          "seconds": round(time.perf_counter() - start, 1),
          "bits_per_dim": round(float(measured["nats"]) / math.log(2), 4),
        }
      )
      record(found)
  result = _validate(experiment, source, state)
  bits = result["bits_per_dim"]
  found |= {key: result[key] for key in ("bits_per_dim", "standard_error")}
  if not math.isfinite(bits) or bits >= math.log2(experiment.model.vocab_size):
    found["failed"] = f"it learned nothing: {bits} bits/dim"
  return found


def find(experiment, path: str) -> data.Source:
  """The source of the images, with those of a .npy file if one is given.

  Raises:
    OSError: there are no data.
    ValueError: the images have another shape or dtype.
  """
  if not path.endswith(".npy"):
    experiment.config.data.path = path
    return data.source(experiment.config.data)
  source = experiment.source
  images = np.load(path, mmap_mode="r")
  if images.dtype != np.uint8 or images[:1].size != source.length:
    raise ValueError(
      f"{path} holds {images.dtype} {images.shape}; images must be uint8"
      f" (number, {', '.join(map(str, source.shape))})"
    )
  images = images.reshape(len(images), *source.shape)
  held_out = max(1, int(HELD_OUT * len(images)))
  splits = {"train": images[:-held_out], "validation": images[-held_out:]}
  return dataclasses.replace(source, load=lambda: splits, files=None)


def _batch(experiment, examples, step):
  """Random examples; without grain, which a machine may lack."""
  rng = np.random.default_rng(step)
  chosen = rng.integers(len(examples), size=experiment.config.train.batch_size)
  tokens_BL = np.stack([examples[int(i)] for i in chosen])
  return jax.device_put(tokens_BL, experiment.batch_sharding)


def _seconds_per_step(experiment, batch):
  """Seconds of a step, after one that compiles."""
  state = experiment.first_state()
  for steps in (2, 10):
    start = time.perf_counter()
    with jax.set_mesh(experiment.mesh):
      for _ in range(steps):
        state, _ = experiment.update(state, batch)
    jax.block_until_ready(state)
  return (time.perf_counter() - start) / 10


def _validate(experiment, source, state):
  """Bits per dim of the averaged weights on validation images."""
  windows = source.windows("validation")
  number = min(VALIDATED, len(windows))
  return evaluate.bits_per_dim(
    experiment.losses,
    state.ema,
    data.Lazy(number, windows.__getitem__),
    batch_size=experiment.config.eval.batch_size,
    sharding=experiment.batch_sharding,
    name="validation",
  )
