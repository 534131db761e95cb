"""Several processes that train together, each with its own devices.

All processes run the same program, and wait for each other whenever they
exchange data. If two processes took different branches, one of them might wait
forever. Therefore, each decision that affects control flow is made once, by the
first process (`decide`) or by all processes jointly (`together`). The first
process writes files and reports errors. If a process is lost, JAX's
coordination service ends the others.
"""

import functools
import json
import re
import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from sparse_transformer import progress
from sparse_transformer.signals import Signals, Stopped

T = TypeVar("T")


def join(coordinator: str | None, **settings: Any) -> None:
  """Joins the other processes of a run.

  Args:
    coordinator: HOST:PORT of the first process, or None to detect it from the
      cluster.
    **settings: other arguments of `jax.distributed.initialize`.

  Raises ValueError if the processes cannot be reached, or a setting is wrong.
  """
  if coordinator:
    port = re.fullmatch(".+:([0-9]{1,5})", coordinator)
    if not port or not 0 < int(port[1]) < 2**16:
      raise ValueError(f"--coordinator={coordinator} must be HOST:PORT")

  # JAX's preemption service would replace the SIGTERM handler of `Signals`, and
  # handles no other signal. `Stops` handles all signals instead.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      coordinator,
      # Otherwise, JAX would detect Slurm and give each process a single device.
      cluster_detection_method="deactivate" if coordinator else None,
      **settings,
    )
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f"cannot connect to the other processes: {error}; see docs/scaling.md"
    ) from error


def are_several() -> bool:
  """Returns whether several processes run together."""
  return jax.process_count() > 1


def is_first() -> bool:
  """Returns whether this is the first process, which writes and reports."""
  return jax.process_index() == 0


def say(line: str) -> None:
  """Prints a line, above a progress bar, in the first process only."""
  if is_first():
    progress.say(line)


def decide(function: Callable[[], T]) -> T:
  """Calls a function in the first process; all processes return its result.

  The result must be a JSON value. If the function raises an error, all
  processes end, and the first process reports the error.
  """
  # `gather` converts the result to JSON even in a single process, so that a
  # tuple always becomes a list.
  value = together(lambda: function() if is_first() else None)
  return gather(value)[0]


def together(function: Callable[[], T]) -> T:
  """Calls a function in all processes; each process returns its own result.

  If the function raises an error in any process, all processes end, and the
  first process reports the error.
  """
  result = None
  error = None
  try:
    result = function()
  except Exception as raised:
    error = raised

  # Exchange errors before any process raises one, because the others would wait
  # for a process that has ended.
  errors = gather("" if error is None else f"{type(error).__name__}: {error}")
  for number, text in enumerate(errors):
    if text and not is_first():
      raise SystemExit(1)
    if text:
      raise error or ValueError(f"in process {number}: {text}")

  return cast(T, result)  # set, because no process raised an error


def check_same(values: Mapping[str, Any]) -> None:
  """Raises ValueError unless all processes pass the same JSON values.

  The error gives the name of the first value that differs, and the value in two
  processes.
  """
  every = gather(values)
  first = every[0]
  for number, other in enumerate(every):
    for name in {**first, **other}:
      here = first.get(name)
      there = other.get(name)
      if here != there:
        raise ValueError(
          f"{name} is {here} in process 0, but {there} in process {number};"
          " start all processes with the same command, code and data"
        )


def gather(value: Any) -> list[Any]:
  """Gathers one JSON value per process, and returns all values everywhere.

  A process waits until all processes have called this function.

  Returns:
    The values, in the order of process indices.
  """
  text = json.dumps(value)
  if not are_several():
    return [json.loads(text)]

  # Arrays to be exchanged must have equal sizes, and each new size requires a
  # compilation. So round the size up to a power of two, at least 1024.
  size = np.int32(len(text))
  longest = int(multihost_utils.process_allgather(size).max())
  width = max(1024, 1 << (longest - 1).bit_length())

  # JSON text is ASCII, one byte per character. Spaces after it are ignored.
  padded = text.ljust(width).encode()
  characters = np.frombuffer(padded, np.uint8)
  rows = multihost_utils.process_allgather(characters)
  return [json.loads(row.tobytes()) for row in rows]


def place(
  read: Callable[[int], np.ndarray], shape: tuple[int, int], sharding: Sharding
) -> jax.Array:
  """Reads an array [B, L] onto devices.

  Args:
    read: a function that returns row i, of shape [L], for 0 <= i < B. Each
      process calls it once for each row that its own devices hold.
    shape: (B, L).
    sharding: the sharding of the array over the devices of all processes.
  """
  # Several devices of this process may need the same rows.
  read_once = functools.cache(read)

  def read_part(index):
    rows = range(shape[0])[index[0]]
    return np.stack([read_once(i) for i in rows])

  return jax.make_array_from_callback(shape, sharding, read_part)


class Stops(Signals):
  """Catches signals in any process, so that all stop at the same step.

  Each call of `check` starts to compute the maximum of the signal numbers of
  all processes. It then reads the maximum from the previous call. That maximum
  is already computed, so `check` does not wait. All processes must call `check`
  equally often.
  """

  _largest: jax.Array | None = None  # maximum of signals at the last check
  _agreed: str | None = None

  @property
  def reason(self) -> str | None:
    """The name of the signal for which all processes stop, or None."""
    return self._agreed if are_several() else self.name

  def check(self) -> None:
    """Raises Stopped if any process caught a signal."""
    if not are_several():
      return super().check()

    # Signal numbers are positive, so a maximum of 0 means that no process
    # caught a signal. The maximum of this check is read at the next check.
    number = signal.Signals[self.name] if self.name else 0
    before = self._largest
    self._largest = _largest(number)
    if before is not None and int(before):
      self._agreed = signal.Signals(int(before)).name
      raise Stopped(self._agreed)


def _largest(number):
  """Returns the maximum over processes as an array, without waiting for it."""
  mesh = jax.make_mesh((jax.device_count(),), ("all",), (AxisType.Auto,))
  whole = NamedSharding(mesh, PartitionSpec())

  # Each device contributes the number of its process, and gets the maximum.
  numbers = jax.make_array_from_callback(
    shape=(mesh.size,),
    sharding=NamedSharding(mesh, PartitionSpec("all")),
    data_callback=lambda _: np.array([number], np.int32),
  )
  return _maximum(whole)(numbers)


# Cached, because each call of `jax.jit` would compile another program.
@functools.cache
def _maximum(whole):
  return jax.jit(jnp.max, out_shardings=whole)
