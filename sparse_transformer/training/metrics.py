"""Metrics of a run: JSON lines, TensorBoard and a progress bar."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorboardX
import tqdm

from sparse_transformer import atomic

# Bytes to leave free: on a full disk TensorBoard's writer thread would die, and
# closing it would wait forever.
RESERVE = 2**16


class Writer:
  """Writes metrics to `metrics.jsonl`, TensorBoard and the terminal.

  A context manager. A resumed run recomputes the steps after its checkpoint, so
  their lines are dropped when it starts.

  Args:
    workdir: the folder of `metrics.jsonl`.
    step: number of steps done so far.
    steps: total number of steps.
    on_error: "stop" raises OSError when a line cannot be written; "continue"
      reports it on standard error.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    step: int,
    steps: int,
    on_error: str = "stop",
  ):
    self._path = pathlib.Path(workdir) / "metrics.jsonl"
    self._on_error = on_error
    self._attempt(_truncate, self._path, step)
    self._file = self._path.open("a")
    self._board = self._attempt(
      tensorboardX.SummaryWriter,
      str(workdir),
      purge_step=step + 1 if step else None,
    )
    self._bar = tqdm.tqdm(
      initial=step,
      total=steps,
      unit="step",
      disable=not sys.stderr.isatty(),
      dynamic_ncols=True,
    )

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    self._bar.close()
    if kind:  # the first error is the one to raise
      self._on_error = "continue"
    if self._board:
      self._attempt(self._board.close)
    self._attempt(self._file.close)

  def advance(self) -> None:
    """Moves the progress bar by one step."""
    self._bar.update()

  def note(self, step: int, split: str, **values: Any) -> bool:
    """Appends JSON values to `metrics.jsonl` only; returns whether it could."""
    line = json.dumps({"step": step, "split": split, **values})
    return bool(self._attempt(self._append, line))

  def write(self, step: int, split: str, **values: float) -> None:
    """Writes metrics to `metrics.jsonl`, TensorBoard and the terminal."""
    if self.note(step, split, **values) and self._board:
      for name, value in values.items():
        self._board.add_scalar(f"{split}/{name}", value, step)
    shown = values.copy()
    shown.pop("model_flops_per_second", None)  # follows from tokens_per_second
    text = "  ".join(f"{name} {value:.5g}" for name, value in shown.items())
    self._bar.write(f"step {step:>7}  {split:<10}  {text}", file=sys.stdout)

  def _append(self, line: str) -> bool:
    if shutil.disk_usage(self._path.parent).free < RESERVE:
      raise OSError(errno.ENOSPC, "no space left", str(self._path))
    self._file.write(line + "\n")
    self._file.flush()
    return True

  def _attempt(self, write: Callable, *args: Any, **kwargs: Any) -> Any:
    try:
      return write(*args, **kwargs)
    except OSError as error:
      if self._on_error == "stop":
        raise
      print(f"{self._path} is incomplete: {error}", file=sys.stderr)


class Throughput:
  """Tokens per second between two calls of `rate`."""

  def __init__(self):
    self.restart()

  def restart(self) -> None:
    """Excludes the time since the last call: compilation, evaluation."""
    self._time, self._tokens = time.perf_counter(), 0

  def count(self, tokens: int) -> None:
    """Adds the tokens of a step."""
    self._tokens += tokens

  def rate(self) -> float:
    """Returns tokens per second, and starts over."""
    rate = self._tokens / (time.perf_counter() - self._time)
    self.restart()
    return rate


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the lines of `metrics.jsonl` as dictionaries, in order."""
  return _complete_lines(pathlib.Path(workdir) / "metrics.jsonl")


def _complete_lines(path: pathlib.Path) -> list[dict[str, Any]]:
  lines = []
  for text in path.read_text().splitlines():
    # A killed run may have left half a line.
    with contextlib.suppress(ValueError):
      line = json.loads(text)
      if isinstance(line, dict) and isinstance(line.get("step"), int):
        lines.append(line)
  return lines


def _truncate(path: pathlib.Path, step: int) -> None:
  """Drops the lines after a step, and incomplete ones."""
  if path.exists():
    kept = [line for line in _complete_lines(path) if line["step"] <= step]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    atomic.write_text(path, text)
