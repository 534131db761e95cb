"""The machine that this process runs on: its name, and its memory.

For the kind of device that a program is traced for, see `attention.platforms`;
for devices that are absent, see `targets.hardware`.
"""

import ctypes
import mmap
import os
import pathlib
import re
import resource
import sys

import jax

# Parameters of glibc's `mallopt`, from malloc.h.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
# Bytes of the heap for which huge pages are requested, and of a huge page.
HEAP, HUGE_PAGE = 2**33, 2**21


def device_name() -> str:
  """Returns the model of this process's devices or, on CPUs, of the CPU."""
  device, _ = _device()
  return device.device_kind if device.platform != "cpu" else cpu_name()


def cpu_name() -> str:
  """Returns the model of the CPU, or "CPU" without /proc, as on macOS."""
  name = re.search(r"model name\s*: (.*)", _read("cpuinfo"))
  return name[1] if name else "CPU"


def machine() -> str:
  """Returns the number and model of the devices.

  For example '2 cores of ...' or '8 x NVIDIA H100'.
  """
  if jax.default_backend() == "cpu":
    return f"{os.cpu_count()} cores of {cpu_name()}"
  return f"{jax.local_device_count()} x {device_name()}"


def check_free(what: str, needed: int) -> None:
  """Raises ValueError if a device has less free memory than is needed.

  If the free memory is unknown, the check passes.

  Args:
    what: what needs the memory, for the error message.
    needed: bytes needed on each device.
  """
  free = free_memory()
  if free is not None and needed > free:
    raise ValueError(
      f"{what} needs {needed / 2**30:,.1f} GiB of memory on a device, but only"
      f" {free / 2**30:,.1f} GiB is free; use a smaller network or batch, more"
      " train.accumulation, or model.remat=block"
    )


def free_memory() -> int | None:
  """Returns the free bytes on each local device, or None if unknown.

  On an accelerator, this is the limit up to which JAX may allocate, minus the
  bytes in use.
  """
  device, stats = _device()
  # JAX's CPU devices share the host's memory equally.
  if device.platform == "cpu":
    free = re.search(r"MemAvailable:\s*(\d+) kB", _read("meminfo"))
    return int(free[1]) * 1024 // jax.local_device_count() if free else None

  if "bytes_limit" not in stats:
    return None
  return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def peak_memory() -> int:
  """Returns the peak memory use so far, in bytes.

  If the device reports its peak, as GPUs do, the function returns this peak.
  Otherwise, it returns the peak of this process, because the memory of the
  process contains the arrays.
  """
  # Linux counts in KiB, macOS in bytes.
  size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  unit = 1 if sys.platform == "darwin" else 1024
  return _device()[1].get("peak_bytes_in_use", size * unit)


def keep_freed_memory() -> None:
  """Makes glibc keep freed memory, so that later steps can reuse it.

  By default, glibc returns large blocks to the system as soon as they are
  freed. On CPUs, each step would then have to fault in the memory of its
  temporary arrays again, page by page. Call this function before devices are
  used, because the threads of devices choose an allocation arena when they
  start. Without glibc, it does nothing.
  """
  libc = ctypes.CDLL(None)
  if not hasattr(libc, "mallopt"):
    return

  # Allocate every block on the heap rather than by mmap, and never shrink the
  # heap. All threads share the main heap, because the heaps of other arenas are
  # too small for large blocks.
  libc.mallopt(MMAP_MAX, 0)
  libc.mallopt(TRIM_THRESHOLD, -1)
  libc.mallopt(ARENA_MAX, 1)

  # Grow the heap and request huge pages for it, because translating their
  # addresses takes less time. Pages that are never used take no memory.
  libc.malloc.restype = ctypes.c_void_p
  block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(HEAP)))
  if block.value:
    start = -(-block.value // HUGE_PAGE) * HUGE_PAGE
    size = ctypes.c_size_t(HEAP - HUGE_PAGE)
    libc.madvise(ctypes.c_void_p(start), size, mmap.MADV_HUGEPAGE)
    libc.free(block)


def _device():
  """Returns (the first local device, its memory statistics or {})."""
  device = jax.local_devices()[0]
  return device, device.memory_stats() or {}


def _read(name: str) -> str:
  """Returns the text of a file in /proc; "" if it is absent, as on macOS."""
  path = pathlib.Path("/proc") / name
  return path.read_text() if path.exists() else ""
