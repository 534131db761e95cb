"""Workdirs: checks of their paths, and a lock that allows one run at a time."""

import contextlib
import fcntl
import os
import pathlib
import re
import socket
import sys
from collections.abc import Iterator

from sparse_transformer import atomic
from sparse_transformer.training.distributed import processes

# Describes what is compared; marks the folder of a comparison.
COMPARISON = "comparison-of.json"


def check_folder(workdir: str | os.PathLike, other: str, what: str) -> None:
  """Raises ValueError if a folder cannot be used for a run or a comparison.

  Args:
    workdir: the folder, which need not exist.
    other: the name of a file whose presence shows that the folder is already
      used for something else.
    what: the other use of the folder, such as "a comparison", for the error
      message.
  """
  name = os.fspath(workdir)
  path = pathlib.Path(workdir)
  existing = next(filter(os.path.lexists, (path, *path.parents)), path)

  # If a folder before .. does not exist yet, the path may mean something else
  # once it exists, for example as a link.
  is_odd = ".." in path.relative_to(existing).parts
  # Orbax interprets some names as glob patterns or as cloud buckets.
  if is_odd or re.search(r"^\w+:/|[*?[\udc80-\udcff]", name):
    raise ValueError(
      f"--workdir={name} must be a local folder whose name is UTF-8 without"
      " * ? or [, and .. must not follow a folder that does not exist"
    )
  if not existing.is_dir():
    raise ValueError(f"--workdir={name}: {existing} is not a folder")
  if (path / other).exists():
    raise ValueError(f"{name} contains {what}; use another --workdir")


@contextlib.contextmanager
def hold(workdir: str | os.PathLike) -> Iterator[None]:
  """Locks a workdir against other runs, and creates it if necessary.

  The first process locks the workdir for all processes. The operating system
  releases the lock when that process ends, even if it is killed. If an error
  occurs before config.json is written, a newly created workdir is removed.

  Raises ValueError if another run has locked the workdir. The error names the
  process and the host of that run.
  """
  path = pathlib.Path(workdir)
  needed = [path / "lock", path / "checkpoints", path, *path.parents]
  new = [x for x in needed if not x.exists()]
  try:
    with contextlib.ExitStack() as stack:
      processes.decide(lambda: _lock(path / "lock", stack))
      yield
  except BaseException:
    # Remove only new files and folders, innermost first. `rmdir` keeps folders
    # that contain something else.
    if processes.is_first() and not (path / "config.json").exists():
      with contextlib.suppress(OSError):
        for x in new:
          x.unlink() if x.name == "lock" else x.rmdir()
    raise


def _lock(path, stack):
  """Locks a file until a stack is closed, and writes the holder into it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  file = stack.enter_context(atomic.appending(path))

  # The file was opened for appending, so if another run holds the lock, its
  # line is still in the file.
  file.seek(0)
  holder = file.read(100).strip()
  if holder and not holder.startswith("process"):
    raise ValueError(f"{path} is not the lock of a run; move or rename it")

  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except (BlockingIOError, PermissionError):
    raise ValueError(
      f"{path.parent} is in use by {holder or 'another process'}; wait until it"
      " ends, or use another --workdir"
    ) from None
  # Some network file systems do not support locks; allow runs there, with a
  # warning.
  except OSError as error:
    line = (
      f"warning: {path} cannot be locked ({error}); do not start a second run"
      " in the same folder"
    )
    print(line, file=sys.stderr)

  # The line is needed only for the error message of another run, so ignore a
  # full disk.
  with contextlib.suppress(OSError):
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file)
    file.flush()
