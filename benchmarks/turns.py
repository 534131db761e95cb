"""Programs that take turns, so that noise of the machine meets all of them."""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from benchmarks import record

Case = tuple[str, Callable, tuple]  # name, compiled function, arguments


def measure(cases: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
  """Processor times of programs, and ratios to the first one; prints them.

  Args:
    cases: the programs.
    rounds: how often each runs, after it was compiled.

  Returns:
    For each case its name, the median time in milliseconds, and the median of
    the first case's time divided by its own, of the same round.
  """
  times: dict[str, list[float]] = {name: [] for name, *_ in cases}
  for i in range(-1, rounds):
    for name, function, arguments in cases:
      start = time.process_time()
      jax.block_until_ready(function(*arguments))
      if i >= 0:
        times[name].append(1e3 * (time.process_time() - start))
  of_first = times[cases[0][0]]
  rows = []
  for name, found in times.items():
    ratios = [y / x for x, y in zip(found, of_first, strict=True)]
    row = dict(
      case=name,
      milliseconds=round(statistics.median(found), 1),
      speed_up=round(statistics.median(ratios), 2),
    )
    print("{case}: {milliseconds:.0f} ms, {speed_up:.2f}".format(**row))
    rows.append(row)
  return rows


def main(
  name: str,
  description: str,
  cases: Callable[[int], Iterable[Case]],
  **size: int,
) -> None:
  """Measures cases as a command, and writes a record.

  Args:
    name: of the module and of the record.
    description: for --help.
    cases: function of the size to the cases; the first one always runs.
    **size: the flag that sets the size, and its default.
  """
  parser = argparse.ArgumentParser(description=description)
  ((unit, default),) = size.items()
  parser.add_argument(f"--{unit}", type=int, default=default)
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--only", default="", help="cases with this text")
  parser.add_argument(
    "--out", type=pathlib.Path, default=record.FOLDER / f"{name}.json"
  )
  args = parser.parse_args()
  number = getattr(args, unit)
  content = record.about(f"python -m benchmarks.{name}", sys.argv[1:])
  first, *others = cases(number)
  chosen = [first, *(case for case in others if args.only in case[0])]
  rows = measure(chosen, args.rounds)
  record.write(args.out, content | {unit: number, "rows": rows})
