"""The origin of a result: package versions, the commit, the command."""

import functools
import importlib.metadata
import pathlib
import re
import shlex
import subprocess
import sys

# The folder of a checkout.
ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"

# The modules that each extra installs; see requirements-EXTRA.txt.
EXTRAS = {
  "train": (
    *("PIL", "absl", "flax", "grain", "matplotlib", "ml_collections", "optax"),
    *("orbax", "safetensors", "scipy", "tensorboardX", "tqdm"),
  ),
  "data": (
    *("array_record", "importlib_resources", "sklearn"),
    "tensorflow_datasets",
  ),
}


def missing(error: ModuleNotFoundError) -> str | None:
  """Returns how to install a missing module, or None if no extra installs it.

  Args:
    error: the error of the import.

  >>> missing(ModuleNotFoundError(name="flax.nnx"))
  "needs flax; the wheel is the library, clone to train: pip install '.[train]'"
  """
  # The top-level package, such as flax for flax.nnx.
  name = (error.name or "").partition(".")[0]
  for extra, modules in EXTRAS.items():
    if name in modules:
      return (
        f"needs {name}; the wheel is the library, clone to train: pip install"
        f" '.[{extra}]'"
      )
  return None


def packages() -> dict[str, str]:
  """Returns {name: version} of the packages that results depend on.

  Packages that are not installed are omitted. No package is imported.
  """
  versions: dict[str, str] = {}
  for name in PACKAGES:
    # If there are several copies on the path, Python imports the first.
    for distribution in importlib.metadata.distributions(name=name):
      versions.setdefault(name, distribution.version)
  return versions


def command(**values: object) -> str:
  """Returns the command of this process as a line for a shell.

  Args:
    **values: flags to replace or add, such as step=700 if the command used the
      last step.
  """
  # Join the words with a character that no argument contains, so that flags can
  # be replaced as text.
  line = "\0".join(["python", *sys.orig_argv[1:]])
  for name, value in values.items():
    line = re.sub(rf"\0--?{name}[=\0][^\0]*", "", line) + f"\0--{name}={value}"
  return shlex.join(line.split("\0"))


@functools.cache  # later changes to files do not affect the running code
def commit() -> str | None:
  """Returns the short hash of the checkout's commit.

  The hash ends in "-dirty" if files differ from the commit. Returns None if the
  library is not used from a git checkout.
  """
  # If the library is installed inside another repository, git would return the
  # commit of that repository.
  if not (ROOT / ".git").exists():
    return None
  command = "git", "describe", "--always", "--dirty"
  try:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  except OSError:
    return None
  return done.stdout.strip() or None
