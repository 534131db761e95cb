"""The lock of a workdir: one run at a time."""

import contextlib
import fcntl
import os
import pathlib
import re
import socket
import sys
from collections.abc import Iterator

from sparse_transformer.training.distributed import processes

COMPARISON = "comparison-of.json"  # what a folder of a comparison compares


def check_name(workdir: str | os.PathLike) -> None:
  """Raises ValueError if a folder of this name cannot hold checkpoints."""
  name = os.fspath(workdir)
  if re.match(r"\w+:/", name):
    raise ValueError(
      f"--workdir={name} is not a local folder; mount the bucket, or copy the"
      " run later"
    )
  if re.search("[*?[\udc80-\udcff]", name):  # Orbax takes some for a pattern
    raise ValueError(
      f"--workdir={name} must be UTF-8 without * ? and [; rename it"
    )
  path = pathlib.Path(workdir)
  for found in filter(os.path.lexists, (path, *path.parents)):
    if not found.is_dir():
      raise ValueError(f"--workdir={name}: {found} is not a folder")
    break


@contextlib.contextmanager
def hold(workdir: str | os.PathLike) -> Iterator[None]:
  """Locks a workdir against other runs; creates it if needed.

  The first process locks it for all; the lock ends with it, however it ends.

  Raises:
    ValueError: another run holds it; the message names process and host.
  """
  path = pathlib.Path(workdir) / "lock"
  with contextlib.ExitStack() as stack:
    processes.decide(lambda: _lock(path, stack))
    yield


def _lock(path, stack):
  """Locks the file until the stack is closed, and writes who holds it."""
  if (path.parent / COMPARISON).exists():
    raise ValueError(f"{path.parent} holds a comparison; use another --workdir")
  path.parent.mkdir(parents=True, exist_ok=True)
  file = stack.enter_context(path.open("a+"))
  file.seek(0)
  holder = file.read(100).strip()
  if holder and not holder.startswith("process"):
    raise ValueError(f"{path} is not the lock of a run; move it away")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise ValueError(
      f"{path.parent} is in use by {holder or 'another process'}; wait until it"
      " ends, or use another --workdir"
    ) from None
  except OSError as error:  # of some network disks
    line = f"warning: {path} cannot be locked ({error}): start no second run"
    print(line, file=sys.stderr)
  # The name of the holder is optional: a full disk does not matter here.
  with contextlib.suppress(OSError):
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file)
    file.flush()
