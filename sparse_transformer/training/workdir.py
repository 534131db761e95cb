"""The lock of a workdir: one run at a time."""

import contextlib
import datetime
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

from sparse_transformer.training.distributed import processes


@contextlib.contextmanager
def hold(workdir: str | os.PathLike) -> Iterator[None]:
  """Locks a workdir against other runs; creates it if needed.

  The first process locks it for all. The operating system owns the lock: it is
  released when the process ends, however it ends.

  Raises:
    ValueError: another run holds it; the message names process and host. Or
      the processes have different folders of this name.
  """
  path = pathlib.Path(workdir) / "lock"
  with contextlib.ExitStack() as stack:
    processes.decide(lambda: _lock(path, stack))
    holder = processes.together(
      lambda: path.read_text() if path.exists() else "nobody"
    )
    place = f"the holder of {path.parent}, which must be on a shared disk,"
    processes.check_same({place: holder})
    yield


def _lock(path, stack):
  """Locks the file until the stack is closed, and writes who holds it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  file = stack.enter_context(path.open("a+"))
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
  holder = f"process {os.getpid()} on {socket.gethostname()} since {now}"
  # The name of the holder is optional: a full disk does not matter here.
  with contextlib.suppress(OSError):
    file.truncate(0)
    file.write(holder)
    file.flush()
    os.fsync(file.fileno())
