"""What a command says while it works: lines, and how far it is."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

import tqdm

from sparse_transformer import signals

# The time between lines if standard error is not a terminal.
SECONDS = 30


def say(line: str, file: TextIO | None = None) -> None:
  """Prints a line, above a progress bar if there is one.

  A command goes on if nobody reads what it prints: later lines are dropped.

  Args:
    line: the line.
    file: by default standard output.
  """
  try:
    # The bar is removed, and drawn again below the line.
    with tqdm.tqdm.external_write_mode():
      print(line, file=file, flush=True)
  except OSError:  # a closed pipe, or terminal, perhaps before its SIGHUP
    signals.silence(file or sys.stdout)


@contextlib.contextmanager
def progress(
  label: str, total: int | None, done: int = 0, silent: bool = False
) -> Iterator[Callable[[int], None]]:
  """Shows how much of some work is done, on standard error.

  A terminal has a bar, and anything else a line every 30 seconds. Yields a
  function to call with how much was done since its last call.

  Args:
    label: names the work.
    total: how much there is; None if unknown.
    done: how much was done before.
    silent: shows nothing.
  """
  said = time.monotonic()
  # None hides the bar where standard error is not a terminal.
  look = dict(leave=False, dynamic_ncols=True, disable=silent or None)
  with tqdm.tqdm(desc=label, total=total, initial=done, **look) as bar:

    def advance(number: int) -> None:
      nonlocal done, said
      done += number
      bar.update(number)
      if bar.disable and not silent and time.monotonic() > said + SECONDS:
        said = time.monotonic()
        of_all = f" of {total:,}" if total else ""
        say(f"{label} {done:,}{of_all}", sys.stderr)

    yield advance
