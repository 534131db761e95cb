"""What made a result: versions of packages, the commit, the command."""

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

# The modules that each extra brings; see requirements-EXTRA.txt.
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
  """What to install for a module that was not found; None if no extra has it.

  Args:
    error: of the import.

  >>> missing(ModuleNotFoundError(name="flax.nnx"))
  "needs flax; the wheel is the library, clone to train: pip install '.[train]'"
  """
  # The package of a module: flax of flax.nnx.
  name = (error.name or "").partition(".")[0]
  for extra, modules in EXTRAS.items():
    if name in modules:
      return (
        f"needs {name}; the wheel is the library, clone to train: pip install"
        f" '.[{extra}]'"
      )
  return None


def packages() -> dict[str, str]:
  """The versions of the packages that results depend on: {name: version}.

  Packages that are not installed are left out; none is imported.
  """
  versions: dict[str, str] = {}
  for name in PACKAGES:
    # Of several copies on its path, Python imports the first.
    for distribution in importlib.metadata.distributions(name=name):
      versions.setdefault(name, distribution.version)
  return versions


def command(**values: object) -> str:
  """This process's command as a line of a shell.

  Args:
    **values: flags whose values differ from those given, such as step=700 where
      the command asked for the last step.
  """
  # Separated by a character that no argument contains, words can be
  # replaced as text.
  line = "\0".join(["python", *sys.orig_argv[1:]])
  for name, value in values.items():
    line = re.sub(rf"\0--?{name}[=\0][^\0]*", "", line) + f"\0--{name}={value}"
  return shlex.join(line.split("\0"))


@functools.cache  # files may change later, but not the code that runs
def commit() -> str | None:
  """The short hash of the checkout's commit, with "-dirty" if it differs.

  None if the library is not used from a git checkout.
  """
  # Installed in another repository, git would tell that one's commit.
  if not (ROOT / ".git").exists():
    return None
  command = "git", "describe", "--always", "--dirty"
  try:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  except OSError:
    return None
  return done.stdout.strip() or None
