"""The name of the machine that a measurement was made on."""

import os
import pathlib
import re


def device_name() -> str:
  """The model of this process's JAX devices; on CPUs, of the processor."""
  import jax  # takes a second; importing this module does not

  device = jax.local_devices()[0]
  return device.device_kind if device.platform != "cpu" else cpu_name()


def cpu_name() -> str:
  """The model of the processor."""
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  text = cpuinfo.read_text() if cpuinfo.exists() else ""
  found = re.search(r"model name\s*: (.*)", text)
  return found[1] if found else "CPU"


def machine() -> str:
  """Number and model of the devices: '2 cores of ...', '8 x NVIDIA H100'."""
  import jax

  if jax.default_backend() == "cpu":
    return f"{os.cpu_count()} cores of {cpu_name()}"
  return f"{jax.local_device_count()} x {device_name()}"
