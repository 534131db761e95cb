"""cifar10_15m, trained for some minutes.

The warm-up and the decay of the learning rate follow the clock: the step that
the schedule is asked for is the share of the time that has passed. So the curve
is that of a short run, not the start of a long one, and the step is compiled
once, without knowing how many there will be.
"""

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.accelerator import training
from benchmarks.accelerator.parts import PARTS, Settings
from sparse_transformer import data
from sparse_transformer.training.evaluation import scoring

NAME, SMALL_NAME, SMALL_SECONDS = "cifar10_15m", "digits", 3
STEPS = 10_000  # of the schedule
MARGIN = 20  # seconds to be left at the end
POINTS = 60  # of the curve
VALIDATED = 256  # images
HELD_OUT = 0.04  # of the images of a .npy file, for validation


def entries(settings: Settings, rank: int) -> dict:
  if rank:
    return {}
  name = SMALL_NAME if settings.small else NAME
  changes = training.SMALL[name] if settings.small else {}
  end = time.monotonic() + min(60 * settings.minutes, PARTS["train"].seconds)
  longest = SMALL_SECONDS if settings.small else math.inf
  return {
    name: functools.partial(train, name, changes, end, longest, settings.data)
  }


def train(name: str, changes: dict, end, longest, path: str, record) -> dict:
  """Trains a config until `end`, or for `longest` seconds, and validates it."""
  fitted = {"train.steps": STEPS, "optimizer.warmup_steps": STEPS // 20}
  experiment = training.load(name, **changes | fitted)
  try:
    source = find(experiment, path)
    batches = functools.partial(_batch, experiment, source.examples("train"))
    batch = batches(0)
  except (OSError, ModuleNotFoundError) as error:
    if path:
      raise
    return {"skipped": f"no data: {' '.join(str(error).split())[:300]}"}
  began = time.monotonic()
  with jax.set_mesh(experiment.mesh):
    update = experiment.update.lower(experiment.like, batch).compile()
  state, start = experiment.first_state(), time.monotonic()
  # Validation also compiles a program, which has no backward pass.
  seconds = min(longest, end - start - MARGIN - (start - began))
  if seconds <= 0:
    return {"skipped": f"compiling took {start - began:.0f} seconds"}
  found = {"compile_seconds": start - began, "seconds": seconds, "curve": []}
  step, passed = 0, 0.0
  while passed < seconds:
    state = _at(state, int(STEPS * passed / seconds))
    state, measured = update(state, batch)
    step, batch = step + 1, batches(step + 1)  # while the device computes
    nats, passed = float(measured["nats"]), time.monotonic() - start
    if passed >= len(found["curve"]) * seconds / POINTS:
      bits = round(nats / math.log(2), 4)
      found["curve"].append(
        {"step": step, "seconds": round(passed, 1), "bits_per_dim": bits}
      )
      record(found)
  found["steps"] = step
  record(found)
  result = _validate(experiment, source, state)
  bits = result["bits_per_dim"]
  found |= {key: result[key] for key in ("bits_per_dim", "standard_error")}
  if not math.isfinite(bits) or bits >= math.log2(experiment.model.vocab_size):
    found["failed"] = f"it learned nothing: {bits} bits/dim"
  return found


def _at(state, step):
  """The state whose learning rate is that of a step of the schedule."""
  opt_state = optax.tree.set(
    state.opt_state,
    lambda path, _: path[-1].tuple_name == "ScaleByScheduleState",
    count=jnp.int32(step),
  )
  return dataclasses.replace(state, opt_state=opt_state)


def find(experiment, path: str) -> data.Source:
  """The source of the images, with those of a .npy file if one is given."""
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


def _validate(experiment, source, state):
  """Bits per dim of the averaged weights on validation images."""
  windows = source.windows("validation")
  return scoring.bits_per_dim(
    experiment.losses,
    state.ema,
    data.Lazy(min(VALIDATED, len(windows)), windows.__getitem__),
    batch_size=experiment.config.eval.batch_size,
    sharding=experiment.batch_sharding,
    name="validation",
  )
