"""Training steps of a config on random tokens, and whether they repeat.

Here are the parts `determinism` (the same training twice gives the same bits,
as `correctness` shows for attention by itself) and `resume` (so does a run that
is stopped halfway and resumed).
"""

import functools
import importlib
import tempfile

import jax
import numpy as np

from benchmarks.accelerator.parts import Settings
from sparse_transformer.training.experiment import Experiment

STEPS = 20
# The paper's two kinds of attention, in networks that take seconds.
CUT = {
  "cifar10_15m": {"model.num_layers": 4, "train.batch_size": 4},
  "enwik8": {"model.num_layers": 2, "train.batch_size": 2},
}
SMALL = {"digits": {"model.num_layers": 2, "train.batch_size": 4}}
SMALL["digits"] |= {"model.width": 32, "model.dtype": "bfloat16"}


def load(name: str, **changes) -> Experiment:
  """The experiment of a file in configs/; changes are {"group.field": ...}."""
  config = importlib.import_module(f"configs.{name}").get_config()
  config.update_from_flattened_dict(changes)
  return Experiment(config)


def determinism(settings: Settings, rank: int) -> dict:
  return _entries(settings, rank, f"{STEPS} steps, ", Experiment.first_state)


def resume(settings: Settings, rank: int) -> dict:
  return _entries(settings, rank, "", _restored)


def _entries(settings, rank, title, again):
  """One for each network with few layers and a batch for each device."""
  found, networks = {}, SMALL if settings.small else CUT
  for name, changes in networks.items() if rank == 0 else ():
    batch = changes["train.batch_size"] * jax.local_device_count()
    experiment = load(name, **changes | {"train.batch_size": batch})
    found[title + name] = functools.partial(_train_twice, experiment, again)
  return found


def _train_twice(experiment, again, record):
  """Trains at once, and again from the state that `again` returns."""
  del record
  expected = advance(experiment, experiment.first_state(), STEPS)
  found = advance(experiment, again(experiment), STEPS)
  return {"steps": STEPS} | difference(expected, found)


def _restored(experiment):
  """The state of a run that is halfway, read from its checkpoint."""
  from sparse_transformer.training.checkpoints.store import Checkpoints

  with tempfile.TemporaryDirectory() as folder:
    with Checkpoints(folder, keep=1) as checkpoints:
      checkpoints.save(
        advance(experiment, experiment.first_state(), STEPS // 2)
      )
      checkpoints.finish()
      return checkpoints.restore(experiment.like)


def random_tokens(experiment: Experiment, step: int) -> jax.Array:
  """A batch that depends on the step alone."""
  model, settings = experiment.model, experiment.config.train
  tokens_BL = np.random.default_rng(step).integers(
    model.vocab_size, size=(settings.batch_size, model.length), dtype=np.uint8
  )
  return jax.device_put(tokens_BL, experiment.batch_sharding)


def advance(experiment: Experiment, state, last: int):
  """The state at step `last`; compiles again, as a resumed run does."""
  jax.clear_caches()
  with jax.set_mesh(experiment.mesh):
    for step in range(int(state.step), last):
      state, _ = experiment.update(state, random_tokens(experiment, step))
  return state


def difference(state, other) -> dict:
  """{} if all bits of two states are equal, else why not."""
  leaves = [jax.tree.leaves(jax.device_get(x)) for x in (state, other)]
  pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(*leaves, strict=True)]
  unequal = [(a, b) for a, b in pairs if a.tobytes() != b.tobytes()]
  if not unequal:
    return {}
  largest = max(
    float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
    for a, b in unequal
  )
  number = f"{len(unequal)} of {len(pairs)}"
  return {"failed": f"{number} arrays differ, by {largest:.2g}"}
