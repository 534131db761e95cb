"""The machine that this process runs on: its name, and its memory.

`attention.platforms` knows the kind of device that a program is traced for, and
`targets.hardware` devices that are absent.
"""

import ctypes
import os
import pathlib
import re
import resource
import sys

import jax

# Parameters of glibc's `mallopt`, from malloc.h.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8


def device_name() -> str:
  """The model of this process's JAX devices; on CPUs, of the processor."""
  device, _ = _device()
  return device.device_kind if device.platform != "cpu" else cpu_name()


def cpu_name() -> str:
  """The model of the processor; "CPU" without /proc, as on macOS."""
  name = re.search(r"model name\s*: (.*)", _read("cpuinfo"))
  return name[1] if name else "CPU"


def machine() -> str:
  """Number and model of the devices: '2 cores of ...', '8 x NVIDIA H100'."""
  if jax.default_backend() == "cpu":
    return f"{os.cpu_count()} cores of {cpu_name()}"
  return f"{jax.local_device_count()} x {device_name()}"


def check_free(what: str, needed: int) -> None:
  """Raises ValueError if something needs more memory than a device has free.

  Args:
    what: named in the error.
    needed: bytes on one device. Nothing is raised if free memory is unknown.
  """
  free = free_memory()
  if free is not None and needed > free:
    raise ValueError(
      f"{what} needs {needed / 2**30:,.1f} GiB of memory on a device, but"
      f" {free / 2**30:,.1f} GiB is free; use a smaller network or batch, more"
      " train.accumulation, or model.remat=block"
    )


def free_memory() -> int | None:
  """Bytes that a program may take on each local device; None if unknown.

  Devices of other kinds than CPUs report it, with what JAX may allocate of
  them.
  """
  device, stats = _device()
  # CPU devices are threads of this process, which share the host's memory.
  if device.platform == "cpu":
    free = re.search(r"MemAvailable:\s*(\d+) kB", _read("meminfo"))
    return int(free[1]) * 1024 // jax.local_device_count() if free else None

  if "bytes_limit" not in stats:
    return None
  return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def peak_memory() -> int:
  """The most bytes that were used so far.

  Of the device if it counts them, as GPUs do; otherwise of this process, which
  then holds the arrays.
  """
  # Linux counts in KiB, macOS in bytes.
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return _device()[1].get("peak_bytes_in_use", size * unit)


def keep_freed_memory() -> None:
  """Keeps the memory that programs free, for the next ones of this process.

  Otherwise, glibc returns large blocks to the system at once, and each step on
  CPUs gets the memory of its temporary arrays back page by page. Call it before
  devices are used: their threads choose where they allocate when they start.
  Without glibc, it does nothing.
  """
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:
    return

  # No block has a mapping of its own, and the heap never shrinks. There is one
  # heap for all threads, since others are too small for large blocks.
  mallopt(MMAP_MAX, 0)
  mallopt(TRIM_THRESHOLD, 2**31 - 1)
  mallopt(ARENA_MAX, 1)


def _device():
  """(the first local device, its memory statistics, {} if it has none)."""
  device = jax.local_devices()[0]
  return device, device.memory_stats() or {}


def _read(name: str) -> str:
  """The text of a file in /proc; "" where there is none, as on macOS."""
  path = pathlib.Path("/proc") / name
  return path.read_text() if path.exists() else ""
