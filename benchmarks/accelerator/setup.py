"""The device, its driver, versions, and what it can run."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess

import jax
import jax.numpy as jnp

from benchmarks.accelerator.cases import usual
from benchmarks.accelerator.parts import Settings
from sparse_transformer import machine, version
from sparse_transformer.attention import registry

PACKAGES = (
  *("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint"),
  *("ml-collections", "grain", "tensorflow-datasets", "tensorboardX"),
)
DTYPES = "float32", "bfloat16", "float16"


def entries(settings: Settings, rank: int) -> dict:
  """One for the versions, and one for the executors of each dtype."""
  del settings
  found = {
    "versions": lambda record: {"packages": versions()},
    "memory": lambda record: {"bytes": machine.device_memory()},
  }
  for dtype in DTYPES:
    run = lambda record, dtype=dtype: executors(dtype)
    found[f"executors, {dtype}"] = run
  return {} if rank else found


def device() -> dict:
  first = jax.local_devices()[0]
  return {
    "name": machine.device_name(),
    "number": jax.local_device_count(),
    "platform": registry.current_platform(),
    "platform_version": first.client.platform_version,
    "driver": driver(),
    "cores": os.cpu_count(),
    "python": platform.python_version(),
    "jax": jax.__version__,
    "jaxlib": importlib.metadata.version("jaxlib"),
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
    "commit": version.commit(),
  }


def device_works() -> bool:
  """Whether the device still computes, after an entry failed."""
  try:
    return float(jnp.arange(4.0).sum()) == 6
  except Exception:  # whatever the runtime raises
    return False


def driver() -> str | None:
  words = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
  try:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return next(iter(done.stdout.split()), None)


def versions() -> dict:
  """{package: version}, None for those that are not installed."""
  found = dict.fromkeys(PACKAGES)
  for name in PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def executors(dtype: str) -> dict:
  """Which executors run heads of 64 here, or why not; and what `auto` takes."""
  case = usual(dtype)
  return {
    "auto": registry.resolve("auto", case),
    "executors": {
      name: executor.unsupported(case) or "yes"
      for name, executor in registry.EXECUTORS.items()
    },
  }
