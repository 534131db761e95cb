"""Tests of the monitor: its verdict on each step, and when it is given."""

import math

import pytest
import runs

from sparse_transformer.training.monitor import Monitor, Verdict


def settings(**changes):
  return runs.tiny(**{f"train.{k}": v for k, v in changes.items()}).train


def watch(monitor, losses, first=1):
  """The verdict on each step, with a gradient norm of 1 unless it is given."""
  verdicts = []
  for step, loss in enumerate(losses, first):
    nats, norm = loss if isinstance(loss, tuple) else (loss, 1.0)
    verdicts.append(monitor.watch(step, dict(gradient_norm=norm, nats=nats)))
  return [*verdicts[1:], monitor.flush()]


def test_metrics_of_a_step_are_read_when_the_next_one_is_dispatched():
  class Unread:
    def __float__(self):
      raise AssertionError("the device would have to wait")

  monitor = Monitor(settings())
  assert monitor.watch(1, dict(nats=math.nan)) is None
  verdict = monitor.watch(2, dict(nats=Unread()))
  assert verdict.step == 1 and "nats is nan at step 1" in verdict.stop


def test_a_step_is_judged_once():
  monitor = Monitor(settings())
  monitor.watch(1, dict(nats=math.inf))
  assert monitor.flush().stop == "nats is inf at step 1"
  assert monitor.flush() is None


@pytest.mark.parametrize("spike, expected", [(2.0, [3, 5]), (0.0, [])])
def test_spike_is_relative_to_the_last_logged_loss(spike, expected):
  lines = [dict(step=1, split="train", nats=1.0)]
  monitor = Monitor(settings(spike=spike), lines)
  verdicts = watch(monitor, [1.9, 2.1], first=2)
  monitor.logged(2.1)
  verdicts += watch(monitor, [4.1, 4.3], first=4)[1:]
  found = [verdict for verdict in verdicts if verdict]
  assert [verdict.step for verdict in found] == expected
  for verdict in found:
    assert verdict.split == "spike" and verdict.stop is None


def test_first_steps_of_a_run_are_not_spikes():
  assert watch(Monitor(settings()), [100.0, 1000.0]) == [None, None]


def test_nonfinite_loss_is_named_before_the_gradient():
  (verdict,) = watch(Monitor(settings()), [(math.inf, math.nan)])
  assert verdict == Verdict(1, stop="nats is inf at step 1")
  (verdict,) = watch(Monitor(settings()), [(1.0, math.nan)])
  assert verdict == Verdict(1, stop="gradient_norm is nan at step 1")


@pytest.mark.parametrize("most", [0, 1, 3])
def test_too_many_skipped_batches_in_a_row_end_the_run(most):
  choices = settings(nonfinite="skip", max_skipped=most)
  bad = [math.nan] * most
  *verdicts, last = watch(Monitor(choices), [*bad, 1.0, *bad, math.nan])
  assert all(verdict.stop is None for verdict in verdicts if verdict)
  assert [v.split for v in verdicts if v] == ["skipped"] * 2 * most
  assert f"at step {2 * most + 2}, after {most} batches in a row" in last.stop
  assert last.split == "skipped"
  assert last.values == dict(metric="nats", value="nan")


def test_batches_skipped_before_a_restart_count():
  choices = settings(nonfinite="skip", max_skipped=2)
  lines = [dict(step=step, split="skipped") for step in (4, 5)]
  (verdict,) = watch(Monitor(choices, lines), [math.nan], first=6)
  assert "after 2 batches in a row" in verdict.stop
  (verdict,) = watch(Monitor(choices, lines), [math.nan], first=7)
  assert verdict.stop is None
