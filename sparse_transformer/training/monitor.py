"""Judges the metrics of training steps: non-finite values and spikes."""

import math
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from sparse_transformer.training.loss_scale import SMALLEST


class Monitor:
  """Judges the metrics of each step while the next one runs.

  That avoids waiting for the device. A gradient that overflows because of the
  loss scale does not count against its batch: the next scale is smaller.

  Args:
    settings: group `train` of the experiment's config; uses `nonfinite`,
      `max_skipped` and `spike`.
    numbers: the training examples of the batch of each step.
    note: `Writer.note`, called for each spike and each skipped step.
    lines: the lines of `metrics.jsonl` so far.
  """

  def __init__(
    self,
    settings: ConfigDict,
    numbers: Sequence[np.ndarray],
    note: Callable[..., None],
    lines: Iterable[Mapping] = (),
  ):
    self._settings, self._numbers, self._note = settings, numbers, note
    self._pending: tuple[int, Mapping[str, jax.Array]] | None = None
    self._baseline = math.inf  # nats of the last training line
    self._skipped: list[int] = []  # steps
    for line in lines:
      if line["split"] == "train":
        self.logged(line["nats"])
      elif line["split"] == "skipped":
        self._skipped.append(line["step"])

  def logged(self, nats: float) -> None:
    """Sets the loss that `train.spike` compares the next ones to."""
    self._baseline = nats

  def watch(self, step: int, measured: Mapping[str, jax.Array]) -> None:
    """`flush`, which keeps the metrics of this step, from 1, for later."""
    self.flush()
    self._pending = step, measured

  def flush(self) -> None:
    """Judges the last step now.

    Raises:
      FloatingPointError: a metric is non-finite, and the run must end.
    """
    if self._pending is None:
      return
    (step, measured), self._pending = self._pending, None
    values = {
      name: float(value)
      for name, value in measured.items()
      if np.ndim(value) == 0
    }
    nats, factor = values["nats"], self._settings.spike
    # Gradients may overflow because of a large scale; the next one is smaller.
    is_scaled = values.get("loss_scale", SMALLEST) > SMALLEST
    may_overflow = is_scaled and math.isfinite(nats)
    for name in ("nats", *values):  # the loss first
      if not (math.isfinite(values[name]) or may_overflow):
        self._nonfinite(step, name, values[name])
        return
    if factor and nats > factor * self._baseline:
      self._note(step, "spike", nats=nats, examples=self._examples(step))

  def _examples(self, step: int) -> list[int]:
    return self._numbers[step - 1].tolist()

  def _nonfinite(self, step: int, name: str, value: float) -> None:
    """Notes a step that was skipped, or ends the run."""
    reason, examples = f"{name} is {value} at step {step}", self._examples(step)
    if self._settings.nonfinite == "skip":
      bad = dict(metric=name, value=str(value))
      self._note(step, "skipped", **bad, examples=examples)
      self._skipped.append(step)
      most = self._settings.max_skipped
      if self._skipped[-most - 1 :] != list(range(step - most, step + 1)):
        return
      reason += (
        f", after {most} batches in a row were skipped"
        f" (train.max_skipped={most})"
      )
    self._note(step, "diverged", metric=name, value=str(value))
    command = shlex.join(["python", *sys.argv, f"--replay={step}"])
    raise FloatingPointError(
      f"{reason}; the weights are as before it; its batch has the training"
      f" examples {', '.join(map(str, examples))}; to recompute it: {command}"
    )
