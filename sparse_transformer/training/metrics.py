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
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from sparse_transformer import atomic

# Numbers that readers of `metrics.jsonl` use, by the split of a line, and those
# that it may lack.
NEEDED = {"train": ("nats", "bits_per_dim"), "validation": ("bits_per_dim",)}
TIMES = ("seconds", "processor_seconds")  # of training steps, so far
TABLES = {"expert_load", "spans"}  # a row for each layer
OPTIONAL = {"tokens_per_second", "mfu", *TIMES}
FLUSH_SECONDS = 30  # between flushes of the TensorBoard file, which take long


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
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    step: int,
    steps: int | None,
    on_error: str = "stop",
    silent: bool = False,
  ):
    self._path = pathlib.Path(workdir) / "metrics.jsonl"
    self._on_error = on_error
    self._file: TextIO | None = None
    self._board: Any = None
    if not silent:
      self._attempt(_truncate, self._path, step)
      self._file = self._path.open("a")
      self._board = self._attempt(_Board, workdir, step)
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
    for file in filter(None, (self._board, self._file)):
      if kind:  # the first error is the one to raise
        with contextlib.suppress(OSError):
          file.close()
      else:
        self._attempt(file.close)

  def advance(self) -> None:
    """Moves the progress bar by one step."""
    self._bar.update()

  def say(self, line: str) -> None:
    """Prints a line above the progress bar."""
    if self._file:
      self._bar.write(line, file=sys.stdout)

  def note(self, step: int, split: str, **values: Any) -> None:
    """Appends JSON values to `metrics.jsonl` only."""
    if not self._file:
      return
    line = json.dumps({"step": step, "split": split, **values})
    self._attempt(print, line, file=self._file, flush=True)

  def write(self, step: int, split: str, **values: Any) -> None:
    """Writes metrics to `metrics.jsonl`, TensorBoard and the terminal.

    A nested list has a curve for each number; the terminal shows its extremes.
    """
    if not self._file:
      return
    self.note(step, split, **values)
    if self._board:
      self._attempt(self._board.write, step, split, values)
    hidden = {"model_flops_per_second", *TIMES}
    shown = [name for name in values if name not in hidden]
    text = "  ".join(f"{name} {_extremes(values[name])}" for name in shown)
    self._bar.write(f"step {step:>7}  {split:<10}  {text}", file=sys.stdout)

  def _attempt(self, write: Callable, *args: Any, **kwargs: Any) -> Any:
    try:
      return write(*args, **kwargs)
    except OSError as error:
      line = f"metrics could not be written to {self._path.parent}: {error}"
      if self._on_error == "stop":
        raise OSError(line) from error
      print(f"continuing without them: {line}", file=sys.stderr)


def _extremes(value: Any) -> str:
  """A number, or the smallest and the largest of several."""
  if isinstance(value, list):
    return f"{np.min(value):.3g} to {np.max(value):.3g}"
  return f"{value:.5g}"


class _Board(EventsWriter):
  """A TensorBoard file, without tensorboardX's thread, which errors end."""

  def __init__(self, workdir: str | os.PathLike, step: int):
    super().__init__(str(pathlib.Path(workdir) / "events"), f".{os.getpid()}")
    self._flush_time = 0.0
    if step:  # hides what a run before this one wrote about later steps
      start = SessionLog(status=SessionLog.START)
      self._append(step=step + 1, session_log=start)

  def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
    scalars = [
      Summary.Value(tag="/".join([split, name, *map(str, i)]), simple_value=x)
      for name, numbers in values.items()
      for i, x in np.ndenumerate(numbers)
    ]
    self._append(step=step, summary=Summary(value=scalars))
    if time.monotonic() > self._flush_time:
      self.flush()
      self._flush_time = time.monotonic() + FLUSH_SECONDS

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
  """Drops the lines after a step, and incomplete ones."""
  if path.exists():
    kept = [line for line in read(path.parent) if line["step"] <= step]
    atomic.write_text(path, "".join(json.dumps(x) + "\n" for x in kept))
