"""The choice of `model.remat=auto`: what the backward pass recomputes.

The less it recomputes, the faster is a step, and the more memory it takes. Only
a compiled program says how much. Programs are therefore compiled in the order
of `schema.REMATS` until one fits.
"""

import functools
from typing import Any, NamedTuple

import jax

from sparse_transformer import machine, schema, tables
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.experiment import Experiment

# The part of the free memory that a chosen program may take. Validation and
# other processes need some, too.
SHARE = 0.8


class Step(NamedTuple):
  """A compiled training step.

  Attributes:
    program: is called as `Experiment.update` is.
    remat: what it recomputes, of `schema.REMATS`.
    why: a line about the choice; "" if the config has made it.
  """

  program: Any
  remat: str
  why: str


def choose(
  experiment: Experiment,
  dtype: Any = None,
  *,
  kept: str | None = None,
  state: int = 0,
) -> Step:
  """Compiles the training step, with `model.remat=auto` the first that fits.

  If none fits, it is the last, which needs the least memory. All processes of a
  run call this function, and choose the same.

  Args:
    experiment: the run's.
    dtype: of batches, see `Experiment.compile_step`.
    kept: what `auto` chose before, and chooses again. A resumed run is the same
      bit for bit only with the same program.
    state: bytes of the training state, if it is not on the devices yet.
  """
  asked = experiment.config.model.remat
  remats: tuple[str, ...] = (asked,)
  free = machine.free_memory()
  if asked == "auto":
    remats = (kept,) if kept else schema.REMATS
    # Only the last is safe if nobody knows what is free.
    remats = remats if free is not None else remats[-1:]

  needs = []
  for remat in remats:
    is_last = remat == remats[-1]
    program = processes.together(
      functools.partial(_compile, experiment, remat, dtype, is_last)
    )
    size = needed(program) if program else None
    needs.append(f"{remat} needs {tables.size(size) if size else 'too much'}")
    fits = size is not None and size <= SHARE * ((free or 0) - state)
    if is_last or all(processes.gather(fits)):
      break

  why = ""
  if asked == "auto":
    why = f"model.remat={remat}: "
    why += "as this run chose before" if kept else ", ".join(needs)
    if free is not None:
      why += f"; {tables.size(free - state)} is free"
  return Step(program, remat, why)


def needed(program: Any) -> int | None:
  """Bytes on a device that a training step needs besides the state.

  Args:
    program: a compiled step.

  Returns None if the compiler does not say it.
  """
  memory = program.memory_analysis()
  if not memory:
    return None
  # The next state takes the place of the one that is there: what is aliased
  # must not be counted twice.
  size = memory.temp_size_in_bytes + memory.output_size_in_bytes
  return size - memory.alias_size_in_bytes


def _compile(experiment, remat, dtype, is_last):
  """Compiles a step; returns None if it is too large, unless it is the last."""
  try:
    return experiment.compile_step(remat, dtype)
  except jax.errors.JaxRuntimeError as error:
    # Compilers for TPUs reject what does not fit.
    if is_last or "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return None
