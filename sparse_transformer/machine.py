"""The machine that this process runs on: its name, and its memory."""

import functools
import os
import pathlib
import re
import resource
import sys
from collections.abc import Iterator

PROC, CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")


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


@functools.cache
def memory() -> int:
  """Bytes of the host's memory that this process can use.

  Less in a container or a batch job that limits it; swap space counts.
  """
  size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  swap = re.search(r"SwapTotal:\s*(\d+) kB", _read("meminfo"))
  return min([size, *_cgroup_limits()]) + (int(swap[1]) * 1024 if swap else 0)


def device_memory() -> int | None:
  """Bytes of memory of a local device: of CPUs, `memory`; None if unknown."""
  import jax

  device = jax.local_devices()[0]
  if device.platform == "cpu":
    return memory()
  return (device.memory_stats() or {}).get("bytes_limit")


def peak_memory() -> int:
  """Bytes used at the most: of the device if known, else by this process."""
  import jax

  stats = jax.local_devices()[0].memory_stats() or {}
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return stats.get("peak_bytes_in_use", size * unit)


def _cgroup_limits() -> Iterator[int]:
  """Limits of the control groups of this process, in both versions of Linux."""
  for line in _read("self/cgroup").splitlines():
    _, controllers, group = line.split(":", 2)
    if controllers not in ("", "memory"):
      continue
    name = "memory.limit_in_bytes" if controllers else "memory.max"
    folder = CGROUPS / controllers / group.lstrip("/")
    # In a container, the root may stand for the container's own group.
    for parent in (folder, *folder.parents):
      path = parent / name
      if path.is_file() and (text := path.read_text().strip()).isdigit():
        yield int(text)


def _read(name: str) -> str:
  """The text of a file of /proc; empty where there is none."""
  path = PROC / name
  return path.read_text() if path.exists() else ""
