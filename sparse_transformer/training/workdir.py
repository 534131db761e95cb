"""Workdirs: which folder can be one, and its lock, for one run at a time."""

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

COMPARISON = "comparison-of.json"  # what a folder of a comparison compares


def check_folder(workdir: str | os.PathLike, other: str, what: str) -> None:
  """Raises ValueError if a folder cannot be a run's, or a comparison's.

  Either its name is unsuitable, or a file `other` shows that it holds `what`.
  """
  name = os.fspath(workdir)
  path = pathlib.Path(workdir)
  existing = next(filter(os.path.lexists, (path, *path.parents)), path)
  # It would be another folder once its parents exist.
  is_odd = ".." in path.relative_to(existing).parts
  # Orbax takes some for a pattern, or for a bucket.
  if is_odd or re.search(r"^\w+:/|[*?[\udc80-\udcff]", name):
    raise ValueError(
      f"--workdir={name} must be a local folder, in UTF-8, without * ? or [,"
      " and without .. in a new one"
    )
  if not existing.is_dir():
    raise ValueError(f"--workdir={name}: {existing} is not a folder")
  if (path / other).exists():
    raise ValueError(f"{name} holds {what}; use another --workdir")


@contextlib.contextmanager
def hold(workdir: str | os.PathLike) -> Iterator[None]:
  """Locks a workdir against other runs; creates it if needed.

  The first process locks it for all; the lock ends with it, however it ends.
  An error leaves no new workdir if it comes before a config.json.
  Raises ValueError if another run holds it, with its process and host.
  """
  path = pathlib.Path(workdir)
  needed = [path / "lock", path / "checkpoints", path, *path.parents]
  new = [x for x in needed if not x.exists()]
  try:
    with contextlib.ExitStack() as stack:
      processes.decide(lambda: _lock(path / "lock", stack))
      yield
  except BaseException:
    # Folders that have something else in them are not empty, and stay.
    if processes.is_first() and not (path / "config.json").exists():
      with contextlib.suppress(OSError):
        for x in new:
          x.unlink() if x.name == "lock" else x.rmdir()
    raise


def _lock(path, stack):
  path.parent.mkdir(parents=True, exist_ok=True)
  file = stack.enter_context(atomic.appending(path))

  # Opened to append: another run's line is still there.
  file.seek(0)
  holder = file.read(100).strip()
  if holder and not holder.startswith("process"):
    raise ValueError(f"{path} is not the lock of a run; move it away")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except (BlockingIOError, PermissionError):
    raise ValueError(
      f"{path.parent} is in use by {holder or 'another process'}; wait until it"
      " ends, or use another --workdir"
    ) from None
  # Some network disks have no locks.
  except OSError as error:
    line = f"warning: {path} cannot be locked ({error}): start no second run"
    print(line, file=sys.stderr)

  # A full disk does not matter here.
  with contextlib.suppress(OSError):
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file)
    file.flush()
