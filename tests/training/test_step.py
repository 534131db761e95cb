"""Tests of sparse_transformer/training.py: schedule, optimizer, step, state."""

import functools
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparse_transformer import data
from sparse_transformer.training import metrics, step as training
from sparse_transformer.training.experiment import Experiment

REPO = pathlib.Path(__file__).parents[2]


def table(params, tokens_BL, key=None):
  """A network of one table: logits from the symbol before, 0 at first."""
  del key
  before_BL = jnp.pad(tokens_BL[:, :-1], ((0, 0), (1, 0)))
  return params["table"][before_BL] + params["bias"][None, None]


def table_state(optimizer, size=5):
  random = np.random.RandomState(0)
  params = {
    "table": jnp.asarray(random.randn(size, size), jnp.float32),
    "bias": jnp.asarray(random.randn(size), jnp.float32),
  }
  return training.State(
    jnp.zeros((), jnp.int32), params, optimizer.init(params), params
  )


def tokens(batch, length=7, size=5, seed=0):
  shape = batch, length
  return np.random.RandomState(seed).randint(0, size, shape).astype(np.uint8)


FOUR = tokens(4)


def stepper(config, apply=table):
  optimizer = training.make_optimizer(config)
  step = functools.partial(
    training.train_step, apply=apply, optimizer=optimizer, config=config
  )
  return optimizer, jax.jit(step)


def assert_same(tree, other):
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, tree, other)


# Schedule.


@pytest.mark.parametrize("warmup, steps", [(0, 10), (1, 2), (5, 20), (19, 20)])
def test_learning_rate_rises_linearly_then_falls_as_a_cosine(
  tiny, warmup, steps
):
  config = tiny({"optimizer.warmup_steps": warmup, "train.steps": steps})
  schedule, peak = training.make_schedule(config), 0.01
  for step in range(steps + 3):
    if step < warmup:
      expected = peak * step / warmup
    else:
      progress = min(1, (step - warmup) / (steps - warmup))
      expected = peak * 0.5 * (1 + math.cos(math.pi * progress))
    assert schedule(step) == pytest.approx(expected, rel=1e-5, abs=1e-9)
  assert schedule(warmup) == pytest.approx(peak)
  assert schedule(steps) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("warmup, steps", [(10, 10), (11, 10), (-1, 10)])
def test_warm_up_that_does_not_fit_is_an_error(tiny, warmup, steps):
  config = tiny({"optimizer.warmup_steps": warmup, "train.steps": steps})
  with pytest.raises(ValueError, match=f"steps={warmup} .*steps={steps}"):
    training.make_schedule(config)


def test_no_steps_need_no_schedule(tiny):
  config = tiny({"optimizer.warmup_steps": 5000, "train.steps": 0})
  assert training.make_schedule(config)(0) == 0
  with pytest.raises(ValueError, match="train.steps=-1 must be at least 0"):
    training.make_schedule(tiny({"train.steps": -1}))


# Optimizer.


def test_weights_decay_but_biases_gains_and_start_do_not(tiny):
  config = tiny({"model.num_layers": 2, "optimizer.weight_decay": 0.5})
  optimizer = training.make_optimizer(config)
  shapes = jax.eval_shape(Experiment(config).init).params
  params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
  zeros = jax.tree.map(np.zeros_like, params)

  @jax.jit
  def second_update():
    _, opt_state = optimizer.update(zeros, optimizer.init(params), params)
    return optimizer.update(zeros, opt_state, params)[0]  # the first rate is 0

  updates = second_update()
  seen = set()
  for path, update in jax.tree_util.tree_leaves_with_path(updates):
    name = jax.tree_util.keystr(path[-1:], simple=True)
    seen.add(name)
    decays = name in ("kernel", "embedding")
    np.testing.assert_allclose(update, -0.01 * 0.5 * decays, rtol=1e-6)
  assert seen == {"kernel", "embedding", "bias", "scale", "start"}
  assert params["blocks"]["attention_norm"]["scale"].shape == (2, 16)


@pytest.mark.parametrize("clip_norm", [0.01, 100.0])
def test_steps_follow_clipped_adamw_and_the_average_written_out(
  tiny, clip_norm
):
  config = tiny(
    {
      "optimizer.clip_norm": clip_norm,
      "optimizer.weight_decay": 0.3,
      "optimizer.beta1": 0.8,
      "optimizer.beta2": 0.95,
      "optimizer.epsilon": 1e-3,
      "optimizer.ema_decay": 0.25,
      "optimizer.warmup_steps": 2,
      "train.steps": 6,
    }
  )
  optimizer, step = stepper(config)
  state = table_state(optimizer)
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
  m = jax.tree.map(np.zeros_like, p)
  v, ema = jax.tree.map(np.zeros_like, p), p
  for t in range(5):
    batch = tokens(4, seed=t)

    def loss(params, batch=batch):
      return training.position_losses(table(params, batch), batch).mean()

    g = jax.grad(loss)(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), p))
    g = jax.tree.map(lambda x: np.asarray(x, np.float64), g)
    norm = math.sqrt(sum((x**2).sum() for x in g.values()))
    rate = float(training.make_schedule(config)(t))
    decay = min(0.25, (1 + t) / (10 + t))
    for name, gradient in g.items():
      gradient = gradient * min(1, clip_norm / norm)
      m[name] = 0.8 * m[name] + 0.2 * gradient
      v[name] = 0.95 * v[name] + 0.05 * gradient**2
      hat = m[name] / (1 - 0.8 ** (t + 1)), v[name] / (1 - 0.95 ** (t + 1))
      update = hat[0] / (np.sqrt(hat[1]) + 1e-3)
      update = update + 0.3 * (name == "table") * p[name]
      p = {**p, name: p[name] - rate * update}
      ema = {**ema, name: decay * ema[name] + (1 - decay) * p[name]}
    state, measured = step(state, batch)
    assert measured["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert measured["learning_rate"] == pytest.approx(rate)
    assert state.step == t + 1
    for name in p:
      np.testing.assert_allclose(state.params[name], p[name], atol=1e-5)
      np.testing.assert_allclose(state.ema[name], ema[name], atol=1e-5)


# Loss and step.


def test_loss_is_the_negative_log_probability_in_nats():
  random = np.random.RandomState(0)
  logits = random.randn(2, 3, 5).astype(np.float32)
  batch = tokens(2, 3)
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  expected = -np.log(np.take_along_axis(p, batch[..., None].astype(int), -1))
  losses = training.position_losses(jnp.asarray(logits), batch)
  np.testing.assert_allclose(losses, expected[..., 0], rtol=1e-5)
  half = training.position_losses(jnp.asarray(logits, jnp.bfloat16), batch)
  assert half.dtype == jnp.float32


def test_untrained_network_loses_the_log_of_the_vocabulary(tiny):
  experiment = Experiment(tiny())
  batch = np.stack([experiment.source.examples("train")[i] for i in range(3)])
  losses = experiment.losses(jax.jit(experiment.init)().params, batch)
  assert losses.shape == batch.shape
  np.testing.assert_allclose(losses, np.float32(math.log(17)), rtol=1e-7)


@pytest.fixture
def network(tiny):
  """(state after 2 steps, batch, step function by accumulation) of digits."""
  config = tiny({"train.batch_size": 8})
  experiment = Experiment(config)
  batches = data.batches(experiment.source.examples("train"), 8, seed=0)

  def step(accumulation):
    changed = tiny({"train.accumulation": accumulation})
    return stepper(changed, experiment.apply)[1]

  state, one = jax.jit(experiment.init)(), step(1)
  for i in range(2):
    state, _ = one(state, batches[i])
  return state, batches[2], step


def test_accumulation_gives_the_same_update(network):
  state, batch, step = network
  once, measured = step(1)(state, batch)
  again, measured_again = step(1)(state, batch)
  assert_same((once, measured), (again, measured_again))  # a pure function
  parts, measured_parts = step(4)(state, batch)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-5),
    (once, measured),
    (parts, measured_parts),
  )


def test_every_example_of_the_batch_counts_once_in_any_accumulation(tiny):
  batch = tokens(12)
  for accumulation in (1, 2, 3, 12):
    optimizer, step = stepper(tiny({"train.accumulation": accumulation}))
    state = table_state(optimizer)
    _, measured = step(state, batch)
    losses = training.position_losses(table(state.params, batch), batch)
    assert measured["nats"] == pytest.approx(float(losses.mean()), rel=1e-6)


def noise(params, tokens_BL, key):
  logits = jax.random.normal(key, (*tokens_BL.shape, 5))
  return logits + 0 * params["bias"][None, None]


def test_randomness_is_that_of_seed_and_step(tiny):
  steppers = {
    (seed, accumulation): stepper(
      tiny({"train.seed": seed, "train.accumulation": accumulation}), noise
    )
    for seed, accumulation in [(0, 1), (1, 1), (0, 2)]
  }

  def nats(seed, at, bias=0.0, accumulation=1, batch=FOUR):
    optimizer, step = steppers[seed, accumulation]
    state = table_state(optimizer)
    params = jax.tree.map(lambda x: x + bias, state.params)
    state = training.State(jnp.int32(at), params, state.opt_state, params)
    return float(step(state, batch)[1]["nats"])

  assert nats(0, 3) == nats(0, 3, bias=2.0)
  assert len({nats(0, 3), nats(0, 4), nats(1, 3), nats(1, 4)}) == 4
  # The two halves of a batch of equal examples draw noise of their own.
  equal = np.zeros((4, 7), np.uint8)
  key = jax.random.fold_in(jax.random.key(0), 3)
  halves = [
    training.position_losses(
      noise({"bias": jnp.zeros(5)}, equal[:2], part), equal[:2]
    ).mean()
    for part in jax.random.split(key, 2)
  ]
  assert halves[0] != halves[1]
  found = nats(0, 3, accumulation=2, batch=equal)
  assert found == pytest.approx(float(sum(halves)) / 2, rel=1e-5)


def test_a_few_steps_lower_the_loss_on_digits(tiny):
  config = tiny({"train.steps": 60, "train.batch_size": 16})
  experiment = Experiment(config)
  batches = data.batches(experiment.source.examples("train"), 16, seed=0)
  _, step = stepper(config, experiment.apply)
  state, losses = jax.jit(experiment.init)(), []
  for i in range(50):
    state, measured = step(state, batches[i])
    losses.append(float(measured["nats"]))
  assert losses[0] == pytest.approx(math.log(17), rel=1e-5)
  assert np.mean(losses[-5:]) < 2.2  # 2.83 at first


def test_initial_state_is_a_function_of_the_seed(tiny):
  states = [Experiment(tiny({"train.seed": s})).init() for s in (0, 0, 1)]
  assert_same(states[0], states[1])
  embeddings = [s.params["token"]["embedding"] for s in states]
  assert (embeddings[0] != embeddings[2]).any()
  assert_same(states[0].params, states[0].ema)
  pairs = zip(
    *map(jax.tree.leaves, (states[0].params, states[0].ema)), strict=True
  )
  assert all(p is not q for p, q in pairs)  # the state is donated
  assert isinstance(states[0].opt_state[1][0], optax.ScaleByAdamState)


# Devices.

DEVICES = """
import json, sys
import jax
from ml_collections import ConfigDict
from sparse_transformer.training import loop as train
from sparse_transformer.training import step as training

seen, plain = [], training.train_step

def train_step(state, tokens_BL, **kwargs):
  new, measured = plain(state, tokens_BL, **kwargs)
  jax.debug.inspect_array_sharding(
    tokens_BL, callback=lambda s: seen.append(s.shard_shape((8, 64)))
  )
  return new, measured

training.train_step = train_step
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
groups = json.loads(sys.argv[1])
config = ConfigDict({k: ConfigDict(v) for k, v in groups.items()})
state = train.train(config, sys.argv[2])
assert len(jax.devices()) == int(sys.argv[3])
rows = seen[0][0]
assert rows == 8 // len(jax.devices()), seen
for x in jax.tree.leaves(state):
  assert x.sharding.is_fully_replicated and len(x.sharding.device_set) > 1
"""


def test_run_on_several_devices_is_the_run_on_one(tiny, tmp_path):
  import train

  config = tiny(
    {
      "train.batch_size": 8,
      "train.accumulation": 2,
      "model.dropout": 0.1,
      "optimizer.warmup_steps": 1,
    }
  )
  runs = {}
  for count in (2, 4):
    flags = f"--xla_force_host_platform_device_count={count}"
    args = [json.dumps(config.to_dict()), str(tmp_path / str(count))]
    runs[count] = subprocess.Popen(
      [sys.executable, "-c", DEVICES, *args, str(count)],
      env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
      cwd=REPO,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
  train.train(config, tmp_path / "1")
  expected = metrics.read(tmp_path / "1")
  assert len(expected) == 5  # 4 steps and a validation
  for count, process in runs.items():
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    found = metrics.read(tmp_path / str(count))
    for line, other in zip(expected, found, strict=True):
      for name in line.keys() - {"tokens_per_second", "split"}:
        assert other[name] == pytest.approx(line[name], rel=1e-5), name
