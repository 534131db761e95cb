"""Workdirs: which folders can be one, and a lock for one run at a time."""

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
  """Raises ValueError if a folder cannot be that of a run, or of a comparison.

  Args:
    workdir: the folder, which need not exist.
    other: a file that shows that it already holds something else.
    what: names that, for the error.
  """
  name = os.fspath(workdir)
  path = pathlib.Path(workdir)
  existing = next(filter(os.path.lexists, (path, *path.parents)), path)

  # A path with .. in a folder that does not exist yet may name another one as
  # soon as that exists, for instance as a link.
  is_odd = ".." in path.relative_to(existing).parts
  # Orbax takes some names for a pattern of files, or for a bucket in a cloud.
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

  The first process locks it for all. The operating system releases the lock
  when that process ends, however it ends. An error before there is a
  config.json removes a new workdir.

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
    # Only what is new is removed, innermost first. A folder that has something
    # else in it cannot be, and stays.
    if processes.is_first() and not (path / "config.json").exists():
      with contextlib.suppress(OSError):
        for x in new:
          x.unlink() if x.name == "lock" else x.rmdir()
    raise


def _lock(path, stack):
  """Locks a file and writes into it who holds it, until a stack is closed."""
  path.parent.mkdir(parents=True, exist_ok=True)
  file = stack.enter_context(atomic.appending(path))

  # The file was opened to append, so that the line of another run, which holds
  # the lock, is still there to be read.
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
  # Some network disks have no locks; a run there is better than none.
  except OSError as error:
    line = f"warning: {path} cannot be locked ({error}): start no second run"
    print(line, file=sys.stderr)

  # The line only serves the error of another run: a full disk may lack it.
  with contextlib.suppress(OSError):
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file)
    file.flush()
