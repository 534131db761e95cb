"""Tests of the monitor: what it says of each step, and when it is said."""

import math

import numpy as np
import pytest

from sparse_transformer.training.metrics import Monitor


def make():
  """A monitor, and the list of what it notes; batches have one example."""
  noted = []

  def note(step, split, **values):
    noted.append((step, split, values))

  return Monitor(np.arange(99)[:, None] + 100, note), noted


def watch(monitor, losses, first=1):
  for step, loss in enumerate(losses, first):
    nats, norm = loss if isinstance(loss, tuple) else (loss, 1.0)
    monitor.watch(
      step,
      dict(
        gradient_norm=norm,
        nats=nats,
      ),
    )

  monitor.flush()


def test_metrics_of_a_step_are_read_when_the_next_one_is_dispatched():
  class Unread:
    def __float__(self):
      raise AssertionError("the device would have to wait")

  monitor, _ = make()
  monitor.watch(1, dict(nats=math.nan))
  with pytest.raises(FloatingPointError, match="nats is nan at step 1"):
    monitor.watch(2, dict(nats=Unread()))


def test_nonfinite_loss_is_named_once_and_before_the_gradient():
  monitor, noted = make()
  with pytest.raises(FloatingPointError, match="^nats is inf at .* 1; .* 100$"):
    watch(monitor, [(math.inf, math.nan)])
  with pytest.raises(FloatingPointError, match="^gradient_norm is nan at step"):
    watch(monitor, [(1.0, math.nan)])
  assert [split for _, split, _ in noted] == ["diverged"] * 2
