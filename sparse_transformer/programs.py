"""Compiled programs, kept for the next command: JAX's compilation cache."""

import os
import pathlib
import re
import sys
import warnings
import zlib

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
DAMAGED = "Error reading persistent compilation cache entry for '(.+?)'"
# The most bytes of programs that are kept; beyond, the oldest are deleted.
LARGEST = 2**30


def keep() -> None:
  """Tells JAX to keep compiled programs in a user's cache.

  Call it before JAX is imported, which reads the variable `DIRECTORY` then. If
  the user has set it, even to nothing, that decides instead. In either case, a
  damaged program is deleted, compiled again and kept.
  """
  warnings.filterwarnings("always", DAMAGED)
  # JAX warns of a damaged program, and goes on; a hook on warnings is the only
  # place that learns its name.
  warnings.showwarning = _replace
  if DIRECTORY in os.environ:
    return

  home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  root = pathlib.Path(home).expanduser() / "sparse_transformer"
  try:
    folder = root / _processor()
    folder.mkdir(parents=True, exist_ok=True)
    _prune(root)
  except (OSError, RuntimeError):  # no home, or a full disk
    return

  os.environ[DIRECTORY] = str(folder)
  # That the disk is full, of which JAX warns, is of no use to the user.
  warnings.filterwarnings("ignore", "Error writing persistent compilation")


def _replace(message, *origin, show=warnings.showwarning):
  """Makes room for a program that JAX cannot read, and would not overwrite."""
  damaged = re.match(DAMAGED, str(message))
  if not damaged:
    show(message, *origin)
    return

  folder = pathlib.Path(os.environ[DIRECTORY])
  # Nothing says which of that name it is; the others are compiled again.
  for path in folder.glob(f"{damaged[1]}-*-cache"):
    path.unlink(missing_ok=True)


def _processor():
  """Names what programs for CPUs depend on; JAX's own key has only a part."""
  path = pathlib.Path("/proc/cpuinfo")
  # Programs use instructions that the processor had when they were compiled: on
  # another one, with a shared home, they may crash.
  text = path.read_text() if path.exists() else ""
  lines = re.findall("(?m)^(?:model name|flags|Features)\t.*", text)
  cores = os.cpu_count()
  if sys.platform == "linux":  # XLA divides work among these
    cores = len(os.sched_getaffinity(0))
  identity = sorted(set(lines)) + [cores, os.environ.get("NPROC")]
  return f"{zlib.crc32(repr(identity).encode()):08x}"


def _prune(root):
  """Deletes the oldest programs beyond `LARGEST`.

  Args:
    root: the folder with a folder of programs for each processor.
  """
  files = []
  for path in root.glob("*/*"):
    info = path.stat()
    files.append((info.st_mtime, info.st_size, path))

  # From the newest on; those beyond the limit are the oldest.
  total = 0
  for _, size, path in sorted(files, reverse=True):
    total += size
    if total > LARGEST:
      path.unlink(missing_ok=True)
