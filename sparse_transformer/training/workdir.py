"""The lock of a workdir: one run at a time."""

import contextlib
import datetime
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator


def check_held(workdir: str | os.PathLike, holder: str) -> None:
  """Checks that the workdir is the one that another process holds.

  Args:
    workdir: the folder.
    holder: what `hold` returned in that process.

  Raises:
    ValueError: it is not, as when hosts have a folder of this name each.
  """
  path = pathlib.Path(workdir) / "lock"
  found = path.read_text() if path.exists() else "nobody"
  if found != holder:
    raise ValueError(
      f"{workdir} is not the folder that the first process uses: it is held by"
      f" {found}, not by {holder}; all processes need the same folder, on a"
      " shared file system"
    )


@contextlib.contextmanager
def hold(workdir: str | os.PathLike) -> Iterator[str]:
  """Locks a workdir against other runs; creates it if needed.

  The operating system owns the lock: it is released when the process ends,
  however it ends.

  Returns:
    What the lock says about the holder.

  Raises:
    ValueError: another process holds it; the message names process and host.
  """
  path = pathlib.Path(workdir) / "lock"
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      file.seek(0)
      holder = file.read().strip() or "another process"
      raise ValueError(
        f"{workdir} is in use by {holder}; wait until it ends, or use another"
        " --workdir"
      ) from None
    now = datetime.datetime.now().isoformat(" ", "seconds")
    holder = f"process {os.getpid()} on {socket.gethostname()} since {now}"
    # The name of the holder is optional: a full disk is not an error here.
    with contextlib.suppress(OSError):
      file.truncate(0)
      file.write(holder)
      file.flush()
      os.fsync(file.fileno())
    yield holder
