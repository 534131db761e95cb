"""Becomes a command that ends with the process that started it.

python child.py PARENT CORES COMMAND...

PARENT is the number of that process. CORES, separated by commas, are those that
the command may use; it may use all if they are "". On other systems than Linux,
both are ignored, and a command outlives a parent that is killed.
"""

import ctypes
import os
import signal
import sys

END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl

if __name__ == "__main__":
  parent, cores, *command = sys.argv[1:]
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before that
      sys.exit(1)
    if cores:
      os.sched_setaffinity(0, {*map(int, cores.split(","))})
  os.execv(command[0], command)
