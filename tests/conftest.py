"""Settings of the whole suite."""

import os
import shutil
import tempfile

# What one test has compiled, the others load: set here, before the workers
# start and before JAX reads it.
FOLDER = "JAX_COMPILATION_CACHE_DIR"
mine = FOLDER not in os.environ
if mine:
  os.environ[FOLDER] = tempfile.mkdtemp(prefix="compiled-")
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
  os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402
import pytest  # noqa: E402

# Silent broadcasting over a missing axis is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_unconfigure():
  if mine:
    shutil.rmtree(os.environ[FOLDER], ignore_errors=True)


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
