"""The devices that programs target, which this machine may not have."""

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterator

import jax

PLATFORMS = "cpu", "cuda", "rocm", "tpu"
# The compute capability of the first GPUs with what kernels need: bfloat16,
# TF32, asynchronous copies.
AMPERE = 8.0
_TARGET = contextvars.ContextVar("target", default=("", 0.0))


@contextlib.contextmanager
def targeting(platform: str, capability: float = 0.0) -> Iterator[None]:
  """Returns a context manager that traces programs for absent devices.

  Within its `with` statement, backends choose kernels, tiles and limits as they
  would on a device with this platform and capability.

  Args:
    platform: one of `PLATFORMS`.
    capability: the compute capability of an NVIDIA GPU, such as 8.9; 0 if it is
      unknown.
  """
  # This is a context variable, so other threads keep their own target.
  token = _TARGET.set((platform, capability))
  try:
    yield
  finally:
    _TARGET.reset(token)


def current_platform() -> str:
  """Returns the platform that `targeting` set, or the default device's."""
  if target := _TARGET.get()[0]:
    return target

  # The setting may be a device, the name of a platform, or None.
  device = jax.config.jax_default_device
  platform = getattr(device, "platform", device) or jax.default_backend()
  if platform == "gpu":
    version = jax.devices()[0].client.platform_version
    return "rocm" if "rocm" in version.lower() else "cuda"
  return platform


def compute_capabilities() -> set[float]:
  """Returns the compute capabilities of the NVIDIA GPUs to compile for.

  Returns:
    A set such as {8.9}. It is empty if the capabilities are unknown, or if
    there are no NVIDIA GPUs.
  """
  platform, capability = _TARGET.get()
  if platform:
    return {capability} - {0.0}

  # The names of AMD GPUs, such as gfx90a, do not match.
  names = {getattr(d, "compute_capability", "") for d in jax.local_devices()}
  return {float(name) for name in names if re.fullmatch(r"\d+\.\d+", name)}


def before_ampere() -> str | None:
  """Returns an error message if a target GPU is too old for the kernels.

  Returns None otherwise, and also if no capability of a target GPU is known,
  for example because programs are traced without a GPU.
  """
  oldest = min(compute_capabilities(), default=AMPERE)
  if oldest < AMPERE:
    return f"GPUs must have compute capability {AMPERE} or later, got {oldest}"
  return None


def lacks(load: Callable[[], object]) -> str | None:
  """Returns why this version of JAX cannot import kernels, or None if it can.

  Kernels are written with experimental modules of JAX, which any release of JAX
  may move.

  Args:
    load: a function that imports the kernels.
  """
  try:
    load()
  except ImportError as error:
    return f"jax {jax.__version__} does not have what it imports: {error}"
  return None
