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


def config(warmup, steps):
  return runs.tiny(
    **{
      "optimizer.warmup_steps": warmup,
      "train.steps": steps,
    }
    | {
      "optimizer.learning_rate": 0.01,
      "model.num_layers": 2,
    }
  )


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
  settings = config(warmup, steps)
  least = 0.0 if name == "constant" else 0.1
  settings.optimizer.update(
    schedule=name,
    minimum=least,
  )
  step = np.arange(steps + 3)
  found = rates(settings, step) / 0.01
  progress = np.clip((step - warmup) / (steps - warmup), 0, 1)
  share = dict(
    constant=np.ones(steps + 3),
    linear=1 - progress,
    cosine=(1 + np.cos(np.pi * progress)) / 2,
    wsd=np.minimum(1, (1 - progress) / optimizer_lib.DECAY),
  )
  falling = least + (1 - least) * share[name]
  expected = np.where(step < warmup, step / max(1, warmup), falling)

  np.testing.assert_allclose(
    found,
    expected,
    rtol=1e-5,
    atol=1e-7,
  )


def test_update_has_the_learning_rate_of_a_given_step():
  """Of both optimizers of Muon, and without a change of their state."""
  settings = config(2, 10)
  settings.update_from_flattened_dict(MUON)
  params = jax.tree.map(np.float32, weights(settings, 0))
  state = make_optimizer(settings).init(params)
  gradients = jax.tree.map(np.float32, weights(settings, 1))
  given = schedule(settings)

  def at(step):
    due = None if step is None else given._replace(step=jnp.int32(step))
    update = jax.jit(make_optimizer(settings, due).update)
    return update(gradients, state, params)

  (own, after), (peak, same), (half, _) = map(at, (None, 2, 1))

  assert not any(x.any() for x in jax.tree.leaves(own))
  jax.tree.map(np.testing.assert_array_equal, after, same)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
  jax.tree.map(lambda x, y: close(2 * x, y), half, peak)


def test_schedule_of_a_time_follows_the_clock_after_the_warm_up():
  settings = config(warmup=100, steps=1000)
  steps = ((0, 0.0), (50, 0.01), (100, 0.05), (800, 0.5), (5, 0.5), (9999, 0.9))

  def due(*at):
    return schedule(settings, *at).step

  found = [due(*at) for at in steps]

  # The third is at the peak; the fifth has warmed up for a tenth of the time.
  assert found == [0, 50, 100, 500, 500, 900]
  assert due(5, 0.05) == 50
  assert due(5, None) == -1  # by the number of updates
  assert rates(config(5000, 0), 0) == 0  # without steps, any will do


def test_weights_decay_but_nothing_else_does():
  settings = config(1, 10)
  changes = {
    "optimizer.weight_decay": 0.5,
    "model.experts": 4,
    "attention.pattern": "Routing(4, 8)",
    "model.sinks": True,
  }
  settings.update_from_flattened_dict(changes)
  optimizer = make_optimizer(settings)
  shapes = jax.eval_shape(Experiment(settings).init).params
  params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
  zeros = jax.tree.map(np.zeros_like, params)

  @jax.jit
  def second_update():
    _, opt_state = optimizer.update(zeros, optimizer.init(params), params)
    return optimizer.update(zeros, opt_state, params)[0]  # the first rate is 0

  seen = {}
  for path, update in jax.tree_util.tree_leaves_with_path(second_update()):
    name = jax.tree_util.keystr(path[-1:], simple=True)
    seen[name] = max(update.ndim, seen.get(name, 0))
    decays = name in ("kernel", "embedding")
    np.testing.assert_allclose(update, -0.01 * 0.5 * decays, rtol=1e-6)

  # Also where stacks of layers and experts give them two axes or more.
  axes = dict(
    kernel=4,
    embedding=2,
    bias=3,
    scale=2,
    start=1,
    sinks=2,
  )

  assert seen == axes | {"4": 4}  # of centroids
  matrices = optimizer_lib._block_matrices(shapes)
  assert matrices["centroids"]["4"] is matrices["sinks"] is None


MUON = {
  "optimizer.name": "muon",
  "optimizer.weight_decay": 0.1,
}


def weights(settings, seed):
  """Arrays of the shapes of a network's parameters."""
  random = np.random.RandomState(seed)
  shapes = jax.eval_shape(Experiment(settings).init).params
  return jax.tree.map(lambda x: random.randn(*x.shape), shapes)


def orthogonalized(x):
  """Five steps of the Newton-Schulz iteration of Muon, in float64."""
  flip = x.shape[0] > x.shape[1]
  x = (x.T if flip else x) / (np.linalg.norm(x) + 1e-8)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
  return x.T if flip else x


def nesterov(m, g, beta, t):
  """Momentum that looks ahead, without the bias of the first steps."""
  return beta * m / (1 - beta ** (t + 2)) + (1 - beta) * g / (
    1 - beta ** (t + 1)
  )


def test_muon_orthogonalizes_each_matrix_of_each_block_and_nothing_else(
  monkeypatch,
):
  settings = config(2, 10)
  settings.update_from_flattened_dict(MUON)
  monkeypatch.setattr(optimizer_lib, "CLIP_NORM", np.inf)
  settings.optimizer.beta1 = 0.8
  settings.optimizer.beta2 = 0.95
  optimizer = make_optimizer(settings)
  params = weights(settings, 0)
  state = optimizer.init(jax.tree.map(np.float32, params))
  update = jax.jit(optimizer.update)
  slow, fast, square = (jax.tree.map(np.zeros_like, params) for _ in range(3))
  for t in range(3):
    gradients = weights(settings, t + 1)
    found, state = update(jax.tree.map(np.float32, gradients), state, params)
    slow, fast, square = (
      jax.tree.map(
        lambda m, g, beta=beta, power=power: beta * m + (1 - beta) * g**power,
        *(average, gradients),
      )
      for average, beta, power in zip(
        (slow, fast, square), (0.95, 0.8, 0.95), (1, 1, 2), strict=True
      )
    )
    rate = float(rates(settings, t))
    orthogonal = set()
    arrays = map(jax.tree.leaves, (slow, fast, square, gradients, params))
    updates = jax.tree_util.tree_leaves_with_path(found)
    for (path, x), m, n, v, g, p in zip(updates, *arrays, strict=True):
      name = jax.tree_util.keystr(
        path,
        simple=True,
        separator=".",
      )
      if name.startswith("blocks") and name.endswith("kernel"):
        orthogonal.add(name)
        matrices = [orthogonalized(y) for y in nesterov(m, g, 0.95, t)]
        scale = 0.2 * np.sqrt(max(x.shape[1:]))
        expected = -rate * (scale * np.stack(matrices) + 0.1 * p)
      else:
        root = np.sqrt(v / (1 - 0.95 ** (t + 1))) + 1e-8
        expected = -rate * nesterov(n, g, 0.8, t) / root
      np.testing.assert_allclose(
        x,
        expected,
        rtol=2e-3,
        atol=2e-5,
      )
    assert len(orthogonal) == 6  # query, key, value, out, mlp_in, mlp_out

  assert num_updates(state) == 3


def test_muon_orthogonalizes_each_matrix_of_each_expert(monkeypatch):
  settings = config(0, 10)
  settings.update_from_flattened_dict(MUON)
  monkeypatch.setattr(optimizer_lib, "CLIP_NORM", np.inf)
  optimizer = make_optimizer(settings)
  random = np.random.RandomState(0)
  kernel, gradient = random.randn(2, 2, 3, 4, 6)  # layers, experts, D, F

  def tree(x):
    return {"expert_blocks": {"experts_in": {"kernel": np.float32(x)}}}

  params = tree(kernel)
  state = optimizer.init(params)
  found, _ = jax.jit(optimizer.update)(tree(gradient), state, params)
  ahead = nesterov(0.05 * gradient, gradient, 0.95, 0)
  expected = np.stack(
    [[orthogonalized(x) for x in experts] for experts in ahead]
  )
  expected = -0.01 * (0.2 * np.sqrt(6) * expected + 0.1 * kernel)
  (found,) = jax.tree.leaves(found)

  np.testing.assert_allclose(
    found,
    expected,
    rtol=2e-3,
    atol=2e-5,
  )
