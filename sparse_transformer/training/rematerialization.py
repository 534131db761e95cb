"""The choice of `model.remat=auto`: what the backward pass recomputes.

If the backward pass recomputes less, a step is faster but needs more memory.
The amount of memory is known only after compilation. Therefore programs are
compiled in the order of `schema.REMATS` until one fits. A program is not even
compiled if the arrays that its layers store, which are known before, do not
fit.
"""

import functools
from typing import Any, NamedTuple

import jax

from sparse_transformer import machine, schema, tables
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.experiment import Experiment

# The fraction of free memory that a chosen program may use. The rest is left
# for validation and other processes.
SHARE = 0.8


class Step(NamedTuple):
  """A compiled training step.

  Attributes:
    program: the compiled program, which is called like `Experiment.update`.
    remat: what its backward pass recomputes, an item of `schema.REMATS`.
    why: a line that explains the choice; "" if the config set `model.remat`.
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
  """Compiles the training step, and with `model.remat=auto` chooses its remat.

  "auto" chooses the first item of `schema.REMATS` that fits in memory. If none
  fits, it chooses the last one, which needs the least memory. All processes of
  a run must call this function, and they make the same choice.

  Args:
    experiment: the experiment of the run.
    dtype: the dtype of batches, see `Experiment.compile_step`.
    kept: for a resumed run, the earlier choice of "auto", or None. The same
      item is chosen again, because only the same program continues the run bit
      for bit.
    state: bytes of the training state if it is not on the devices yet, else 0.
  """
  asked = experiment.config.model.remat
  remats: tuple[str, ...] = (asked,)
  free = machine.free_memory()
  if asked == "auto":
    remats = (kept,) if kept else schema.REMATS
    # If the amount of free memory is unknown, only the last one is safe.
    remats = remats if free is not None else remats[-1:]

  needs = []
  for remat in remats:
    is_last = remat == remats[-1]
    room = SHARE * ((free or 0) - state)
    least = 0 if is_last else stored(experiment, remat, dtype)
    if any(processes.gather(least > room)):
      needs.append(f"{remat} needs at least {tables.size(least)}")
      continue

    program = processes.together(
      functools.partial(_compile, experiment, remat, dtype, is_last)
    )
    size = needed(program) if program else None
    needs.append(f"{remat} needs {tables.size(size) if size else 'too much'}")
    fits = size is not None and size <= room
    if is_last or all(processes.gather(fits)):
      break

  why = ""
  if asked == "auto":
    why = f"model.remat={remat}: "
    why += "this run chose it before" if kept else ", ".join(needs)
    if free is not None:
      why += f"; {tables.size(free - state)} is free"
  return Step(program, remat, why)


def stored(experiment: Experiment, remat: str, dtype: Any = None) -> int:
  """Returns bytes on a device that a step needs at least, without compiling it.

  They are the results of its largest loop over layers: the arrays that the
  layers store for the backward pass, or their gradients.

  Args:
    experiment: the experiment of a run.
    remat, dtype: as in `Experiment.trace_step`.
  """
  traced = experiment.trace_step(remat, dtype)
  sizes = [
    sum(result.aval.size * result.aval.dtype.itemsize for result in x.outvars)
    for x in traced.jaxpr.eqns
    if x.primitive.name == "scan"
  ]
  # The shapes are those of all devices together.
  return max(sizes, default=0) // experiment.mesh.size


def needed(program: Any) -> int | None:
  """Returns the bytes on a device that a step needs in addition to the state.

  Args:
    program: a compiled step.

  Returns:
    The number of bytes, or None if the compiler does not report it.
  """
  memory = program.memory_analysis()
  if not memory:
    return None
  # The next state reuses the memory of the current one. So do not count outputs
  # that are aliased to inputs.
  size = memory.temp_size_in_bytes + memory.output_size_in_bytes
  return size - memory.alias_size_in_bytes


def _compile(experiment, remat, dtype, is_last):
  """Compiles a step, or returns None if it needs too much memory.

  If `is_last`, it raises the error of the compiler instead.
  """
  try:
    return experiment.compile_step(remat, dtype)
  except jax.errors.JaxRuntimeError as error:
    # Compilers for TPUs reject programs that do not fit in memory.
    if is_last or "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return None
