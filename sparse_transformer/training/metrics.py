"""Metrics of a run: JSON lines, TensorBoard and a progress bar."""

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
import tqdm
from PIL import Image
from tensorboardX import summary as summaries
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from sparse_transformer import atomic

# Numbers that readers of `metrics.jsonl` use, by the split of a line, and those
# that it may lack.
NEEDED = {"train": ("nats", "bits_per_dim"), "validation": ("bits_per_dim",)}
TIMES = ("seconds", "processor_seconds")  # of training steps, so far
TABLES = {"expert_load", "spans"}  # a row for each layer
OPTIONAL = {"accuracy", "tokens_per_second", "mfu", *TIMES}
FLUSH_SECONDS = 30  # between flushes of a TensorBoard file, which take long
# Names on the terminal, which shows these first, and as many others as fit.
SHORT = dict(
  bits_per_dim="bits",
  accuracy="accuracy",
  gradient_norm="grad",
  learning_rate="lr",
  tokens_per_second="tok/s",
)
HIDDEN = {"nats", "model_flops_per_second", *TIMES}  # follow from others
COLUMNS = 100  # of the terminal
OnMetrics = Callable[[int, str, dict[str, Any]], Any]


class Writer:
  """Writes metrics to `metrics.jsonl`, TensorBoard and the terminal.

  A context manager. A resumed run recomputes the steps after its checkpoint, so
  their lines are dropped when it starts.

  Args:
    workdir: the folder of `metrics.jsonl`.
    step: number of steps done so far.
    steps: total number of steps; None if it is unknown.
    on_error: "stop" raises OSError when a line cannot be written; "continue"
      reports it on standard error.
    silent: whether to write nothing, because another process does.
    on_metrics: is called with (step, split, values) for each line of
      `metrics.jsonl`; an exception in it is reported on standard error.

  Attributes:
    workdir: the folder.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    step: int,
    steps: int | None,
    on_error: str = "stop",
    silent: bool = False,
    on_metrics: OnMetrics | None = None,
  ):
    self.workdir = pathlib.Path(workdir)
    self._on_error, self._on_metrics = on_error, on_metrics
    self._file: TextIO | None = None
    self._boards: dict[str, Any] = {}
    if not silent:
      path = self.workdir / "metrics.jsonl"
      self.attempt(_truncate, path, step)
      self._file = path.open("a")
      self._boards = {
        split: self.attempt(_Board, self.workdir / "events" / split, step)
        for split in NEEDED
      }
    self._bar = tqdm.tqdm(
      initial=step,
      total=steps,
      unit="step",
      disable=silent or not sys.stderr.isatty(),
      dynamic_ncols=True,
    )

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    self._bar.close()
    for file in filter(None, (*self._boards.values(), self._file)):
      if kind:  # the first error is the one to raise
        with contextlib.suppress(OSError):
          file.close()
      else:
        self.attempt(file.close)

  def advance(self) -> None:
    """Moves the progress bar by one step."""
    self._bar.update()

  def say(self, line: str) -> None:
    """Prints a line above the progress bar, in the process that writes."""
    if self._file:
      _print(line)

  def note(self, step: int, split: str, **values: Any) -> None:
    """Appends JSON values to `metrics.jsonl`, and calls `on_metrics`."""
    if not self._file:
      return
    line = json.dumps({"step": step, "split": split, **values})
    self.attempt(print, line, file=self._file, flush=True)
    if self._on_metrics:
      try:
        self._on_metrics(step, split, values)
      except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        _print(f"on_metrics failed at step {step}: {reason}", sys.stderr)

  def write(self, step: int, split: str, **values: Any) -> None:
    """Writes metrics to `metrics.jsonl`, TensorBoard and the terminal.

    A nested list has a curve for each number; the terminal shows its extremes.
    """
    if not self._file:
      return
    self.note(step, split, **values)
    if board := self._boards[split]:
      self.attempt(board.write, step, values)
    self.say(_line(step, split, values))

  def show(
    self, step: int, split: str, tag: str, content: str | pathlib.Path
  ) -> None:
    """Adds a text in Markdown, or the PNG file at a path, to TensorBoard."""
    if board := self._boards.get(split):
      self.attempt(board.show, step, tag, content)

  def attempt(self, write: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that writes to the workdir, as `on_error` says."""
    try:
      return write(*args, **kwargs)
    except OSError as error:
      line = f"metrics could not be written to {self.workdir}: {error}"
      if self._on_error == "stop":
        raise OSError(line) from error
      _print(f"continuing without them: {line}", sys.stderr)


def _print(line: str, file: TextIO | None = None) -> None:
  with tqdm.tqdm.external_write_mode():  # above the progress bar
    print(line, file=file, flush=True)


def _line(step: int, split: str, values: Mapping[str, Any]) -> str:
  """A line for the terminal; ... where more would not fit."""
  line = f"step {step:>7}  {split:<10}"
  for name in dict.fromkeys((*SHORT, *values)):
    if name in values.keys() - HIDDEN:
      item = f"  {SHORT.get(name, name)} {_extremes(values[name])}"
      if len(line + item) > COLUMNS - len(" ..."):
        return f"{line} ..."
      line += item
  return line


def _extremes(value: Any) -> str:
  """A number, or the smallest and the largest of several."""
  if isinstance(value, list):
    return f"{np.min(value):.3g} to {np.max(value):.3g}"
  return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.5g}"


class _Board(EventsWriter):
  """A TensorBoard file, without tensorboardX's thread, which errors end.

  The splits of a run have the same tags in different folders, so that
  TensorBoard draws them in the same charts.
  """

  def __init__(self, folder: pathlib.Path, step: int):
    folder.mkdir(parents=True, exist_ok=True)
    super().__init__(str(folder / "events"), f".{os.getpid()}.{step}")
    self._flush_time = 0.0
    if step:  # hides what a run before this one wrote about later steps
      start = SessionLog(status=SessionLog.START)
      self._append(step=step + 1, session_log=start)

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    scalars = [
      Summary.Value(tag="/".join([name, *map(str, i)]), simple_value=x)
      for name, numbers in values.items()
      for i, x in np.ndenumerate(numbers)
    ]
    self._append(step=step, summary=Summary(value=scalars))
    if time.monotonic() > self._flush_time:
      self.flush()
      self._flush_time = time.monotonic() + FLUSH_SECONDS

  def show(self, step: int, tag: str, content: str | pathlib.Path) -> None:
    if isinstance(content, str):
      summary = summaries.text(tag, content)
    else:
      with Image.open(content) as image:
        pixels = np.asarray(image)
      summary = summaries.image(tag, pixels, dataformats="HWC")
    self._append(step=step, summary=summary)
    self.flush()

  def close(self) -> None:
    self._py_recordio_writer.close()  # even if the disk is full

  def _append(self, **fields: Any) -> None:
    self.write_event(Event(wall_time=time.time(), **fields))


class Stopwatch:
  """Time spent on training steps, after those in the lines so far, and speed.

  Call `stop` before, and `restart` after, anything other than training steps:
  validation, saving.

  Attributes:
    seconds: seconds up to the last `stop`.
    processor_seconds: the same, of processor time of all threads, which does
      not depend on what else the machine does.
  """

  def __init__(self, lines: Sequence[Mapping[str, Any]] = ()):
    timed = [line for line in lines if {*TIMES} <= line.keys()]
    self.seconds, self.processor_seconds = (
      timed[-1][name] if timed else 0.0 for name in TIMES
    )
    self._tokens, self._since = 0, self.seconds
    self._start: tuple[float, float] | None = None  # on both clocks; None: off

  @property
  def is_off(self) -> bool:
    return self._start is None

  def restart(self) -> None:
    """Runs from now on."""
    self._start = time.perf_counter(), time.process_time()

  def count(self, tokens: int) -> None:
    """Adds the tokens of a step, if it runs."""
    self._tokens += tokens if self._start else 0

  def stop(self) -> None:
    """Adds the time since `restart`, if it runs."""
    if self._start:
      start, processor_start = self._start
      self.seconds += time.perf_counter() - start
      self.processor_seconds += time.process_time() - processor_start
      self._start = None

  def passed(self, clock: str) -> float:
    """Time on a clock, of `TIMES`, up to now."""
    if self._start:
      self.stop()
      self.restart()
    return getattr(self, clock)

  def rate(self) -> float:
    """Tokens per second since the last call; 0 if there was no time."""
    seconds = self.seconds - self._since
    rate = self._tokens / seconds if seconds else 0.0
    self._tokens, self._since = 0, self.seconds
    return rate

  def times(self) -> dict[str, float]:
    """The time fields of a line of metrics."""
    return {name: round(getattr(self, name), 3) for name in TIMES}


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the lines of `metrics.jsonl` that have what their readers need.

  A killed run may have left half a line.
  """
  path, lines = pathlib.Path(workdir) / "metrics.jsonl", []
  atomic.size(path)  # which a pipe does not have
  for text in path.read_text("utf-8", errors="replace").splitlines():
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
      line = json.loads(text)
      numbers = {"step", *NEEDED.get(line["split"], ())}
      numbers |= line.keys() & OPTIONAL
      kinds = {type(line[name]) for name in numbers}
      for name in line.keys() & TABLES:
        np.asarray(line[name], float).reshape(len(line[name]), -1)
      if type(line["step"]) is int and kinds <= {int, float}:
        lines.append(line)
  return lines


def _truncate(path: pathlib.Path, step: int) -> None:
  """Drops the lines after a step, incomplete ones, and that of the run's end.

  At step 0, also where a run started from, which is found again.
  """
  if path.exists():
    kept = [line for line in read(path.parent) if line["step"] <= step]
    again = {"end"} if step else {"end", "start"}
    kept = [line for line in kept if line["split"] not in again]
    atomic.write_text(path, "".join(json.dumps(x) + "\n" for x in kept))
