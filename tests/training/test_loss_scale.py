"""Tests of loss scaling: float16 trains, skips, grows, resumes exactly."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import runs

from sparse_transformer.training.checkpoints.store import Saver
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.metrics import Monitor
from sparse_transformer.training.step import LossScale

SETTINGS = {
  "model.dtype": "float16",
  "optimizer.learning_rate": 0.01,
  "train.accumulation": 2,
  "train.steps": 60,
}


@functools.cache
def experiment(**changes):
  return Experiment(runs.tiny(**SETTINGS | changes))


@functools.cache
def update():
  return jax.jit(experiment().train_step)


def tokens(i):
  # Without a sharding, which would then be that of the next state.
  return np.asarray(experiment().batch(i))


def scaling(scale, finite=0, skipped=0):
  return LossScale(
    scale=jnp.float32(scale),
    finite=jnp.int32(finite),
    skipped=jnp.int32(skipped),
  )


def with_scale(state, scale, finite=0):
  return dataclasses.replace(state, loss_scale=scaling(scale, finite))


@pytest.fixture(scope="module")
def trained():
  """The state after 30 steps, and the losses of all of them."""
  state = jax.jit(experiment().init)()
  losses = []
  for i in range(30):
    state, measured = update()(state, tokens(i))
    losses.append(float(measured["nats"]))
  return state, losses


def same(tree, other):
  return runs.arrays(tree) == runs.arrays(other)


def numbers(scaling):
  return tuple(map(float, scaling))


# The rule.


@pytest.mark.parametrize(
  "before, loss, norm, after",
  [
    ((8, 5, 2), 1.0, 1.0, (8, 6, 2)),
    ((8, 1998, 2), 1.0, 1.0, (8, 1999, 2)),
    ((8, 1999, 2), 1.0, 1.0, (16, 0, 2)),
    ((2**24, 1999, 2), 1.0, 1.0, (2**24, 0, 2)),
    ((8, 5, 2), 1.0, math.inf, (4, 0, 3)),
    ((8, 1999, 2), 1.0, math.nan, (4, 0, 3)),
    ((1, 5, 2), 1.0, math.inf, (1, 0, 3)),
    ((8, 1999, 2), math.nan, math.nan, (8, 1999, 2)),
  ],
)
def test_scale_grows_after_finite_gradients_and_halves(
  before, loss, norm, after
):
  old = scaling(*before)
  new = old.after(jnp.float32(loss), jnp.float32(norm))
  assert numbers(new) == after
  assert [x.dtype for x in new] == [x.dtype for x in old]


# Steps.


def test_only_float16_has_a_scale():
  assert float(jax.jit(experiment().init)().loss_scale.scale) == 2**15
  other = experiment(**{"model.dtype": "bfloat16"})
  shapes = jax.eval_shape(other.init)
  assert shapes.loss_scale is None
  _, measured = jax.eval_shape(other.train_step, shapes, tokens(0))
  assert set(measured) == {"nats", "gradient_norm", "learning_rate"}


def test_float16_in_micro_batches_follows_float32_on_whole_ones(trained):
  state, losses = trained
  assert numbers(state.loss_scale) == (2**15, 30, 0)
  changes = {
    "model.dtype": "float32",
    "train.accumulation": 1,
  }
  plain = experiment(**changes)
  step = jax.jit(plain.train_step)
  state = jax.jit(plain.init)()
  expected = []
  for i in range(30):
    state, measured = step(state, tokens(i))
    expected.append(float(measured["nats"]))

  assert expected[-1] < expected[0] - 0.3
  np.testing.assert_allclose(losses, expected, rtol=5e-3)


def test_overflow_is_skipped_until_the_scale_fits(trained):
  state, _ = trained
  current = with_scale(state, 2**28, finite=7)
  batch = tokens(30)
  for skipped in range(20):
    new, measured = update()(current, batch)
    assert float(measured["loss_scale"]) == 2 ** (28 - skipped)
    if np.isfinite(measured["gradient_norm"]):
      break
    assert np.isfinite(measured["nats"])
    assert int(measured["skipped_steps"]) == skipped + 1
    assert numbers(new.loss_scale) == (2 ** (27 - skipped), 0, skipped + 1)
    for part in ("params", "opt_state", "ema"):
      assert same(getattr(new, part), getattr(current, part))
    current = new

  assert 1 < skipped < 19
  _, finite, of_state = numbers(new.loss_scale)
  assert finite == 1
  assert of_state == skipped
  assert not same(new.params, current.params)
  # The schedule counts updates, not steps.
  assert int(new.step) == 31 + skipped
  without_skips, _ = update()(state, batch)
  _, after_skips = update()(new, batch)
  _, after_none = update()(without_skips, batch)
  rate = float(after_skips["learning_rate"])
  assert rate == float(after_none["learning_rate"])
  assert rate < float(measured["learning_rate"])


# Runs.


def test_monitor_ignores_skips_until_the_scale_is_smallest():
  monitor = Monitor(np.zeros((16, 1)), lambda *_, **__: 0)
  overflow = dict(nats=1.0, gradient_norm=math.inf)
  for step, scale in enumerate(2.0 ** np.arange(15, -1, -1), start=1):
    monitor.watch(step, overflow | dict(loss_scale=scale))
  with pytest.raises(FloatingPointError, match="norm is inf at step 16"):
    monitor.flush()

  # A non-finite loss is a bad batch at any scale.
  bad_batch = dict(nats=math.nan, gradient_norm=1.0)
  monitor.watch(1, bad_batch | dict(loss_scale=8.0))
  with pytest.raises(FloatingPointError, match="nats is nan at step 1"):
    monitor.flush()


def test_state_is_restored_exactly_between_skips(trained, tmp_path):
  state = with_scale(trained[0], 2**28)
  for i in range(30, 33):
    state, _ = update()(state, tokens(i))
  skipped = int(state.loss_scale.skipped)
  first = int(state.step)
  plain = dataclasses.replace(
    state,
    step=state.step + 1,
    loss_scale=None,
  )
  with Saver(tmp_path, keep=9) as saver:
    saver.save(state)
    saver.save(plain)

  restore = saver.saved.restore
  like = experiment().like
  assert same(restore(like, first + 1), plain)
  # Evaluation may be in another dtype.
  in_float32 = restore(experiment(**{"model.dtype": "float32"}).like, first)
  assert in_float32.loss_scale is None
  assert same(in_float32.ema, state.ema)

  # Without a sharding, as `state`.
  other = jax.device_get(restore(like, first))
  for i in range(33, 40):
    state, _ = update()(state, tokens(i))
    other, _ = update()(other, tokens(i))
  assert same(state, other)
  assert 0 < skipped < int(state.loss_scale.skipped) < 10
