"""The versions of this library and of those it uses."""

import importlib.metadata
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[1]  # of a checkout
PACKAGES = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"


def packages() -> dict[str, str]:
  """The versions of the packages that results depend on."""
  return {name: importlib.metadata.version(name) for name in PACKAGES}


def commit() -> str | None:
  """The short hash of the checkout's commit, with "-dirty" if it differs.

  None if the library is not used from a git checkout.
  """
  if not (ROOT / ".git").exists():
    return None
  command = "git", "describe", "--always", "--dirty"
  try:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  except OSError:
    return None
  return done.stdout.strip() or None
