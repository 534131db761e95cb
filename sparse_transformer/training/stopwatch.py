"""The time that a run spends on training steps, measured by two clocks."""

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

# The clocks: elapsed time, and the CPU time of all threads, which does not
# depend on what else runs on the machine.
TIMES = dict(seconds=time.perf_counter, processor_seconds=time.process_time)
Limit = tuple[str, float]  # a clock, and the seconds after which the run ends
MOST = 2**31  # bound for limits, because the optimizer counts steps in 32 bits


def parse_limit(
  text: str, flag: str, kinds: Collection[str] = tuple(TIMES)
) -> Limit:
  """Parses a limit of the form KIND:N.

  Args:
    text: the value of the flag.
    flag: the name of the flag, for the error message.
    kinds: the allowed kinds; by default, the clocks.

  Returns:
    (kind, number).

  Raises ValueError if the text does not have this form.
  """
  kind, _, number = text.partition(":")
  # If N is not a number, use 0, which is out of bounds.
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

  The stopwatch runs from its construction, and pauses in the context `paused`.

  Args:
    lines: the lines of the run's `metrics.jsonl`. If the run resumes, its time
      continues from the last line that includes the time.
    limit: the time limit of the run, for `share`, or None.
  """

  def __init__(
    self, lines: Sequence[Mapping[str, Any]] = (), limit: Limit | None = None
  ):
    # Some lines include no time, such as the line about the initial weights.
    timed = [line for line in lines if TIMES.keys() <= line.keys()]
    self._spent = {name: timed[-1][name] if timed else 0.0 for name in TIMES}
    self._limit = limit
    self._tokens = 0  # since the last call of `rate`
    self._since = self._spent["seconds"]
    self._start = _now()

  def _add(self) -> None:
    """Adds the time since the last call or the end of the last pause."""
    now = _now()
    for name in TIMES:
      self._spent[name] += now[name] - self._start[name]
    self._start = now

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Pauses the stopwatch in a context, such as validation or saving."""
    self._add()
    try:
      yield
    finally:
      self._start = _now()

  def share(self) -> float | None:
    """Returns the fraction of the limit that has passed, at most 1.

    Returns None if there is no limit.
    """
    if self._limit is None:
      return None

    self._add()
    clock, seconds = self._limit
    return min(1.0, self._spent[clock] / seconds)

  def is_over(self) -> bool:
    """Returns whether the time limit has passed."""
    return self.share() == 1

  def count(self, tokens: int) -> None:
    """Counts the tokens of a step, for `rate`."""
    self._tokens += tokens

  def rate(self) -> float:
    """Returns the tokens per second since the last call of this function.

    Call this method within `paused`, because it does not include the time after
    the last pause.
    """
    seconds = self._spent["seconds"] - self._since
    rate = self._tokens / seconds if seconds else 0.0
    self._tokens = 0
    self._since = self._spent["seconds"]
    return rate

  def times(self) -> dict[str, float]:
    """Returns the time fields of a line of metrics, as of the last pause."""
    return {name: round(spent, 3) for name, spent in self._spent.items()}


def _now():
  return {name: clock() for name, clock in TIMES.items()}
