"""The time that a run spends on training steps, on two clocks."""

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

# The clocks: wall time, and the processor time of all threads, which does not
# depend on what else the machine does.
TIMES = dict(seconds=time.perf_counter, processor_seconds=time.process_time)
Limit = tuple[str, float]  # a clock, and how many seconds a run may take on it
MOST = 2**31  # of a limit: the optimizer counts steps in 32 bits


def parse_limit(
  text: str, flag: str, kinds: Collection[str] = tuple(TIMES)
) -> Limit:
  """Parses a limit that a flag gives as KIND:N.

  Args:
    text: the value of the flag.
    flag: its name, for the error.
    kinds: the kinds that it may name; by default the clocks.

  Returns (kind, number). Raises ValueError if the text is no limit.
  """
  kind, _, number = text.partition(":")
  # A text that is not a number becomes 0, which is out of bounds.
  try:
    amount = float(number)
  except ValueError:
    amount = 0
  if kind not in kinds or not 0 < amount < MOST:
    known = " or ".join(f"{x}:N" for x in kinds)
    raise ValueError(
      f"--{flag}={text} must be {known}, with N above 0 and below {MOST:,}"
    )

  return kind, amount


class Stopwatch:
  """Measures the time that a run spends on training steps.

  It runs from its construction, except in the context `paused`.

  Args:
    lines: of the run's `metrics.jsonl`. The time of a run that resumes counts
      on from the last line that has it.
    limit: of the time of the run, for `share`.
  """

  def __init__(
    self, lines: Sequence[Mapping[str, Any]] = (), limit: Limit | None = None
  ):
    # Some lines have no time, such as that about the weights at the start.
    timed = [line for line in lines if TIMES.keys() <= line.keys()]
    self._spent = {name: timed[-1][name] if timed else 0.0 for name in TIMES}
    self._limit = limit
    self._tokens = 0  # since the last call of `rate`
    self._since = self._spent["seconds"]
    self._start = _now()

  def _add(self) -> None:
    """Adds the time since the last call or pause."""
    now = _now()
    for name in TIMES:
      self._spent[name] += now[name] - self._start[name]
    self._start = now

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Stops the watch within a context, such as validation or saving."""
    self._add()
    try:
      yield
    finally:
      self._start = _now()

  def share(self) -> float | None:
    """The share of the limit that has passed, at most 1; None without one."""
    if self._limit is None:
      return None

    self._add()
    clock, seconds = self._limit
    return min(1.0, self._spent[clock] / seconds)

  def is_over(self) -> bool:
    """Whether the limit has passed."""
    return self.share() == 1

  def count(self, tokens: int) -> None:
    """Adds the tokens of a step."""
    self._tokens += tokens

  def rate(self) -> float:
    """Tokens per second since the last call, up to the last pause."""
    seconds = self._spent["seconds"] - self._since
    rate = self._tokens / seconds if seconds else 0.0
    self._tokens = 0
    self._since = self._spent["seconds"]
    return rate

  def times(self) -> dict[str, float]:
    """The time fields of a line of metrics, up to the last pause."""
    return {name: round(spent, 3) for name, spent in self._spent.items()}


def _now():
  return {name: clock() for name, clock in TIMES.items()}
