"""Compiled programs, kept for the next command: JAX's compilation cache."""

import os
import pathlib
import re
import sys
import warnings
import zlib

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
DAMAGED = "Error reading persistent compilation cache entry for '(.+?)'"
LARGEST = 2**30  # bytes of programs; from there on, the oldest are deleted


def keep() -> None:
  """Tells JAX, which is not imported yet, to keep programs in a user's cache.

  A user who has set `DIRECTORY`, if only to nothing, has decided otherwise.
  Wherever they are kept, damaged ones are compiled again and replaced.
  """
  warnings.filterwarnings("always", DAMAGED)
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
  # A full disk does not matter here.
  warnings.filterwarnings("ignore", "Error writing persistent compilation")


def _replace(message, *about, show=warnings.showwarning):
  """Makes room for a program that JAX cannot read, and would not overwrite."""
  if not (found := re.match(DAMAGED, f"{message}")):
    return show(message, *about)
  # Nothing says which of that name it is; the others are compiled again.
  for path in pathlib.Path(os.environ[DIRECTORY]).glob(f"{found[1]}-*-cache"):
    path.unlink(missing_ok=True)


def _processor():
  """Names what programs for CPUs depend on; JAX's own key has only a part."""
  path, cores = pathlib.Path("/proc/cpuinfo"), os.cpu_count()
  text = path.read_text() if path.exists() else ""
  if sys.platform == "linux":  # XLA divides work among these
    cores = len(os.sched_getaffinity(0))
  found = re.findall("(?m)^(?:model name|flags|Features)\t.*", text)
  about = [*sorted({*found}), cores, os.environ.get("NPROC")]
  return f"{zlib.crc32(repr(about).encode()):08x}"


def _prune(root):
  files = [(x.stat(), x) for x in root.glob("*/*")]
  total = 0
  for info, path in sorted(files, key=lambda x: x[0].st_mtime, reverse=True):
    total += info.st_size
    if total > LARGEST:
      path.unlink(missing_ok=True)
