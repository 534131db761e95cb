"""What a command prints while it works: lines, and a progress bar."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

import tqdm

from sparse_transformer import signals

# Seconds between progress lines if standard error is not a terminal.
SECONDS = 30


def say(line: str, file: TextIO | None = None) -> None:
  """Prints a line, above the progress bar if there is one.

  If the output can no longer be written, because its pipe or terminal is
  closed, the command continues and later lines are dropped.

  Args:
    line: the line to print.
    file: the file to print to; by default, standard output.
  """
  try:
    # tqdm clears the bar, and redraws it below the line.
    with tqdm.tqdm.external_write_mode():
      print(line, file=file, flush=True)
  # The pipe or terminal is closed. A terminal's SIGHUP may arrive only later.
  except OSError:
    signals.silence(file or sys.stdout)


@contextlib.contextmanager
def progress(
  label: str, total: int | None, done: int = 0, silent: bool = False
) -> Iterator[Callable[[int], None]]:
  """Shows the progress of some work on standard error.

  On a terminal, it shows a progress bar; otherwise, it prints a line every 30
  seconds.

  Args:
    label: the name of the work.
    total: the total amount of work, or None if unknown.
    done: the amount of work already done.
    silent: whether to show nothing.

  Yields:
    A function to call with the amount of work done since the last call.
  """
  said = time.monotonic()
  # tqdm hides the bar if `disable` is None and standard error is not a
  # terminal.
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
