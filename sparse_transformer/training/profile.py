"""A trace of consecutive steps, for Perfetto and XProf."""

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
  """Traces steps into the folder `profile` of a workdir; a context manager.

  Args:
    steps: the steps to trace, from 1; () for none.
    step: how many steps are done. If some of `steps` are among these, none is
      traced.
    workdir: the folder of the run.
    watch: the run's stopwatch, which does not count the time of starting and
      ending a trace.
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
      processes.say(f"not profiled, as the run resumes from step {step}")
      self._steps = ()
    if self._steps:
      self._folder.mkdir(exist_ok=True)

  def before(self, step: int, state: State) -> None:
    """Begins the trace before its first step, and ends it after its last.

    Args:
      step: the number of the step that comes next.
      state: the state before it.
    """
    self._step = step
    if not self._steps or step not in (self._steps[0], self._steps[-1] + 1):
      return

    # JAX computes steps later than they are called. The trace has whole steps
    # only if those before it are done.
    jax.block_until_ready(state)
    with self._watch.paused():
      if step > self._steps[0]:
        return self.close()
      with metrics.attempt("the profile"):
        jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        self.callback(self._end)

  def _end(self):
    """Writes the trace, and says how to look at it."""
    command = shlex.join(["xprof", f"--logdir={self._folder}"])
    # A signal may have ended the run before the last of the steps.
    last = min(self._step, self._steps[-1])
    with metrics.attempt("the profile"):
      jax.profiler.stop_trace()
      processes.say(
        f"profiled steps {self._steps[0]} to {last} into {self._folder}\n"
        "to see it: perfetto_trace.json.gz below it at"
        f" https://ui.perfetto.dev, or pip install xprof and {command}"
      )
