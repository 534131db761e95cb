"""Settings of the whole suite."""

import jax
import pytest

# Silent broadcasting over a missing axis is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")


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


@pytest.fixture(scope="module")
def quick_compile():
  """Compiles in half the time to slower code: for tests of small networks."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
