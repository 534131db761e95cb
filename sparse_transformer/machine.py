"""The machine that this process runs on: its name, and its memory.

`attention.platforms` knows the kind of device that a program is traced for, and
`targets.hardware` devices that are absent.
"""

import os
import pathlib
import re
import resource
import sys

import jax


def device_name() -> str:
  """The model of this process's JAX devices; on CPUs, of the processor."""
  device, _ = _device()
  return device.device_kind if device.platform != "cpu" else cpu_name()


def cpu_name() -> str:
  """The model of the processor."""
  name = re.search(r"model name\s*: (.*)", _read("cpuinfo"))
  return name[1] if name else "CPU"


def machine() -> str:
  """Number and model of the devices: '2 cores of ...', '8 x NVIDIA H100'."""
  if jax.default_backend() == "cpu":
    return f"{os.cpu_count()} cores of {cpu_name()}"
  return f"{jax.local_device_count()} x {device_name()}"


def check_free(what: str, needed: int) -> None:
  """Raises ValueError if something needs more memory than a device has free."""
  free = free_memory()
  if free is not None and needed > free:
    raise ValueError(
      f"{what} needs {needed / 2**30:,.1f} GiB of memory on a device, but"
      f" {free / 2**30:,.1f} GiB is free; use a smaller network or batch, more"
      " train.accumulation, or model.remat=block"
    )


def free_memory() -> int | None:
  """Bytes that a program may take on each local device; None if unknown."""
  device, stats = _device()
  if device.platform == "cpu":  # they share the host's
    free = re.search(r"MemAvailable:\s*(\d+) kB", _read("meminfo"))
    return int(free[1]) * 1024 // jax.local_device_count() if free else None

  if "bytes_limit" not in stats:
    return None
  return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def peak_memory() -> int:
  """Bytes used at the most: of the device if known, else by this process."""
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return _device()[1].get("peak_bytes_in_use", size * unit)


def _device():
  device = jax.local_devices()[0]
  return device, device.memory_stats() or {}


def _read(name: str) -> str:
  path = pathlib.Path("/proc") / name
  return path.read_text() if path.exists() else ""
