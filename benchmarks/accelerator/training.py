"""Training steps of a config on random tokens, for several parts."""

import importlib

import jax
import numpy as np

from sparse_transformer.training.experiment import Experiment

# The paper's two kinds of attention, in networks that take seconds.
CUT = {
  "cifar10_15m": {"model.num_layers": 4, "train.batch_size": 4},
  "enwik8": {"model.num_layers": 2, "train.batch_size": 2},
}
SMALL = {
  "digits": {
    "model.num_layers": 2,
    "model.width": 32,
    "train.batch_size": 4,
    "model.dtype": "bfloat16",
  }
}


def load(name: str, **changes) -> Experiment:
  """The experiment of a file in configs/; changes are {"group.field": ...}."""
  config = importlib.import_module(f"configs.{name}").get_config()
  config.update_from_flattened_dict(changes)
  return Experiment(config)


def cut(small: bool) -> dict:
  """{name: experiment with few layers and a batch for each device}."""
  devices = jax.local_device_count()
  found = {}
  for name, changes in (SMALL if small else CUT).items():
    batch = changes["train.batch_size"] * devices
    found[name] = load(name, **changes | {"train.batch_size": batch})
  return found


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
  return {
    "failed": f"{len(unequal)} of {len(pairs)} arrays differ, by {largest:.2g}"
  }
