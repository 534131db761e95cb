"""The same work twice gives the same bits."""

import functools

import jax
import numpy as np

from benchmarks.accelerator import cases
from benchmarks.accelerator.parts import Settings
from sparse_transformer import patterns

# One for each head.
MIX = (
  "Local({l})",
  "Strided({l})",
  "Block({l}) | Summary({l}, {c})",
  "BigBird({b})",
)
DTYPES = "bfloat16", "float32"
STEPS = 20


def entries(settings: Settings, rank: int) -> dict:
  """One for each executor and dtype, and one for each training."""
  found = {}
  for name in cases.executors(settings, rank):
    for dtype in DTYPES:
      found[f"attention, {dtype}, {name}"] = functools.partial(
        attention, name, dtype, settings.small
      )
  for name in ("digits",) if settings.small else ("cifar10_15m", "enwik8"):
    if rank == 0:
      found[f"{STEPS} steps, {name}"] = functools.partial(
        steps, name, settings.small
      )
  return found


def attention(name: str, dtype: str, small: bool, record) -> dict:
  """Runs forward + backward twice."""
  del record
  sizes = dict(l=16, c=4, b=8) if small else dict(l=128, c=32, b=64)
  n = 200 if small else 3072
  heads = tuple(patterns.parse(text.format(**sizes))[0][0] for text in MIX)
  widths = (16, 32) if small else (64, 64)
  if reason := cases.unsupported(name, 2, n, len(heads), widths, dtype):
    return {"skipped": reason}
  inputs = cases.random_inputs(2, n, len(heads), widths, dtype)
  run = cases.of_executor(name, heads)["forward_backward"]
  first, second = (jax.device_get(run(*inputs)) for _ in range(2))
  names = "out", "dq", "dk", "dv"
  unequal = [
    x
    for x, a, b in zip(names, first, second, strict=True)
    if np.asarray(a).tobytes() != np.asarray(b).tobytes()
  ]
  if unequal:
    return {"failed": f"{', '.join(unequal)} differ between two runs"}
  return {"n": n}


def steps(name: str, small: bool, record) -> dict:
  """Trains twice from the start, and compiles each time."""
  from benchmarks.accelerator import training

  del record
  experiment = training.cut(small)[name]
  first, second = (
    training.advance(experiment, experiment.first_state(), STEPS)
    for _ in range(2)
  )
  return {"steps": STEPS} | training.difference(first, second)
