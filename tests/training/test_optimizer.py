"""Tests of the learning-rate schedule, and of which parameters decay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.optimizer import make_optimizer, make_schedule


def config(warmup, steps):
  return runs.tiny(
    **{"optimizer.warmup_steps": warmup, "train.steps": steps}
    | {"optimizer.learning_rate": 0.01}
  )


@pytest.mark.parametrize("warmup, steps", [(0, 10), (1, 2), (5, 20), (19, 20)])
def test_learning_rate_rises_linearly_then_falls_as_a_cosine(warmup, steps):
  found = make_schedule(config(warmup, steps))(jnp.arange(steps + 3))
  step = np.arange(steps + 3)
  rising = 0.01 * step / max(1, warmup)
  progress = np.clip((step - warmup) / (steps - warmup), 0, 1)
  falling = 0.01 * 0.5 * (1 + np.cos(np.pi * progress))
  expected = np.where(step < warmup, rising, falling)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("warmup, steps", [(10, 10), (11, 10)])
def test_warmup_that_does_not_fit_is_an_error(warmup, steps):
  with pytest.raises(ValueError, match=f"steps={warmup} .*steps={steps}"):
    make_schedule(config(warmup, steps))


def test_run_without_steps_accepts_any_warmup():
  assert make_schedule(config(5000, 0))(0) == 0


def test_weights_decay_but_biases_gains_and_the_start_vector_do_not():
  settings = config(1, 10)
  settings.optimizer.weight_decay = 0.5
  optimizer = make_optimizer(settings)
  shapes = jax.eval_shape(Experiment(settings).init).params
  params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
  zeros = jax.tree.map(np.zeros_like, params)

  @jax.jit
  def second_update():
    _, opt_state = optimizer.update(zeros, optimizer.init(params), params)
    return optimizer.update(zeros, opt_state, params)[0]  # the first rate is 0

  seen = set()
  for path, update in jax.tree_util.tree_leaves_with_path(second_update()):
    name = jax.tree_util.keystr(path[-1:], simple=True)
    seen.add(name)
    decays = name in ("kernel", "embedding")
    np.testing.assert_allclose(update, -0.01 * 0.5 * decays, rtol=1e-6)
  assert seen == {"kernel", "embedding", "bias", "scale", "start"}
  assert params["blocks"]["attention_norm"]["scale"].shape == (2, 16)
