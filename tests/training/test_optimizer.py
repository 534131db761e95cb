"""Tests of the learning-rate schedule and of weight decay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import runs

from sparse_transformer.training import optimizer as optimizer_lib
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.optimizer import (
  make_optimizer,
  num_updates,
  schedule,
)

MUON = {
  "optimizer.name": "muon",
  "optimizer.weight_decay": 0.1,
}


def config(warmup, steps, **changes):
  settings = {
    "optimizer.warmup_steps": warmup,
    "optimizer.learning_rate": 0.01,
    "train.steps": steps,
    "model.num_layers": 2,
  }
  return runs.tiny(**settings | changes)


def rates(settings, step):
  """The learning rates of steps, without a time limit."""
  due = schedule(settings)._replace(step=jnp.asarray(step))
  return optimizer_lib.rate(settings.optimizer.schedule, due)


@pytest.mark.parametrize(
  "warmup, steps",
  [
    (0, 10),
    (1, 2),
    (10, 60),
    (19, 20),
  ],
)
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_rates_rise_and_stay_or_fall_to_their_minimum(name, warmup, steps):
  least = 0.0 if name == "constant" else 0.1
  changes = {
    "optimizer.schedule": name,
    "optimizer.minimum": least,
  }
  step = np.arange(steps + 3)
  found = rates(config(warmup, steps, **changes), step) / 0.01
  progress = np.clip((step - warmup) / (steps - warmup), 0, 1)
  share = dict(
    constant=np.ones(steps + 3),
    linear=1 - progress,
    cosine=(1 + np.cos(np.pi * progress)) / 2,
    wsd=np.minimum(1, (1 - progress) / optimizer_lib.DECAY),
  )
  rising = step / max(1, warmup)
  falling = least + (1 - least) * share[name]
  expected = np.where(step < warmup, rising, falling)
  np.testing.assert_allclose(
    found,
    expected,
    rtol=1e-5,
    atol=1e-7,
  )


def test_update_has_the_learning_rate_of_a_given_step():
  """Of both optimizers of Muon, and without a change of their state."""
  settings = config(2, 10, **MUON)
  params = jax.tree.map(np.float32, weights(settings, 0))
  gradients = jax.tree.map(np.float32, weights(settings, 1))
  state = make_optimizer(settings).init(params)

  def update(due=None):
    optimizer = make_optimizer(settings, due)
    return jax.jit(optimizer.update)(gradients, state, params)

  def at(step):
    return schedule(settings)._replace(step=jnp.int32(step))

  own, after = update()
  peak, same = update(at(2))
  half, _ = update(at(1))
  assert not any(x.any() for x in jax.tree.leaves(own))
  jax.tree.map(np.testing.assert_array_equal, after, same)
  twice = jax.tree.map(lambda x: 2 * x, half)
  same_rate = functools.partial(np.testing.assert_allclose, rtol=1e-5)
  jax.tree.map(same_rate, twice, peak)


def test_schedule_of_a_time_follows_the_clock_after_the_warm_up():
  settings = config(warmup=100, steps=1000)

  def due(updates, share):
    return schedule(settings, updates, share).step

  assert due(0, 0.0) == 0
  assert due(50, 0.01) == 50
  assert due(100, 0.05) == 100  # at the peak
  assert due(800, 0.5) == 500
  assert due(5, 0.5) == 500  # it has warmed up for a tenth of the time
  assert due(9999, 0.9) == 900
  assert due(5, 0.05) == 50
  assert due(5, None) == -1  # by the number of updates
  assert rates(config(5000, 0), 0) == 0  # without steps, any will do


def test_weights_decay_but_nothing_else_does():
  changes = {
    "optimizer.weight_decay": 0.5,
    "model.experts": 4,
    "attention.pattern": "Routing(4, 8)",
    "model.sinks": True,
  }
  settings = config(1, 10, **changes)
  optimizer = make_optimizer(settings)
  shapes = jax.eval_shape(Experiment(settings).init).params
  params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
  zeros = jax.tree.map(np.zeros_like, params)

  @jax.jit
  def second_update():
    _, opt_state = optimizer.update(zeros, optimizer.init(params), params)
    return optimizer.update(zeros, opt_state, params)[0]  # the first rate is 0

  axes = {}
  for path, update in jax.tree_util.tree_leaves_with_path(second_update()):
    name = jax.tree_util.keystr(path[-1:], simple=True)
    axes[name] = max(update.ndim, axes.get(name, 0))
    decay = 0.5 if name in ("kernel", "embedding") else 0
    np.testing.assert_allclose(update, -0.01 * decay, rtol=1e-6)

  # Also where stacks of layers and experts give them two axes or more.
  assert axes == {
    "kernel": 4,
    "embedding": 2,
    "bias": 3,
    "scale": 2,
    "start": 1,
    "sinks": 2,
    "4": 4,  # centroids
  }
  matrices = optimizer_lib._block_matrices(shapes)
  assert matrices["centroids"]["4"] is None
  assert matrices["sinks"] is None


def weights(settings, seed):
  """Arrays of the shapes of a network's parameters."""
  random = np.random.RandomState(seed)
  shapes = jax.eval_shape(Experiment(settings).init).params
  return jax.tree.map(lambda x: random.randn(*x.shape), shapes)


def orthogonalized(x):
  """Five steps of the Newton-Schulz iteration of Muon, in float64.

  Of each matrix, in the last two axes.
  """
  if x.ndim > 2:
    return np.stack([orthogonalized(matrix) for matrix in x])
  if x.shape[0] > x.shape[1]:
    return orthogonalized(x.T).T
  x = x / (np.linalg.norm(x) + 1e-8)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
  return x


def nesterov(m, g, beta, t):
  """Momentum that looks ahead, without the bias of the first steps."""
  ahead = beta * m / (1 - beta ** (t + 2))
  return ahead + (1 - beta) * g / (1 - beta ** (t + 1))


close = functools.partial(
  np.testing.assert_allclose,
  rtol=2e-3,
  atol=2e-5,
)


def average(means, values, decay):
  """Exponential averages of the arrays of a tree."""
  return jax.tree.map(lambda m, x: decay * m + (1 - decay) * x, means, values)


def is_block_matrix(path):
  name = jax.tree_util.keystr(
    path,
    simple=True,
    separator=".",
  )
  return name.startswith("blocks") and name.endswith("kernel")


def test_muon_orthogonalizes_each_matrix_of_each_block_and_nothing_else(
  monkeypatch,
):
  monkeypatch.setattr(optimizer_lib, "CLIP_NORM", np.inf)
  betas = {
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.95,
  }
  settings = config(2, 10, **MUON | betas)
  optimizer = make_optimizer(settings)
  update = jax.jit(optimizer.update)
  params = weights(settings, 0)
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  # query, key, value, out, mlp_in, mlp_out
  assert sum(map(is_block_matrix, paths)) == 6

  def updates(t):
    """A function that gives the update of step t of an array."""

    def update_of(path, slow, fast, square, g, p):
      if is_block_matrix(path):
        direction = orthogonalized(nesterov(slow, g, 0.95, t))
        change = 0.2 * np.sqrt(max(p.shape[1:])) * direction + 0.1 * p
      else:
        root = np.sqrt(square / (1 - 0.95 ** (t + 1))) + 1e-8
        change = nesterov(fast, g, 0.8, t) / root
      return -float(rates(settings, t)) * change

    return update_of

  state = optimizer.init(jax.tree.map(np.float32, params))
  zeros = jax.tree.map(np.zeros_like, params)
  slow, fast, square = zeros, zeros, zeros
  for t in range(3):
    gradients = weights(settings, t + 1)
    slow = average(slow, gradients, 0.95)
    fast = average(fast, gradients, 0.8)
    square = average(square, jax.tree.map(np.square, gradients), 0.95)
    found, state = update(jax.tree.map(np.float32, gradients), state, params)
    expected = jax.tree_util.tree_map_with_path(
      updates(t), slow, fast, square, gradients, params
    )
    jax.tree.map(close, found, expected)

  assert num_updates(state) == 3


def test_muon_orthogonalizes_each_matrix_of_each_expert(monkeypatch):
  monkeypatch.setattr(optimizer_lib, "CLIP_NORM", np.inf)
  optimizer = make_optimizer(config(0, 10, **MUON))
  random = np.random.RandomState(0)
  kernel, gradient = random.randn(2, 2, 3, 4, 6)  # layers, experts, D, F

  def tree(x):
    return {"expert_blocks": {"experts_in": {"kernel": np.float32(x)}}}

  params = tree(kernel)
  state = optimizer.init(params)
  updates, _ = jax.jit(optimizer.update)(tree(gradient), state, params)
  (found,) = jax.tree.leaves(updates)
  ahead = nesterov(0.05 * gradient, gradient, 0.95, 0)
  update = 0.2 * np.sqrt(6) * orthogonalized(ahead) + 0.1 * kernel
  close(found, -0.01 * update)
