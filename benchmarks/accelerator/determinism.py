"""The same training twice gives the same bits.

`correctness` shows it for attention by itself.
"""

import functools

from benchmarks.accelerator.parts import Settings

STEPS = 20


def entries(settings: Settings, rank: int) -> dict:
  """One for each config."""
  if rank:
    return {}
  return {
    f"{STEPS} steps, {name}": functools.partial(steps, name, settings.small)
    for name in (("digits",) if settings.small else ("cifar10_15m", "enwik8"))
  }


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
