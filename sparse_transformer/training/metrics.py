"""Metrics of a run: where they are written, and which are non-finite."""

import contextlib
import json
import math
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TextIO

import jax
import numpy as np
from tensorboardX import SummaryWriter

from sparse_transformer import atomic, signals
from sparse_transformer.progress import say
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.step import SMALLEST
from sparse_transformer.training.stopwatch import TIMES

# The numbers that each line of `metrics.jsonl` must have, by its split.
NEEDED = {"train": ("nats", "bits_per_dim"), "validation": ("bits_per_dim",)}
# The terminal shows these first, under short names and with a fixed number of
# digits, so that lines can be compared; it does not show the hidden ones.
SHORT = dict(
  bits_per_dim=("bits", "7.4f"),
  accuracy=("accuracy", "6.4f"),
  gradient_norm=("grad", "8.4f"),
  learning_rate=("lr", "9.3e"),
  tokens_per_second=("tok/s", "9,.0f"),
)
HIDDEN = {"nats", "model_flops_per_second"}.union(TIMES)
NUMBERS = HIDDEN.union(SHORT, {"mfu"})  # in a line that has them
OnMetrics = Callable[[int, str, dict[str, Any]], Any]


class Writer:
  """Writes metrics to `metrics.jsonl`, TensorBoard and the terminal.

  It is a context manager, and writes in the first process only. A resumed run
  recomputes the steps after its checkpoint, so their lines are dropped when it
  starts.

  Args:
    workdir: the folder of `metrics.jsonl`; an attribute.
    step: the last step that is saved; -1 if there is none, not even step 0.
    on_metrics: is called with (step, split, values) for each line of
      `metrics.jsonl`; an exception in it is reported on standard error.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    step: int,
    on_metrics: OnMetrics | None = None,
  ):
    self.workdir = pathlib.Path(workdir)
    self._on_metrics = on_metrics
    self._file: TextIO | None = None

    # The splits have the same tags in different folders, so that TensorBoard
    # draws them in the same charts.
    self._boards: dict[str, SummaryWriter] = {}
    if not processes.is_first():
      return

    _truncate(self.workdir / "metrics.jsonl", step)
    self._file = (self.workdir / "metrics.jsonl").open("a")
    for split in NEEDED:
      # The queue has no limit. A full disk ends the thread that empties it, and
      # the run would wait for that thread for ever.
      self._boards[split] = SummaryWriter(
        str(self.workdir / "events" / split),
        purge_step=step + 1,
        max_queue=0,
        filename_suffix=f".{os.getpid()}.{step}",  # not that of a run before
        flush_secs=30,
      )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    if not self._file:
      return
    ignored = [OSError] if kind else []  # the first error is the one to raise
    for file in (*self._boards.values(), self._file):
      with contextlib.suppress(*ignored):
        file.close()

  def write(self, step: int, split: str, **values: Any) -> None:
    """Appends JSON values to `metrics.jsonl`, and calls `on_metrics`.

    Those of training and validation are also printed, and shown on TensorBoard,
    a curve per number.
    """
    if not self._file:
      return

    # Each line is flushed at once, so that a kill loses none.
    try:
      line = json.dumps({"step": step, "split": split, **values})
      print(line, file=self._file, flush=True)
    # By itself, the error of a full disk would not name the file.
    except OSError as error:
      error.filename = error.filename or self._file.name
      raise
    if self._on_metrics:
      with attempt(f"on_metrics at step {step}"):
        self._on_metrics(step, split, values)

    if split not in self._boards:
      return

    # Arrays, such as spans of heads, have a curve for each number.
    for name, numbers in values.items():
      for i, x in np.ndenumerate(numbers):
        tag = "/".join([name, *map(str, i)])
        self._boards[split].add_scalar(tag, x, step)
    say(as_line(step, split, values))


@contextlib.contextmanager
def attempt(what: str) -> Iterator[None]:
  """Catches and reports the errors of what a run can do without.

  Args:
    what: names it, for the line on standard error.
  """
  try:
    yield
  except (KeyboardInterrupt, signals.Stopped):
    raise
  except BaseException as error:
    text = "".join(traceback.format_exception_only(error))
    say(f"{what} failed: {' '.join(text.split())}", sys.stderr)


def as_line(step: int, split: str, values: Mapping[str, Any]) -> str:
  """A line for the terminal: the values that are single numbers.

  >>> as_line(50, "train", dict(bits_per_dim=2.25, learning_rate=1e-3))
  'step      50  train       bits  2.2500  lr 1.000e-03'
  """
  text = f"step {step:>7}  {split:<10}"
  for name in dict.fromkeys(list(SHORT) + list(values)):
    if name not in values or name in HIDDEN or np.ndim(values[name]):
      continue
    label, digits = SHORT.get(name, (name, "#.5g"))
    text += f"  {label} {values[name]:{digits}}"

  return text


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads the lines of `metrics.jsonl`.

  A line that is not complete, such as one that a kill has cut off, is left out:
  all have a `step`, a `split`, and the numbers in `NEEDED`.

  Raises OSError if the file does not exist, ValueError if it is not regular.
  """
  path = pathlib.Path(workdir) / "metrics.jsonl"
  lines = []
  # Raises ValueError for a pipe, which would be read for ever.
  atomic.size(path)
  for text in path.read_text("utf-8", errors="replace").splitlines():
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
      line = json.loads(text)
      needed = NEEDED.get(line["split"], ())
      numbers = {"step"}.union(needed, NUMBERS & line.keys())
      if all(isinstance(line[name], int | float) for name in numbers):
        lines.append(line)

  return lines


def _truncate(path: pathlib.Path, step: int) -> None:
  """Drops the lines after a step, which come again, and incomplete ones."""
  text = ""
  for line in read(path.parent) if path.exists() else []:
    if line["step"] > step:
      continue
    # A run that goes on after its end was only stopped there.
    if line["split"] == "end":
      line["split"] = "stopped"
    text += json.dumps(line) + "\n"
  atomic.write_text(path, text)


class Monitor:
  """Ends a run whose metrics are non-finite.

  Each step is judged while the next one runs, so that no device waits.

  Args:
    numbers: the training examples of the batch of each step.
    write: `Writer.write`, called if the run must end.
  """

  def __init__(self, numbers: Sequence[np.ndarray], write: Callable[..., None]):
    self._numbers = numbers
    self._write = write
    self._pending: tuple[int, Mapping[str, jax.Array]] | None = None

  def watch(self, step: int, measured: Mapping[str, jax.Array]) -> None:
    """Judges the step before, and keeps the metrics of this one for later.

    Args:
      step: the number of this step, from 1.
      measured: its metrics, which may still be computed on the devices.
    """
    self.flush()
    self._pending = step, measured

  def flush(self) -> None:
    """Judges the last step; raises FloatingPointError if the run must end."""
    if self._pending is None:
      return

    step, measured = self._pending
    self._pending = None
    # Only here does the host wait for the step.
    values = {x: float(y) for x, y in measured.items() if np.ndim(y) == 0}

    # A large loss scale may make gradients overflow. Such a step is skipped,
    # and the next scale is smaller, until it cannot be the reason any more.
    is_scaled = values.get("loss_scale", SMALLEST) > SMALLEST
    if is_scaled and math.isfinite(values["nats"]):
      return

    # The loss is named first: it is non-finite before gradients and weights.
    for name in ("nats", *values):
      if not math.isfinite(values[name]):
        return self._nonfinite(step, name, values[name])

  def _nonfinite(self, step: int, name: str, value: float) -> None:
    self._write(step, "diverged", metric=name, value=str(value))
    examples = ", ".join(map(str, self._numbers[step - 1].tolist()))
    raise FloatingPointError(
      f"{name} is {value} at step {step}; the weights are as before it; its"
      f" batch has the training examples {examples}"
    )
