"""What a run writes down: JSON lines, TensorBoard, a progress bar."""

import contextlib
import errno
import json
import pathlib
import shutil
import sys
import time

import tensorboardX
import tqdm

from sparse_transformer import atomic

# Bytes that stay free: on a full disk the thread that writes for TensorBoard
# would die, and those who wait for it with it.
RESERVE = 2**16


class Writer:
  """Writes metrics to `metrics.jsonl`, TensorBoard and the terminal.

  step, steps: where the run stands and where it ends. Lines of later steps,
  left by a run that was cut after its last checkpoint, are dropped: they are
  written again.
  """

  def __init__(self, workdir, *, step, steps, on_error="stop"):
    """on_error: "continue" tells of what cannot be written, "stop" raises."""
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

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    self._bar.close()
    if kind:  # what went wrong first goes on
      self._on_error = "continue"
    if self._board:
      self._attempt(self._board.close)
    self._attempt(self._file.close)

  def _attempt(self, write, *args, **kwargs):
    try:
      return write(*args, **kwargs)
    except OSError as error:
      if self._on_error == "stop":
        raise
      print(f"{self._path} is not complete: {error}", file=sys.stderr)

  def advance(self):
    """One step of training was dispatched."""
    self._bar.update()

  def note(self, step, split, **values):
    """A line for `metrics.jsonl` alone: JSON values by name."""
    line = json.dumps({"step": step, "split": split, **values})
    return self._attempt(self._append, line)

  def _append(self, line):
    if shutil.disk_usage(self._path.parent).free < RESERVE:
      raise OSError(errno.ENOSPC, "no space left", str(self._path))
    self._file.write(line + "\n")
    self._file.flush()
    return True

  def write(self, step, split, **values):
    """One line of metrics: numbers by name."""
    if self.note(step, split, **values) and self._board:
      for name, value in values.items():
        self._board.add_scalar(f"{split}/{name}", value, step)
    text = "  ".join(f"{name} {value:.5g}" for name, value in values.items())
    self._bar.write(f"step {step:>7}  {split:<10}  {text}", file=sys.stdout)


class Throughput:
  """Tokens per second between two calls of `rate`."""

  def __init__(self):
    self.restart()

  def restart(self):
    """Leaves out the time since the last call: compilation, evaluation."""
    self._time, self._tokens = time.perf_counter(), 0

  def count(self, tokens):
    self._tokens += tokens

  def rate(self):
    rate = self._tokens / (time.perf_counter() - self._time)
    self.restart()
    return rate


def read(workdir):
  """The lines of `metrics.jsonl` as dictionaries, in order."""
  return _whole_lines(pathlib.Path(workdir) / "metrics.jsonl")


def _whole_lines(path):
  lines = []
  for text in path.read_text().splitlines():
    # One that was being written when the run was cut is none.
    with contextlib.suppress(ValueError):
      line = json.loads(text)
      if isinstance(line, dict) and isinstance(line.get("step"), int):
        lines.append(line)
  return lines


def _truncate(path, step):
  """Drops the lines behind a step, and what is no line."""
  if path.exists():
    kept = [line for line in _whole_lines(path) if line["step"] <= step]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    atomic.write_text(path, text)
