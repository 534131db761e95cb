"""Judges the metrics of training steps: which are non-finite."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from sparse_transformer.training.loss_scale import SMALLEST

MAX_SKIPPED = 10  # batches in a row; one more ends the run


class Monitor:
  """Judges the metrics of each step while the next one runs.

  That avoids waiting for the device. A gradient that overflows because of the
  loss scale does not count against its batch: the next scale is smaller.

  Args:
    settings: group `train` of the experiment's config; uses `nonfinite`.
    numbers: the training examples of the batch of each step.
    note: `Writer.note`, called for each skipped step, and the end.
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
    self._skipped = [x["step"] for x in lines if x["split"] == "skipped"]

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
    values = {x: float(y) for x, y in measured.items() if np.ndim(y) == 0}
    # Gradients may overflow because of a large scale; the next one is smaller.
    is_scaled = values.get("loss_scale", SMALLEST) > SMALLEST
    if is_scaled and math.isfinite(values["nats"]):
      return
    for name in ("nats", *values):  # the loss first
      if not math.isfinite(values[name]):
        self._nonfinite(step, name, values[name])
        return

  def _nonfinite(self, step: int, name: str, value: float) -> None:
    """Notes a step that was skipped, or ends the run."""
    examples, reason = self._numbers[step - 1].tolist(), ""
    if self._settings.nonfinite == "skip":
      bad = dict(metric=name, value=str(value))
      self._note(step, "skipped", **bad, examples=examples)
      self._skipped.append(step)
      most = MAX_SKIPPED
      if self._skipped[-most - 1 :] != list(range(step - most, step + 1)):
        return
      reason = f", after {most} batches in a row were skipped"
    self._note(step, "diverged", metric=name, value=str(value))
    raise FloatingPointError(
      f"{name} is {value} at step {step}{reason}; the weights are as before it;"
      f" its batch has the training examples {', '.join(map(str, examples))}"
    )
