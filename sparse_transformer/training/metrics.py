"""Metrics of a run: JSON lines, TensorBoard and lines on the terminal."""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import numpy as np
import tqdm
from PIL import Image
from tensorboardX import SummaryWriter

from sparse_transformer import atomic
from sparse_transformer.training.stopwatch import TIMES

# Numbers that readers of `metrics.jsonl` use, by the split of a line, and those
# that it may lack.
NEEDED = {"train": ("nats", "bits_per_dim"), "validation": ("bits_per_dim",)}
TABLES = {"expert_load", "spans"}  # a row for each layer
OPTIONAL = {"accuracy", "tokens_per_second", "mfu", *TIMES}
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
    silent: whether to write nothing, because another process does.
    on_metrics: is called with (step, split, values) for each line of
      `metrics.jsonl`; an exception in it is reported on standard error.

  Attributes:
    workdir: the folder.

  Raises:
    OSError: a file cannot be written; so do all methods.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    step: int,
    silent: bool = False,
    on_metrics: OnMetrics | None = None,
  ):
    self.workdir, self._on_metrics = pathlib.Path(workdir), on_metrics
    self._file: TextIO | None = None
    # The splits have the same tags in different folders, so that TensorBoard
    # draws them in the same charts.
    self._boards: dict[str, SummaryWriter] = {}
    if silent:
      return
    path = self.workdir / "metrics.jsonl"
    _truncate(path, step)
    self._file = path.open("a")
    for split in NEEDED:
      # No limit of the queue: a full one would wait for ever for a thread that
      # a full disk has ended.
      self._boards[split] = SummaryWriter(
        str(self.workdir / "events" / split),
        purge_step=step + 1,
        max_queue=0,
        filename_suffix=f".{os.getpid()}.{step}",  # not that of a run before
        flush_secs=30,
      )

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    ignored = [OSError] if kind else []  # the first error is the one to raise
    for file in filter(None, (*self._boards.values(), self._file)):
      with contextlib.suppress(*ignored):
        file.close()

  def say(self, line: str) -> None:
    """Prints a line above the progress bar, in the process that writes."""
    if self._file:
      _print(line)

  def note(self, step: int, split: str, **values: Any) -> None:
    """Appends JSON values to `metrics.jsonl`, and calls `on_metrics`."""
    if not self._file:
      return
    try:
      line = json.dumps({"step": step, "split": split, **values})
      print(line, file=self._file, flush=True)
    except OSError as error:  # it does not name the file
      error.filename = error.filename or self._file.name
      raise
    if self._on_metrics:
      try:
        self._on_metrics(step, split, values)
      except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        _print(f"on_metrics failed at step {step}: {reason}", sys.stderr)

  def write(self, step: int, split: str, **values: Any) -> None:
    """Writes metrics to `metrics.jsonl`, TensorBoard and the terminal.

    A nested list has a curve for each number; the terminal shows its extremes.
    """
    if not self._file:
      return
    self.note(step, split, **values)
    for name, numbers in values.items():
      for i, x in np.ndenumerate(numbers):
        tag = "/".join([name, *map(str, i)])
        self._boards[split].add_scalar(tag, x, step)
    self.say(_line(step, split, values))

  def show(
    self, step: int, split: str, tag: str, content: str | pathlib.Path
  ) -> None:
    """Adds a text in Markdown, or the PNG file at a path, to TensorBoard."""
    if not self._file:
      return
    if isinstance(content, str):
      self._boards[split].add_text(tag, content, step)
      return
    with Image.open(content) as image:
      pixels = np.asarray(image)
    self._boards[split].add_image(tag, pixels, step, dataformats="HWC")


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
