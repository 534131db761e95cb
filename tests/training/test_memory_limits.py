"""Tests of the limits of memory, against the programs that XLA compiles."""

import functools

import jax
import jax.numpy as jnp
import pytest
import runs

from sparse_transformer import machine, model as model_lib
from sparse_transformer.model.kv_cache import Decoder
from sparse_transformer.training.analysis import memory_limits
from sparse_transformer.training.experiment import Experiment


def network(**changes):
  config = runs.tiny(**{"model.num_layers": 3} | changes)
  return config, Experiment(config).model


def bounds(check, *args, **kwargs):
  """The most memory of a device that `check` would reject."""
  sizes = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      memory_limits, "_check_fits", lambda what, size, *_: sizes.append(size)
    )
    check(*args, **kwargs)
  return max(sizes)


def taken(held, function, *inputs):
  """Bytes of a compiled program, with those that are held while it runs."""
  memory = function.lower(*inputs).compile().memory_analysis()
  new = memory.output_size_in_bytes - memory.alias_size_in_bytes
  return held + memory.temp_size_in_bytes + new


def abstract_run(**changes):
  """(config, experiment, state, its bytes, tokens), without data."""
  config, model = network(**changes)
  experiment = Experiment(config)
  state = jax.eval_shape(experiment.init)
  held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  tokens = jax.ShapeDtypeStruct((8, model.length), jnp.uint8)
  return config, experiment, state, held, tokens


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_memory_bound_of_a_network_is_its_state(name):
  changes = {"optimizer.name": name, "model.num_layers": 2, "model.width": 64}
  config, experiment, _, held, _ = abstract_run(**changes)
  _, _, found = memory_limits._sizes(config, experiment.source)
  assert 0.95 * held < found <= held


def test_memory_bound_of_evaluation_is_below_that_of_the_program(optimized):
  changes = {"model.num_layers": 1, "attention.pattern": "dense"}
  config, experiment, state, held, tokens = abstract_run(**changes)
  found = bounds(memory_limits.check_inference, config, experiment.source, 8)
  assert held < found < taken(held, experiment.losses, state.params, tokens)


@pytest.mark.soak
@pytest.mark.parametrize(
  "changes",
  [
    {"model.num_layers": 1, "attention.pattern": "dense"},
    {"model.num_layers": 4, "model.remat": "block"},
    {"model.dtype": "bfloat16", "model.half_size": True},
    {"train.accumulation": 4},
  ],
)
def test_memory_bound_of_training_is_below_that_of_the_program(
  changes, optimized
):
  config, experiment, state, held, tokens = abstract_run(**changes)
  config.eval.batch_size = 1
  found = bounds(memory_limits.check_training, config, experiment.source)
  step = jax.jit(experiment.step, donate_argnums=0)
  assert held < found < taken(held, step, state, tokens)


def test_memory_bound_of_sampling_counts_the_cache():
  config, model = network()
  decoder = Decoder(model)
  bound = functools.partial(
    bounds, memory_limits.check_inference, config, Experiment(config).source
  )
  one, many = (bound(n, cache=decoder.num_bytes(1)) for n in (1, 1001))
  cache = decoder.num_bytes(1000)
  assert cache < many - one < 1.1 * cache


def test_initial_weights_need_neither_gradients_nor_a_batch():
  config = runs.tiny(**{"train.steps": 0, "train.batch_size": 10**9})
  memory_limits.check_training(config, Experiment(config).source)


def test_copy_for_a_checkpoint_must_fit_in_the_memory_of_the_host(monkeypatch):
  config, model = network()
  state = 16 * model_lib.count_parameters(model)
  monkeypatch.setattr(machine, "memory", lambda: state * 3 // 2)
  with pytest.raises(ValueError, match="parameters .* but this machine has"):
    memory_limits.check_training(config, Experiment(config).source)
