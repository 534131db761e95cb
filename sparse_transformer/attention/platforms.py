"""The devices that programs are traced for: this machine's, or absent ones."""

import contextlib
import contextvars
import re
from collections.abc import Iterator

import jax

PLATFORMS = "cpu", "cuda", "rocm", "tpu"
_TARGET = contextvars.ContextVar("target", default=("", 0.0))


@contextlib.contextmanager
def targeting(platform: str, capability: float = 0.0) -> Iterator[None]:
  """Traces programs for absent devices, of one of `PLATFORMS`.

  NVIDIA GPUs also have a compute capability, such as 8.9.
  """
  token = _TARGET.set((platform, capability))
  try:
    yield
  finally:
    _TARGET.reset(token)


def current_platform() -> str:
  """The platform of the default device, or that of `targeting`."""
  if target := _TARGET.get()[0]:
    return target
  device = jax.config.jax_default_device
  backend = getattr(device, "platform", device) or jax.default_backend()
  if backend == "gpu":
    version = jax.devices()[0].client.platform_version
    return "rocm" if "rocm" in version.lower() else "cuda"
  return backend


def compute_capabilities() -> set[float]:
  """Of the NVIDIA GPUs that programs are compiled for; empty if unknown."""
  platform, capability = _TARGET.get()
  if platform:
    return {capability} - {0.0}
  names = {getattr(d, "compute_capability", "") for d in jax.local_devices()}
  return {float(name) for name in names if re.fullmatch(r"\d+\.\d+", name)}
