"""Judges the metrics of training steps: non-finite values and spikes."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from sparse_transformer.training import loss_scale


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The response to a step that went wrong."""

  step: int  # the number of the step, from 1
  # `split` of the line to log, "spike" or "skipped"; None logs nothing.
  split: str | None = None
  # Other values of that line.
  values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  stop: str | None = None  # why the run must end; None to let it continue


class Monitor:
  """Judges the metrics of each step while the next one runs.

  A gradient that overflows because of the loss scale does not count against its
  batch: the step was skipped, and the next scale is smaller.

  Reading a metric waits for the device, so the metrics of the step that was
  just dispatched are left for later.

  Args:
    settings: group `train` of the experiment's config; uses `nonfinite`,
      `max_skipped` and `spike`.
    lines: the lines of `metrics.jsonl` so far.
  """

  def __init__(self, settings: ConfigDict, lines: Iterable[Mapping] = ()):
    self._settings = settings
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

  def watch(
    self, step: int, measured: Mapping[str, jax.Array]
  ) -> Verdict | None:
    """Judges the previous step, and keeps the metrics of this one for later."""
    verdict = self.flush()
    self._pending = step, measured
    return verdict

  def flush(self) -> Verdict | None:
    """Judges the last step now; None if all is well."""
    if self._pending is None:
      return None
    (step, measured), self._pending = self._pending, None
    values = {
      name: float(value)
      for name, value in measured.items()
      if np.ndim(value) == 0
    }
    for name in ("nats", *values):  # the loss first
      if not (math.isfinite(values[name]) or loss_scale.may_overflow(values)):
        return self._nonfinite(step, name, values[name])
    nats, factor = values["nats"], self._settings.spike
    if factor and nats > factor * self._baseline:
      return Verdict(step, "spike", dict(nats=nats))
    return None

  def _nonfinite(self, step: int, name: str, value: float) -> Verdict:
    reason = f"{name} is {value} at step {step}"
    if self._settings.nonfinite == "stop":
      return Verdict(step, stop=reason)
    self._skipped.append(step)
    most = self._settings.max_skipped
    if self._skipped[-most - 1 :] == list(range(step - most, step + 1)):
      stop = (
        f"{reason}, after {most} batches in a row were skipped"
        f" (train.max_skipped={most})"
      )
    else:
      stop = None
    return Verdict(step, "skipped", dict(metric=name, value=str(value)), stop)
