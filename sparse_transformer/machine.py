"""The machine that this process runs on: its name, and its memory."""

import os
import pathlib
import re
import resource
import sys


def device_name() -> str:
  """The model of this process's JAX devices; on CPUs, of the processor."""
  import jax  # takes a second; importing this module does not

  device = jax.local_devices()[0]
  return device.device_kind if device.platform != "cpu" else cpu_name()


def cpu_name() -> str:
  """The model of the processor."""
  found = re.search(r"model name\s*: (.*)", _read("cpuinfo"))
  return found[1] if found else "CPU"


def machine() -> str:
  """Number and model of the devices: '2 cores of ...', '8 x NVIDIA H100'."""
  import jax

  if jax.default_backend() == "cpu":
    return f"{os.cpu_count()} cores of {cpu_name()}"
  return f"{jax.local_device_count()} x {device_name()}"


def memory() -> int:
  """Bytes of the host's memory."""
  return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_memory() -> int | None:
  """Bytes of memory of a local device: of CPUs, `memory`; None if unknown."""
  import jax

  device = jax.local_devices()[0]
  if device.platform == "cpu":
    return memory()
  return (device.memory_stats() or {}).get("bytes_limit")


def free_memory() -> int | None:
  """Bytes that a program may take on each local device; None if unknown."""
  import jax

  devices = jax.local_devices()
  if devices[0].platform == "cpu":  # they share the host's
    found = re.search(r"MemAvailable:\s*(\d+) kB", _read("meminfo"))
    return int(found[1]) * 1024 // len(devices) if found else None
  stats = devices[0].memory_stats() or {}
  if "bytes_limit" not in stats:
    return None
  return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_free(what: str, needed: int) -> None:
  """Raises ValueError if something needs more memory than a device has free."""
  free = free_memory()
  if free is not None and needed > free:
    sizes = " of memory on a device, but ".join(
      f"{size / 2**30:,.1f} GiB" for size in (needed, free)
    )
    raise ValueError(
      f"{what} needs {sizes} is free; use a smaller network or batch, more"
      " train.accumulation, or model.remat=block"
    )


def peak_memory() -> int:
  """Bytes used at the most: of the device if known, else by this process."""
  import jax

  stats = jax.local_devices()[0].memory_stats() or {}
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return stats.get("peak_bytes_in_use", size * unit)


def _read(name: str) -> str:
  """The text of a file of /proc; empty where there is none."""
  path = pathlib.Path("/proc") / name
  return path.read_text() if path.exists() else ""
