"""A workdir: what its name may be, and its lock: one run at a time."""

import contextlib
import datetime
import fcntl
import os
import pathlib
import re
import socket
from collections.abc import Iterator

from sparse_transformer.training.distributed import processes

HOLDER = "process"  # how a lock begins
COMPARISON = "comparison-of.json"  # what a folder of a comparison compares


def check_name(workdir: str | os.PathLike) -> None:
  """Raises ValueError if a folder of this name cannot hold checkpoints."""
  name = os.fspath(workdir)
  reason = ""
  if re.match(r"\w+:/", name):
    reason = "is not a local folder; mount the bucket, or copy the run later"
  elif re.search("[\udc80-\udcff]", name):  # bytes that are not UTF-8
    reason = "is not UTF-8; rename it"
  elif found := set(name) & set("*?["):  # Orbax takes them for a pattern
    reason = f"must not contain {' '.join(sorted(found))}; rename it"
  if reason:
    raise ValueError(f"--workdir={name} {reason}")


@contextlib.contextmanager
def hold(workdir: str | os.PathLike) -> Iterator[None]:
  """Locks a workdir against other runs; creates it if needed.

  The first process locks it for all; the lock ends with it, however it ends.

  Raises:
    ValueError: another run holds it; the message names process and host. Or
      the processes have different folders of this name.
  """
  path = pathlib.Path(workdir) / "lock"
  with contextlib.ExitStack() as stack:
    processes.decide(lambda: _lock(path, stack))
    place = f"the holder of {path.parent}, which must be on a shared disk,"
    find = lambda: path.read_text() if path.exists() else "nobody"
    processes.check_same({place: processes.together(find)})
    yield


def _lock(path, stack):
  """Locks the file until the stack is closed, and writes who holds it."""
  if (path.parent / COMPARISON).exists():
    raise ValueError(f"{path.parent} holds a comparison; use another --workdir")
  path.parent.mkdir(parents=True, exist_ok=True)
  file = stack.enter_context(path.open("a+"))
  file.seek(0)
  if not re.fullmatch(f"({HOLDER}.*)?", file.read(100), re.DOTALL):
    raise ValueError(f"{path} is not the lock of a run; move it away")
  file.seek(0)
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    holder = file.read().strip() or "another process"
    raise ValueError(
      f"{path.parent} is in use by {holder}; wait until it ends, or use another"
      " --workdir"
    ) from None
  now = datetime.datetime.now().isoformat(" ", "seconds")
  holder = f"{HOLDER} {os.getpid()} on {socket.gethostname()} since {now}"
  # The name of the holder is optional: a full disk does not matter here.
  with contextlib.suppress(OSError):
    file.truncate(0)
    file.write(holder)
    file.flush()
    os.fsync(file.fileno())
