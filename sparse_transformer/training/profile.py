"""Traces consecutive steps, for Perfetto and XProf."""

import contextlib
import pathlib
import shlex
from collections.abc import Sequence

import jax

from sparse_transformer.training import metrics
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.step import State
from sparse_transformer.training.stopwatch import Stopwatch


class Profile(contextlib.ExitStack):
  """A context manager that traces steps into the folder `profile` of a workdir.

  Args:
    steps: the steps to trace, counted from 1; () for none.
    step: the number of completed steps. If the first of `steps` is already
      completed, nothing is traced.
    workdir: the folder of the run.
    watch: the stopwatch of the run, which is paused while a trace starts and
      ends.
  """

  def __init__(
    self,
    steps: Sequence[int],
    step: int,
    workdir: pathlib.Path,
    watch: Stopwatch,
  ):
    super().__init__()
    self._watch = watch
    self._step = step
    self._folder = workdir / "profile"
    self._steps = steps if processes.is_first() else ()
    if steps and steps[0] <= step:
      processes.say(f"not profiled, because the run resumes from step {step}")
      self._steps = ()
    if self._steps:
      self._folder.mkdir(exist_ok=True)

  def before(self, step: int, state: State) -> None:
    """Starts the trace before the first traced step; ends it after the last.

    Args:
      step: the next step, counted from 1.
      state: the state before this step.
    """
    self._step = step
    if not self._steps or step not in (self._steps[0], self._steps[-1] + 1):
      return

    # JAX computes steps asynchronously. Wait until the previous steps are
    # computed, so that the trace contains only whole steps.
    jax.block_until_ready(state)
    with self._watch.paused():
      if step > self._steps[0]:
        return self.close()
      with metrics.attempt("the profile"):
        jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        self.callback(self._end)

  def _end(self):
    """Writes the trace, and prints how to view it."""
    command = shlex.join(["xprof", f"--logdir={self._folder}"])
    # A signal may have ended the run before the last of the steps.
    last = min(self._step, self._steps[-1])
    with metrics.attempt("the profile"):
      jax.profiler.stop_trace()
      processes.say(
        f"profiled steps {self._steps[0]} to {last} into {self._folder}\n"
        "to view the trace, open its perfetto_trace.json.gz at"
        f" https://ui.perfetto.dev, or pip install xprof and run {command}"
      )
