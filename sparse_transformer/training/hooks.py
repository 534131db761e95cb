"""What a run calls after each step: hook(steps done, state, is_last)."""

import contextlib
import pathlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import tqdm

from sparse_transformer.signals import Stopped
from sparse_transformer.training import metrics
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.evaluation import samples
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import State
from sparse_transformer.training.stopwatch import Stopwatch


@contextlib.contextmanager
def closing(*hooks: Any) -> Iterator[Sequence[Any]]:
  """Gives the hooks, and closes them in the end."""
  try:
    yield hooks
  finally:
    for hook in hooks:
      hook.close()


def is_due(step: int, every: int, is_last: bool) -> bool:
  """Returns whether periodic work is due; it always is after the last step."""
  return is_last or (every > 0 and step % every == 0)


class Progress:
  """A bar on the terminal, which shows `steps` in all; None if unknown."""

  def __init__(self, step: int, steps: int | None):
    self._bar = tqdm.tqdm(
      initial=step,
      total=steps,
      unit="step",
      disable=not (processes.is_first() and sys.stderr.isatty()),
      dynamic_ncols=True,
    )

  def __call__(self, step: int, state: State, is_last: bool) -> None:
    self._bar.update()

  def close(self) -> None:
    """Leaves the bar as it is."""
    self._bar.close()


class Profile:
  """Traces consecutive steps into the folder `profile` of a workdir.

  Args:
    steps: the steps to trace, from 1; () for none.
    step: the number of steps done so far. If some of `steps` are done, none is
      traced.
    writer, watch: of the run. Starting and ending a trace is no time of steps.

  Raises:
    OSError: the folder cannot be written to.
  """

  def __init__(
    self,
    steps: Sequence[int],
    step: int,
    writer: metrics.Writer,
    watch: Stopwatch,
  ):
    self._writer, self._watch, self._is_on = writer, watch, False
    self._folder = writer.workdir / "profile"
    self._steps = steps if processes.is_first() else ()
    if self._steps and self._steps[0] <= step:
      writer.say(
        f"not profiled: steps {steps[0]} to {steps[-1]}, as the run resumes"
        f" from step {step}"
      )
      self._steps = ()
    if self._steps:
      self._folder.mkdir(exist_ok=True)
      self._switch(step)

  def __call__(self, step: int, state: State, is_last: bool) -> None:
    if self._steps and step in (self._steps[0] - 1, self._steps[-1]):
      jax.block_until_ready(state)
      self._switch(step)

  def _switch(self, step: int) -> None:
    """Begins the trace before its first step, and ends it after its last."""
    with self._watch.paused():
      if step == self._steps[0] - 1:
        jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        self._is_on = True
      elif step == self._steps[-1]:
        self.close()

  def close(self) -> None:
    """Ends the trace, if it has begun, and says where it is."""
    if not self._is_on:
      return
    self._is_on = False
    try:
      jax.profiler.stop_trace()
    except RuntimeError as error:  # of XLA; the run goes on
      self._writer.say(f"not profiled: {str(error).splitlines()[0]}")
      return
    self._writer.say(trace(self._steps, self._folder))


def trace(steps: Sequence[int], folder: pathlib.Path) -> str:
  """Two lines about a trace of consecutive steps: its place, how to open it."""
  command = shlex.join(["xprof", f"--logdir={folder}"])
  return (
    f"profiled steps {steps[0]} to {steps[-1]} into {folder}\n"
    "to see it: perfetto_trace.json.gz below it at https://ui.perfetto.dev, or"
    f" pip install xprof and {command}"
  )


class Samples:
  """Draws sequences where the run validates, and shows them on TensorBoard.

  A signal ends the drawing; the loop sees it before its next step.
  """

  def __init__(
    self,
    experiment: Experiment,
    writer: metrics.Writer,
    watch: Stopwatch,
    stops: processes.Stops,
  ):
    self._experiment, self._writer = experiment, writer
    self._watch, self._stops = watch, stops

  def __call__(self, step: int, state: State, is_last: bool) -> None:
    settings = self._experiment.config.eval
    if not (settings.samples and is_due(step, settings.every, is_last)):
      return
    with self._watch.paused(), contextlib.suppress(Stopped):
      shown = samples.draw_in_training(
        self._experiment, state.ema, self._writer.workdir, self._stops.check
      )
      self._writer.show(step, "validation", "samples", shown)

  def close(self) -> None:
    """Does nothing."""
