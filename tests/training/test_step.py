"""Tests of a training step: loss, update, accumulation, randomness."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import runs

from sparse_transformer import model as model_lib
from sparse_transformer.training import (
  optimizer as optimizer_lib,
  step as step_lib,
)
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.optimizer import make_optimizer

# A network that is a single table.


def table(params, tokens_BL, rng=None):
  """Logits from the previous symbol; 0 at the first position."""
  del rng
  before_BL = jnp.pad(tokens_BL[:, :-1], ((0, 0), (1, 0)))
  return params["table"][before_BL] + params["bias"][None, None]


def noise(params, tokens_BL, rng):
  logits = jax.random.normal(rng, (*tokens_BL.shape, 5))
  return logits + 0 * params["bias"][None, None]


def table_state(optimizer, size=5):
  random = np.random.RandomState(0)
  params = {
    "table": jnp.asarray(random.randn(size, size), jnp.float32),
    "bias": jnp.asarray(random.randn(size), jnp.float32),
  }
  return step_lib.State(
    step=jnp.int32(0),
    params=params,
    opt_state=optimizer.init(params),
    ema=params,
  )


def tokens(batch, length=7, size=5, seed=0):
  shape = batch, length
  return np.random.RandomState(seed).randint(0, size, shape).astype(np.uint8)


def stepper(apply=table, measure=lambda params: {}, **changes):
  """(config, optimizer, jitted step) for a network and what it measures."""
  config = runs.tiny(**changes)
  optimizer = make_optimizer(config)

  def predict(params, *inputs):
    return apply(params, *inputs), measure(params)

  step = functools.partial(
    step_lib.train_step,
    predict=predict,
    config=config,
  )
  return config, optimizer, jax.jit(step)


@functools.partial(jax.jit, static_argnames="apply")
def mean_loss(params, batch, apply=table, rng=None):
  return step_lib.position_losses(apply(params, batch, rng), batch).mean()


def test_loss_is_the_negative_log_probability_in_nats():
  logits = np.random.RandomState(0).randn(2, 3, 5).astype(np.float32)
  symbols = tokens(2, 3)
  losses = step_lib.position_losses(jnp.asarray(logits), symbols)
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  of_symbols = np.take_along_axis(p, symbols[..., None], axis=-1)[..., 0]
  np.testing.assert_allclose(losses, -np.log(of_symbols), rtol=1e-5)

  half = jnp.asarray(logits, jnp.bfloat16)
  assert step_lib.position_losses(half, symbols).dtype == jnp.float32


def float64(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.parametrize("clip_norm", [0.01, 100.0])
def test_steps_are_clipped_adamw_and_the_average_written_out(
  clip_norm, monkeypatch
):
  monkeypatch.setattr(optimizer_lib, "CLIP_NORM", clip_norm)
  monkeypatch.setattr(optimizer_lib, "EPSILON", 1e-3)
  settings = {
    "optimizer.learning_rate": 0.01,
    "optimizer.weight_decay": 0.3,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.95,
    "optimizer.ema_decay": 0.25,
    "optimizer.warmup_steps": 2,
    "train.steps": 6,
  }
  config, optimizer, step = stepper(**settings)
  state = table_state(optimizer)
  gradient = jax.jit(jax.grad(mean_loss))
  params = float64(state.params)
  ema = float64(state.params)
  mean = jax.tree.map(np.zeros_like, params)
  square = jax.tree.map(np.zeros_like, params)
  for t in range(5):
    batch = tokens(4, seed=t)
    gradients = float64(gradient(jax.tree.map(np.float32, params), batch))
    norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
    due = optimizer_lib.schedule(config)._replace(step=t)
    rate = float(optimizer_lib.rate(config.optimizer.schedule, due))
    ema_decay = min(0.25, (1 + t) / (10 + t))
    for name, g in gradients.items():
      g = g * min(1, clip_norm / norm)
      mean[name] = 0.8 * mean[name] + 0.2 * g
      square[name] = 0.95 * square[name] + 0.05 * g**2
      # Without the bias of the first steps.
      m = mean[name] / (1 - 0.8 ** (t + 1))
      v = square[name] / (1 - 0.95 ** (t + 1))
      update = m / (np.sqrt(v) + 1e-3)
      if name == "table":
        update += 0.3 * params[name]
      params[name] = params[name] - rate * update
      ema[name] = ema_decay * ema[name] + (1 - ema_decay) * params[name]

    state, measured = step(state, batch)
    assert measured["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert measured["learning_rate"] == pytest.approx(rate)
    assert state.step == t + 1
    for name in params:
      np.testing.assert_allclose(state.params[name], params[name], atol=1e-5)
      np.testing.assert_allclose(state.ema[name], ema[name], atol=1e-5)


def test_random_numbers_depend_only_on_seed_and_step():
  steppers = {}
  for seed, accumulation in [(0, 1), (1, 1), (0, 2)]:
    changes = {
      "train.seed": seed,
      "train.accumulation": accumulation,
    }
    steppers[seed, accumulation] = stepper(noise, **changes)
  batch = np.zeros((4, 7), np.uint8)

  def nats(seed, at, bias=0.0, accumulation=1):
    _, optimizer, step = steppers[seed, accumulation]
    state = table_state(optimizer)
    params = jax.tree.map(lambda x: x + bias, state.params)
    state = dataclasses.replace(
      state,
      step=jnp.int32(at),
      params=params,
    )
    return float(step(state, batch)[1]["nats"])

  assert nats(0, 3) == nats(0, 3, bias=2.0)
  assert len({nats(0, 3), nats(0, 4), nats(1, 3), nats(1, 4)}) == 4

  # Two micro-batches of equal examples draw different numbers.
  rng = jax.random.fold_in(jax.random.key(0), 3)
  params = {"bias": jnp.zeros(5)}
  first, second = (
    float(mean_loss(params, batch[:2], noise, part))
    for part in jax.random.split(rng, 2)
  )
  assert first != second
  both = nats(0, 3, accumulation=2)
  assert both == pytest.approx((first + second) / 2, rel=1e-5)


# The network of digits.

SETTINGS = {
  "train.steps": 60,
  "optimizer.learning_rate": 0.01,
}


@pytest.fixture(scope="module")
def trained():
  """(experiment, batches, step, first states, losses) of 30 steps."""
  experiment = Experiment(runs.tiny(**SETTINGS))
  batches = [np.asarray(experiment.batch(i)) for i in range(30)]
  step = jax.jit(experiment.train_step)
  state = jax.jit(experiment.init)()
  states = []
  losses = []
  for batch in batches:
    states = [*states, state][:4]
    state, measured = step(state, batch)
    losses.append(float(measured["nats"]))

  return experiment, batches, step, states, losses


def test_steps_lower_the_loss_and_are_functions_of_state_and_batch(trained):
  _, batches, step, states, losses = trained
  assert losses[0] == pytest.approx(math.log(17), rel=1e-5)
  assert np.mean(losses[-5:]) < 2.4
  state, measured = step(states[2], batches[2])
  assert runs.arrays(state) == runs.arrays(states[3])
  assert float(measured["nats"]) == losses[2]


def test_accumulation_gives_the_same_update(trained):
  _, batches, step, states, _ = trained
  config = runs.tiny(**SETTINGS | {"train.accumulation": 4})
  parts = jax.jit(Experiment(config).train_step)(states[2], batches[2])
  # The biases of keys have no gradient but rounding errors, which Adam divides
  # by their own size.
  close = functools.partial(np.testing.assert_allclose, atol=3e-5)
  jax.tree.map(close, parts, step(states[2], batches[2]))


def test_initial_state_is_a_function_of_the_seed_and_can_be_donated(trained):
  experiment, _, _, states, _ = trained
  first = states[0]
  same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
  same(jax.jit(experiment.init)(), first)
  same(first.params, first.ema)

  init = jax.jit(functools.partial(model_lib.init_params, experiment.model))
  same(init(jax.random.key(0)), first.params)
  embedding = init(jax.random.key(1))["token"]["embedding"]
  assert (embedding != first.params["token"]["embedding"]).any()

  places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(first)]
  assert len(set(places)) == len(places)


# Auxiliary losses.


def measure(params):
  """Losses of two blocks, and something other than a loss."""
  return dict(
    load_balance=jnp.stack([(params["table"] ** 2).sum(), params["bias"][0]]),
    router_z=(params["bias"][1:3] ** 2),
    expert_load=jnp.arange(6.0).reshape(2, 3),
  )


@pytest.mark.parametrize("accumulation", [1, 4])
def test_gradient_is_that_of_all_losses_and_nats_are_nats(accumulation):
  changes = {"train.accumulation": accumulation}
  _, optimizer, step = stepper(measure=measure, **changes)
  state = table_state(optimizer)
  params = state.params
  batch = tokens(8)

  def total(params):
    losses = measure(params)
    balance = losses["load_balance"].mean() / 100
    router = losses["router_z"].mean() / 1e3
    return mean_loss(params, batch) + balance + router

  _, measured = step(state, batch)
  norm = optax.tree.norm(jax.jit(jax.grad(total))(params))
  assert measured["gradient_norm"] == pytest.approx(float(norm), rel=1e-5)
  nats = float(mean_loss(params, batch))
  assert measured["nats"] == pytest.approx(nats, rel=1e-6)
  for name, values in measure(params).items():
    expected = values.mean(0) if values.ndim == 1 else values
    np.testing.assert_allclose(measured[name], expected, rtol=1e-6)
