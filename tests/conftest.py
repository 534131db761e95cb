"""Settings for all tests."""

import atexit
import os
import shutil
import tempfile

import jax
import pytest

# For this process and those that tests start. Small networks compile in half
# the time, to slower code, and each program is compiled once for all tests.
CACHE = tempfile.mkdtemp(prefix="compiled-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
for name, value in (
  ("jax_disable_most_optimizations", True),
  ("jax_compilation_cache_dir", CACHE),
  ("jax_persistent_cache_min_compile_time_secs", 0),
):
  os.environ[name.upper()] = str(value)
  jax.config.update(name, value)
# Silent broadcasting over a missing axis is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def optimized():
  """Compiles as outside tests, for tests of fast paths and of memory."""
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)
