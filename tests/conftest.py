"""Settings for all tests."""

import ctypes
import gc
import itertools
import os
import pathlib
import shutil

import jax
import pytest

# For all workers and the processes that tests start. Small networks compile in
# half the time, to slower code, and each program is compiled once: the next run
# of the suite reads it from here.
CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(
  pathlib.Path(__file__).parents[1] / ".cache" / "tests"
)
if "PYTEST_XDIST_WORKER" not in os.environ:
  sizes = (path.stat().st_size for path in pathlib.Path(CACHE).rglob("*"))
  if sum(sizes) > 2**30:  # bytes: programs of older code, mostly
    shutil.rmtree(CACHE)
for name, value in (
  ("jax_disable_most_optimizations", True),
  ("jax_compilation_cache_dir", CACHE),
  ("jax_persistent_cache_min_compile_time_secs", 0),
):
  os.environ[name.upper()] = str(value)
  jax.config.update(name, value)
if jax.__version_info__ < (0, 11):
  # The older of its two ways to emit fusions, which later versions no longer
  # have, compiles them three times as fast.
  flags = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"
# A process with more memory maps than this drops its compiled programs. Each
# program has a few maps, and XLA crashes at Linux's limit of 65,530.
MAX_MAPS = 30_000
tests_done = itertools.count(1)
# Silent broadcasting over a missing axis raises.
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
  """Ignores what ml_collections raises when it loads a config file."""
  ignored = "ignore:the load_module:DeprecationWarning"
  config.addinivalue_line("filterwarnings", ignored)


def pytest_collection_finish():
  """Makes collections of garbage cheap: most objects are here to stay."""
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
  """The workdir of a run of 2 steps, which tests must not change."""
  from helpers import runs

  from sparse_transformer.training.loop import train

  workdir = tmp_path_factory.mktemp("trained")
  train(runs.tiny(**{"train.steps": 2}), workdir)
  return workdir


@pytest.fixture(scope="module")
def shared_experiments():
  """Runs with the same config and built-in data trace and compile once."""
  from sparse_transformer.training import loop

  made = {}
  plain = loop.Experiment

  def experiment(config):
    if config.data.path:  # whose contents may change
      return plain(config)
    new = plain(config)
    return made.setdefault(new.config, new)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop, "Experiment", experiment)
    yield


@pytest.fixture
def optimized():
  """Compiles with all optimizations, for fast paths and for memory."""
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def bounded_memory(request):
  """Drops compiled programs when they take too much memory.

  They stay on disk, so that a program that is needed again is not compiled
  again.
  """
  yield
  maps = pathlib.Path("/proc/self/maps")
  is_due = next(tests_done) % 16 == 0  # it takes a while to read
  is_due |= request.node.get_closest_marker("soak") is not None
  if is_due and maps.exists():
    if maps.read_bytes().count(b"\n") > MAX_MAPS:
      jax.clear_caches()
      gc.collect()
      ctypes.CDLL(None).malloc_trim(0)
