"""Several processes that train together, each with its devices.

All run the same program. Whatever steers it is decided once: by the first
process (`decide`), or by all (`together`), so that no process waits for others
that went another way. The first process writes files and reports errors. If one
is lost, JAX's coordination service says so and ends the others.
"""

import functools
import json
import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from sparse_transformer.signals import Signals, Stopped

T = TypeVar("T")


def join(
  coordinator: str | None,
  num_processes: int | None,
  process_id: int | None,
  *,
  connect_seconds: int,
  heartbeat_seconds: int,
) -> None:
  """Joins other processes.

  Args:
    coordinator: host:port on which the first process listens; None if the
      cluster provides it and the next two, as Slurm and TPU pods do.
    num_processes: how many there are.
    process_id: which one this is, from 0.
    connect_seconds: how long to wait for the others at the start.
    heartbeat_seconds: after how long a silent process counts as lost.

  Raises:
    ValueError: the others cannot be reached, or an argument is wrong.
  """
  _check(coordinator, num_processes, process_id)
  # JAX's service for preemption would take SIGTERM from `Signals`, and tells
  # other processes of no other signal: `Stops` agrees on all of them.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      # Otherwise, within Slurm, a process would get a single device.
      cluster_detection_method="deactivate" if coordinator else None,
      initialization_timeout=connect_seconds,
      heartbeat_timeout_seconds=heartbeat_seconds,
    )
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f"the processes cannot be connected: {error}; see docs/scaling.md"
    ) from error
  check_same({"--num_processes": num_processes})


def _check(coordinator, num_processes, process_id):
  given = coordinator, num_processes, process_id
  if given == (None,) * 3:
    return  # the cluster provides it
  if None in given:
    raise ValueError(
      "--coordinator, --num_processes and --process_id must be given together"
    )
  host, _, port = coordinator.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise ValueError(f"--coordinator={coordinator} must be HOST:PORT")
  if not 0 <= process_id < num_processes:
    raise ValueError(
      f"--process_id={process_id} must be from 0 to {num_processes - 1}, as"
      f" there are --num_processes={num_processes}"
    )


def are_several() -> bool:
  """Returns whether several processes run together."""
  return jax.process_count() > 1


def is_first() -> bool:
  """Returns whether this is the process that writes and reports."""
  return jax.process_index() == 0


def decide(function: Callable[[], T]) -> T:
  """Calls a function in the first process and broadcasts its JSON result.

  If it raises an error, all processes end, and the first one reports it.
  """
  value = together(lambda: function() if is_first() else None)
  return json.loads(gather(json.dumps(value))[0])


def together(function: Callable[[], T]) -> T:
  """Calls a function in all processes and returns its result.

  If it raises an error in any of them, all end, and the first one reports it.
  """
  result, error = None, None
  try:
    result = function()
  except Exception as raised:
    error = raised
  errors = gather("" if error is None else f"{type(error).__name__}: {error}")
  number = next((i for i, text in enumerate(errors) if text), None)
  if number is not None:
    if not is_first():
      raise SystemExit(1)
    raise error or ValueError(f"in process {number}: {errors[number]}")
  return cast(T, result)  # set, as no process raised an error


def check_same(values: Mapping[str, Any]) -> None:
  """Checks that all processes have the same JSON values, by name.

  Raises:
    ValueError: they do not; in the first process, while the others end.
  """
  first, *others = map(json.loads, gather(json.dumps(values)))

  def compare():
    for number, other in enumerate(others, 1):
      for name in sorted({*first, *other}):
        a, b = first.get(name), other.get(name)
        if a != b:
          raise ValueError(
            f"{name} is {a} in process 0, but {b} in process {number}; start"
            " all processes with the same command, code and data"
          )

  together(compare)


def gather(text: str) -> list[str]:
  """The texts of all processes."""
  if not are_several():
    return [text]
  data = np.frombuffer(text.encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(len(data)))
  # Each size compiles a program, hence powers of two.
  width = max(1024, 1 << (int(max(sizes)) - 1).bit_length())
  padded = np.pad(data, (0, width - len(data)))
  rows = multihost_utils.process_allgather(padded)
  return [
    row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)
  ]


def place(
  read: Callable[[int], np.ndarray], shape: tuple[int, int], sharding: Sharding
) -> jax.Array:
  """An array [B, L] on devices; each process reads only the rows it needs.

  Args:
    read: gives row i, [L]; called once for each row of this process.
    shape: (B, L).
    sharding: of the array, which splits rows only.
  """
  row = functools.cache(read)  # several devices may have the same ones

  def part(index):
    return np.stack([row(i) for i in range(shape[0])[index[0]]])

  return jax.make_array_from_callback(shape, sharding, part)


class Stops(Signals):
  """Signals of all processes, which stop together.

  Each gives its signal to a maximum over all, and reads the previous one, so
  that nothing waits.
  """

  _last: jax.Array | None = None
  _agreed: str | None = None

  @property
  def reason(self) -> str | None:
    """The signal that all processes stop for; None if there is none."""
    return self._agreed if are_several() else self.name

  def check(self) -> None:
    """Raises Stopped if any process caught a signal.

    All processes must call it the same number of times.
    """
    if not are_several():
      return super().check()
    number = signal.Signals[self.name] if self.name else 0
    last, self._last = self._last, _largest(number)
    if last is not None and (number := int(last)):
      self._agreed = signal.Signals(number).name
      raise Stopped(self._agreed)


def _largest(number):
  """The largest of the numbers of all processes, without waiting for it."""
  split, largest = _over_all_devices()
  part = np.array([number], np.int32)
  shape = (jax.device_count(),)
  return largest(jax.make_array_from_callback(shape, split, lambda _: part))


@functools.cache
def _over_all_devices():
  """(how to give each device a number, the largest of them on every device)."""
  mesh = jax.make_mesh((jax.device_count(),), ("all",), (AxisType.Auto,))
  whole = NamedSharding(mesh, PartitionSpec())
  largest = jax.jit(jnp.max, out_shardings=whole)
  return NamedSharding(mesh, PartitionSpec("all")), largest
