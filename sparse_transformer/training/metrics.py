"""Metrics of a run: writing, reading, and the check that they are finite."""

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

# The numbers that each line of `metrics.jsonl` must include, by its split.
NEEDED = {"train": ("nats", "bits_per_dim"), "validation": ("bits_per_dim",)}
# The terminal shows these first, with short names and a fixed number of digits,
# so that lines are aligned. It does not show those in HIDDEN.
SHORT = dict(
  bits_per_dim=("bits", "7.4f"),
  accuracy=("accuracy", "6.4f"),
  gradient_norm=("grad", "8.4f"),
  learning_rate=("lr", "9.3e"),
  tokens_per_second=("tok/s", "9,.0f"),
)
HIDDEN = {"nats", "model_flops_per_second"}.union(TIMES)
# Fields that must be numbers in each line that includes them.
NUMBERS = HIDDEN.union(SHORT, {"mfu"})
OnMetrics = Callable[[int, str, dict[str, Any]], Any]


class Writer:
  """Writes metrics to `metrics.jsonl`, TensorBoard and the terminal.

  This is a context manager. It writes in the first process only. A resumed run
  recomputes the steps after its checkpoint, so lines about these steps are
  removed from `metrics.jsonl` at the start.

  Args:
    workdir: the folder of `metrics.jsonl`; also an attribute.
    step: the last saved step; -1 if no step is saved.
    on_metrics: a function called with (step, split, values) for each line of
      `metrics.jsonl`, or None. If it raises an exception, the exception is
      reported on standard error, and the run continues.
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

    # The splits use the same tags in different folders, so that TensorBoard
    # draws them in the same charts.
    self._boards: dict[str, SummaryWriter] = {}
    if not processes.is_first():
      return

    _truncate(self.workdir / "metrics.jsonl", step)
    self._file = (self.workdir / "metrics.jsonl").open("a")
    for split in NEEDED:
      # Do not limit the queue. If the disk is full, the thread that empties the
      # queue ends, and the run would wait forever for space in the queue.
      self._boards[split] = SummaryWriter(
        str(self.workdir / "events" / split),
        purge_step=step + 1,
        max_queue=0,
        filename_suffix=f".{os.getpid()}.{step}",  # unique for each start
        flush_secs=30,
      )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    if not self._file:
      return
    # If an exception is already being raised, do not replace it.
    ignored = [OSError] if kind else []
    for file in (*self._boards.values(), self._file):
      with contextlib.suppress(*ignored):
        file.close()

  def write(self, step: int, split: str, **values: Any) -> None:
    """Appends a line to `metrics.jsonl`, and calls `on_metrics`.

    Lines about training and validation are also printed and written for
    TensorBoard, with one curve per number.

    Args:
      step: the number of completed steps.
      split: the kind of the line, such as "train" or "validation".
      **values: JSON values.

    Raises OSError, which names the file, if writing fails.
    """
    if not self._file:
      return

    # Flush each line at once, so that no line is lost if the process is killed.
    try:
      line = json.dumps({"step": step, "split": split, **values})
      print(line, file=self._file, flush=True)
    # If the disk is full, the error does not name the file by itself.
    except OSError as error:
      error.filename = error.filename or self._file.name
      raise
    if self._on_metrics:
      with attempt(f"on_metrics at step {step}"):
        self._on_metrics(step, split, values)

    if split not in self._boards:
      return

    # For arrays, such as the spans of heads, write a curve per number.
    for name, numbers in values.items():
      for i, x in np.ndenumerate(numbers):
        tag = "/".join([name, *map(str, i)])
        self._boards[split].add_scalar(tag, x, step)
    say(as_line(step, split, values))


@contextlib.contextmanager
def attempt(what: str) -> Iterator[None]:
  """Reports errors of optional work instead of raising them.

  Args:
    what: the name of the work, for the line on standard error.
  """
  try:
    yield
  except (KeyboardInterrupt, signals.Stopped):
    raise
  except BaseException as error:
    text = "".join(traceback.format_exception_only(error))
    say(f"{what} failed: {' '.join(text.split())}", sys.stderr)


def as_line(step: int, split: str, values: Mapping[str, Any]) -> str:
  """Formats the scalar values of a line of metrics for the terminal.

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

  Incomplete lines are skipped, such as a line that was cut off when the process
  was killed. So each returned line includes `step`, `split`, and the numbers in
  `NEEDED`.

  Raises OSError if the file does not exist, or ValueError if it is not a
  regular file.
  """
  path = pathlib.Path(workdir) / "metrics.jsonl"
  lines = []
  # This raises ValueError for a pipe, which might never end.
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
  """Removes incomplete lines, and lines about steps after `step`.

  The run will compute these steps again.
  """
  text = ""
  for line in read(path.parent) if path.exists() else []:
    if line["step"] > step:
      continue
    # If the run continues, its former end was only a stop.
    if line["split"] == "end":
      line["split"] = "stopped"
    text += json.dumps(line) + "\n"
  atomic.write_text(path, text)


class Monitor:
  """Ends a run whose metrics are non-finite.

  The metrics of each step are checked while the next step runs, so that devices
  do not wait.

  Args:
    numbers: the indices of the training examples in the batch of each step.
    write: `Writer.write`, which is called if the run must end.
  """

  def __init__(self, numbers: Sequence[np.ndarray], write: Callable[..., None]):
    self._numbers = numbers
    self._write = write
    self._pending: tuple[int, Mapping[str, jax.Array]] | None = None

  def watch(self, step: int, measured: Mapping[str, jax.Array]) -> None:
    """Checks the previous step, and keeps the metrics of this step for later.

    Args:
      step: this step, counted from 1.
      measured: its metrics, which the devices may not have computed yet.
    """
    self.flush()
    self._pending = step, measured

  def flush(self) -> None:
    """Checks the last step.

    Raises FloatingPointError if one of its metrics is non-finite.
    """
    if self._pending is None:
      return

    step, measured = self._pending
    self._pending = None
    # This waits until the devices have computed the step.
    values = {x: float(y) for x, y in measured.items() if np.ndim(y) == 0}

    # A large loss scale may make gradients overflow. Such a step does not
    # update weights, and the next scale is smaller. At the smallest scale, the
    # scale cannot be the reason, so the run must end.
    is_scaled = values.get("loss_scale", SMALLEST) > SMALLEST
    if is_scaled and math.isfinite(values["nats"]):
      return

    # Name the loss first, because it becomes non-finite before gradients do.
    for name in ("nats", *values):
      if not math.isfinite(values[name]):
        return self._nonfinite(step, name, values[name])

  def _nonfinite(self, step: int, name: str, value: float) -> None:
    self._write(step, "diverged", metric=name, value=str(value))
    examples = ", ".join(map(str, self._numbers[step - 1].tolist()))
    raise FloatingPointError(
      f"{name} is {value} at step {step}; the step did not change the weights;"
      f" its batch contains the training examples {examples}"
    )
