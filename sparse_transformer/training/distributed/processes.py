"""Several processes that train together, each with its devices.

All run the same program, and wait for each other whenever they exchange
something. Whatever steers the program is therefore decided once: by the first
process (`decide`), or by all (`together`). Otherwise a process might wait for
ever for others that went another way. The first process writes files and
reports errors. If a process is lost, JAX's coordination service ends the
others.
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
    coordinator: HOST:PORT of the first process; None if the cluster says it.
    **settings: others of `jax.distributed.initialize`.

  Raises ValueError if they cannot be reached, or a setting is wrong.
  """
  if coordinator:
    port = re.fullmatch(".+:([0-9]{1,5})", coordinator)
    if not port or not 0 < int(port[1]) < 2**16:
      raise ValueError(f"--coordinator={coordinator} must be HOST:PORT")

  # JAX's service for preemption would take SIGTERM from `Signals`, and tells
  # other processes of no other signal: `Stops` agrees on all of them.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      coordinator,
      # Otherwise, within Slurm, a process would get a single device.
      cluster_detection_method="deactivate" if coordinator else None,
      **settings,
    )
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f"the processes cannot be connected: {error}; see docs/scaling.md"
    ) from error


def are_several() -> bool:
  """Whether several processes run together."""
  return jax.process_count() > 1


def is_first() -> bool:
  """Whether this is the process that writes and reports."""
  return jax.process_index() == 0


def say(line: str) -> None:
  """Prints a line, above a progress bar, in the first process only."""
  if is_first():
    progress.say(line)


def decide(function: Callable[[], T]) -> T:
  """Calls a function in the first process; returns its result in all.

  The result must be JSON. If the function raises an error, all processes end,
  and the first one reports it.
  """
  # A single process converts the result to JSON, too: a tuple becomes a list in
  # either case.
  value = together(lambda: function() if is_first() else None)
  return gather(value)[0]


def together(function: Callable[[], T]) -> T:
  """Calls a function in all processes and returns its result.

  If it raises an error in any of them, all end, and the first one reports it.
  """
  result = None
  error = None
  try:
    result = function()
  except Exception as raised:
    error = raised

  # No process raises before the others know, because they would wait for it.
  errors = gather("" if error is None else f"{type(error).__name__}: {error}")
  for number, text in enumerate(errors):
    if text and not is_first():
      raise SystemExit(1)
    if text:
      raise error or ValueError(f"in process {number}: {text}")

  return cast(T, result)  # set, as no process raised an error


def check_same(values: Mapping[str, Any]) -> None:
  """Raises ValueError unless all processes have the same JSON values.

  The error names the first value that differs, and says what it is where.
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
  """Exchanges JSON values: each process gives its own, and gets all.

  A process waits for those of the others.

  Returns the values in the order of processes.
  """
  text = json.dumps(value)
  if not are_several():
    return [json.loads(text)]

  # Arrays that are exchanged must have one size, and each size compiles a
  # program: it is a power of two, at least 1024.
  size = np.int32(len(text))
  longest = int(multihost_utils.process_allgather(size).max())
  width = max(1024, 1 << (longest - 1).bit_length())

  # JSON text is ASCII, one byte per character; spaces after it mean nothing.
  padded = text.ljust(width).encode()
  characters = np.frombuffer(padded, np.uint8)
  rows = multihost_utils.process_allgather(characters)
  return [json.loads(row.tobytes()) for row in rows]


def place(
  read: Callable[[int], np.ndarray], shape: tuple[int, int], sharding: Sharding
) -> jax.Array:
  """Reads an array [B, L] onto devices.

  Args:
    read: a function that returns the row [L] of a number below B. A process
      calls it only for the rows of its own devices, once for each.
    shape: (B, L).
    sharding: how the array is split over the devices of all processes.
  """
  # Several devices of this process may hold the same rows.
  read_once = functools.cache(read)

  def read_part(index):
    rows = range(shape[0])[index[0]]
    return np.stack([read_once(i) for i in rows])

  return jax.make_array_from_callback(shape, sharding, read_part)


class Stops(Signals):
  """Catches the signals of all processes, so that all stop at the same step.

  At each check, a process gives its signal to a maximum over all processes, and
  reads the maximum of the check before, for which it need not wait. All
  processes must call `check` equally often.
  """

  _largest: jax.Array | None = None  # of the signals of the last check
  _agreed: str | None = None

  @property
  def reason(self) -> str | None:
    """The signal that all processes stop for; None if there is none."""
    return self._agreed if are_several() else self.name

  def check(self) -> None:
    """Raises Stopped if any process caught a signal."""
    if not are_several():
      return super().check()

    # Signals have positive numbers: a maximum of 0 means that no process caught
    # one. That of this check is read at the next one, when it is computed.
    number = signal.Signals[self.name] if self.name else 0
    before = self._largest
    self._largest = _largest(number)
    if before is not None and int(before):
      self._agreed = signal.Signals(int(before)).name
      raise Stopped(self._agreed)


def _largest(number):
  """The largest of the numbers of all processes, without waiting for it."""
  mesh = jax.make_mesh((jax.device_count(),), ("all",), (AxisType.Auto,))
  whole = NamedSharding(mesh, PartitionSpec())

  # Each device gives the number of its process, and gets the maximum.
  numbers = jax.make_array_from_callback(
    shape=(mesh.size,),
    sharding=NamedSharding(mesh, PartitionSpec("all")),
    data_callback=lambda _: np.array([number], np.int32),
  )
  return _maximum(whole)(numbers)


# A cache, because each call of `jax.jit` would compile another program.
@functools.cache
def _maximum(whole):
  return jax.jit(jnp.max, out_shardings=whole)
