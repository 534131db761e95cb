"""Settings of the whole suite."""

import os

import jax
import pytest

# Silent broadcasting over a missing axis is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")
# Small networks: compiled in half the time, to slower code. In the processes
# that tests start, too.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def tiny():
  """Makes configs that train in seconds: tiny({"train.steps": 3})."""
  from configs import default

  def make(changes=None):
    config = default.get_config()
    config.update_from_flattened_dict(
      {
        "model.num_layers": 1,
        "model.num_heads": 2,
        "model.width": 16,
        "model.remat": "none",
        "attention.stride": 8,
        "attention.window": 8,
        "attention.width": 2,
        "optimizer.learning_rate": 0.01,
        "optimizer.warmup_steps": 1,
        "train.steps": 4,
        "train.batch_size": 4,
        "train.log_every": 1,
        "eval.batch_size": 8,
        "eval.sequences": 8,
      }
    )
    config.update_from_flattened_dict(changes or {})
    return config.lock()

  return make


@pytest.fixture
def optimized():
  """Compiles as a run does: for tests of fast paths and of memory."""
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)
