"""JAX's compilation cache, which keeps compiled programs for later commands."""

import os
import pathlib
import re
import sys
import warnings
import zlib

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
DAMAGED = "Error reading persistent compilation cache entry for '(.+?)'"
# Maximum size of the cache in bytes. When it is larger, the oldest programs are
# deleted.
LARGEST = 2**30


def keep() -> None:
  """Tells JAX to keep compiled programs in the user's cache folder.

  Call this function before importing JAX, because JAX reads the environment
  variable `DIRECTORY` during its import. If the user has set this variable,
  even to the empty string, its value is left unchanged. Whether or not the user
  has set it, a damaged program is deleted, compiled again and cached again.
  """
  warnings.filterwarnings("always", DAMAGED)
  # When JAX cannot read a cached program, it issues a warning and compiles
  # again. Only the warning contains the program's name, hence this hook.
  warnings.showwarning = _replace
  if DIRECTORY in os.environ:
    return

  home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  root = pathlib.Path(home).expanduser() / "sparse_transformer"
  try:
    folder = root / _processor()
    folder.mkdir(parents=True, exist_ok=True)
    _prune(root)
  except (OSError, RuntimeError):  # no home folder, or a full disk
    return

  os.environ[DIRECTORY] = str(folder)
  # If the disk is full, JAX warns about each program. The user needs no cache,
  # so hide these warnings.
  warnings.filterwarnings("ignore", "Error writing persistent compilation")


def _replace(message, *origin, show=warnings.showwarning):
  """Deletes a damaged program, because JAX would not overwrite it."""
  damaged = re.match(DAMAGED, str(message))
  if not damaged:
    show(message, *origin)
    return

  folder = pathlib.Path(os.environ[DIRECTORY])
  # The warning has only the first part of the file's name, so delete all
  # programs that match; those that were intact are compiled again, too.
  for path in folder.glob(f"{damaged[1]}-*-cache"):
    path.unlink(missing_ok=True)


def _processor():
  """Returns an identifier of the processor for which CPU programs are cached.

  JAX's own cache key identifies the processor only in part.
  """
  path = pathlib.Path("/proc/cpuinfo")
  # A program uses the instructions of the processor for which it was compiled.
  # If machines share a home folder, it may crash on another processor.
  text = path.read_text() if path.exists() else ""
  lines = re.findall("(?m)^(?:model name|flags|Features)\t.*", text)
  cores = os.cpu_count()
  if sys.platform == "linux":  # XLA divides work among the usable cores
    cores = len(os.sched_getaffinity(0))
  identity = sorted(set(lines)) + [cores, os.environ.get("NPROC")]
  return f"{zlib.crc32(repr(identity).encode()):08x}"


def _prune(root):
  """Deletes the oldest programs until the rest fit in `LARGEST` bytes.

  Args:
    root: the cache folder, which has one folder of programs per processor.
  """
  files = []
  for path in root.glob("*/*"):
    info = path.stat()
    files.append((info.st_mtime, info.st_size, path))

  # Add up sizes from the newest program on, so that the oldest exceed the
  # limit.
  total = 0
  for _, size, path in sorted(files, reverse=True):
    total += size
    if total > LARGEST:
      path.unlink(missing_ok=True)
