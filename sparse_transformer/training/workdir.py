"""A workdir in use: who holds it."""

import contextlib
import datetime
import fcntl
import os
import pathlib
import socket


@contextlib.contextmanager
def hold(workdir):
  """Keeps other runs out of a workdir.

  The lock is the system's: that of a process that died is free. Raises
  ValueError with the process and the host that hold it.
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
        f"{workdir} is in use by {holder}; wait until it has ended, or use"
        " another --workdir"
      ) from None
    now = datetime.datetime.now().isoformat(" ", "seconds")
    # Who holds it is a help to others only: a full disk is no matter here.
    with contextlib.suppress(OSError):
      file.truncate(0)
      file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}")
      file.flush()
    yield
