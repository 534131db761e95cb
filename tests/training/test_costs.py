"""Tests of the costs of a step, against the program that JAX traces."""

import dataclasses
import functools
import math
import re
import time

import jax
import jax.numpy as jnp
import pytest
import runs
from jax.extend import core

from sparse_transformer import machine, model as model_lib, rules
from sparse_transformer.model.kv_cache import Decoder
from sparse_transformer.training import costs, step as step_lib
from sparse_transformer.training.experiment import Experiment


def network(**changes):
  config = runs.tiny(**{"model.num_layers": 3} | changes)
  return config, Experiment(config).model


def programs(value):
  """All programs among the parameters of an equation."""
  for leaf in jax.tree.leaves(value, is_leaf=is_program):
    if is_program(leaf):
      yield leaf


def is_program(value):
  return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def matmuls(program, times=1):
  """(whether it uses weights, FLOPs, bytes) of each matmul in a program.

  Those of attention have a matrix for each sequence and head.
  """
  for eqn in program.eqns:
    for inner in programs(eqn.params):
      repeats = times * eqn.params.get("length", 1)  # length of a scan
      yield from matmuls(getattr(inner, "jaxpr", inner), repeats)
    if eqn.primitive.name == "dot_general":
      (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
      left, right, out = (x.aval for x in (*eqn.invars, *eqn.outvars))
      depth = math.prod(left.shape[axis] for axis in contracted)
      moved = sum(x.size * x.dtype.itemsize for x in (left, right, out))
      flops = 2 * depth * math.prod(out.shape)
      yield not batched, times * flops, times * moved


def traced(model, batch):
  """(FLOPs, bytes) of weights and (FLOPs, bytes) of attention in a step."""
  apply = model_lib.make_apply(model)

  def loss(params, tokens_BL):
    return step_lib.position_losses(apply(params, tokens_BL), tokens_BL).mean()

  program = jax.make_jaxpr(jax.grad(loss))(
    jax.eval_shape(lambda: model_lib.init_params(model, 0)),
    jax.ShapeDtypeStruct((batch, model.length), jnp.uint8),
  )
  found = list(matmuls(program.jaxpr))
  return tuple(
    tuple(sum(row[i] for row in found if row[0] == kind) for i in (1, 2))
    for kind in (True, False)
  )


@pytest.mark.parametrize("remat", rules.REMATS)
@pytest.mark.parametrize(
  "half_size, dtype", [(False, "float32"), (True, "bfloat16")]
)
def test_flops_and_traffic_match_the_traced_program(remat, half_size, dtype):
  config, model = network(
    **{
      "model.half_size": half_size,
      "model.dtype": dtype,
      "model.remat": remat,
      "attention.pattern": "dense",
      "attention.backend": "streamed",
      "attention.tile": 64,  # one tile: all n x n pairs are computed
    }
  )
  pairs = 64**2 * model.num_layers * model.num_heads
  report = costs.step(config, model, pairs)
  (flops, moved), (attention, _) = traced(model, config.train.batch_size)
  assert moved == report["bytes"]["weights"]
  assert flops + attention == report["flops"]["total"]
  assert flops == costs.step(config, model, 0)["flops"]["total"]


@pytest.mark.parametrize("half_size", [False, True])
def test_every_weight_takes_6_flops_per_token(half_size):
  config, model = network(**{"model.half_size": half_size})
  params = jax.eval_shape(lambda: model_lib.init_params(model, 0))
  sizes = [x.size for x in jax.tree.leaves(params["blocks"]) if x.ndim == 3]
  weights = sum(sizes) + params["logits"]["kernel"].size
  flops = costs.step(config, model, 0)["flops"]
  assert flops["weights"] == flops["total"] == 6 * weights * 8 * 64


def test_model_flops_count_what_is_needed_and_no_more():
  config, model = network(
    **{"model.remat": "block", "attention.pattern": "dense"}
  )
  pairs = 3 * 2 * 64 * 65 // 2
  assert costs.count_pairs(model) == pairs
  weights = costs.step(config, model, 0)["flops"]["weights"]
  # PaLM, appendix B: 12 L H Q T per token, here with half of T.
  expected = weights + 12 * 3 * 2 * 8 * (64 + 1) / 2 * 64 * 8
  assert costs.model_flops(config, model) == expected
  for remat in rules.REMATS:
    way = dataclasses.replace(model, remat=remat)
    assert costs.model_flops(config, way) == expected


def test_utilization_is_logged_where_the_peak_is_known(monkeypatch):
  assert costs.speed(0.0, 1e6) == {}
  expected = dict(tokens_per_second=50.0, model_flops_per_second=5e7)
  assert costs.speed(50.0, 1e6) == expected
  monkeypatch.setitem(costs.PEAK_FLOPS, jax.devices()[0].device_kind, 2e8)
  assert costs.speed(50.0, 1e6) == expected | dict(mfu=0.25)
  monkeypatch.setattr(jax, "local_devices", lambda: jax.devices() * 5)
  assert costs.speed(50.0, 1e6) == expected | dict(mfu=0.05)


def test_each_additional_layer_keeps_its_input():
  """With model.remat=block that is one activation, counted to the byte."""
  config, model = network(**{"model.num_layers": 2, "model.remat": "block"})
  deep = dataclasses.replace(model, num_layers=6, patterns=model.patterns * 3)
  few, many = (costs.memory(config, m)["activations"] for m in (model, deep))
  assert many - few == 4 * 8 * 64 * 16 * jnp.dtype(jnp.float32).itemsize


def test_rematerialization_keeps_less_and_recomputes_more():
  config, model = network(**{"model.num_layers": 4, "model.remat": "block"})
  pairs = costs.count_pairs(model)
  report = costs.rematerialization(config, model, pairs)
  ways = [report[name] for name in rules.REMATS]
  kept = [way["activations"] for way in ways]
  assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)
  repeated = [way["recomputed"] for way in ways]
  assert repeated == sorted(repeated) and repeated[0] == ways[0]["layer"] == 0
  # All matmuls of a block but the last, and the forward pass of attention.
  again = 4 * 16 * 16 * 4 + 4 * 16 * 64
  assert repeated[-1] == 2 * 8 * 64 * again + 2 * 16 * pairs * 8
  memory = costs.memory(config, model)
  assert memory["activations"] == report["block"]["activations"]
  assert memory["layer"] == report["block"]["layer"]


def test_accumulation_keeps_a_micro_batch_and_a_sum_of_gradients():
  (whole, model), (half, _) = (
    network(**{"train.accumulation": micro}) for micro in (1, 2)
  )
  once, twice = (costs.memory(config, model) for config in (whole, half))
  assert once["activations"] == 2 * twice["activations"]
  assert twice["gradients"] == 2 * once["gradients"]
  assert costs.step(whole, model, 7) == costs.step(half, model, 7)


# Memory that a run needs at least.


def bounds(check, *args, **kwargs):
  """The most memory of a device that `check` would reject."""
  sizes = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      costs, "_check_fits", lambda what, size, *_: sizes.append(size)
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


def test_memory_bound_of_evaluation_is_below_that_of_the_program(optimized):
  changes = {"model.num_layers": 1, "attention.pattern": "dense"}
  config, experiment, state, held, tokens = abstract_run(**changes)
  found = bounds(costs.check_inference_memory, config, experiment.source, 8)
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
  found = bounds(costs.check_training_memory, config, experiment.source)
  step = jax.jit(experiment.step, donate_argnums=0)
  assert held < found < taken(held, step, state, tokens)


def test_memory_bound_of_sampling_counts_the_cache():
  config, model = network()
  decoder = Decoder(model)
  bound = functools.partial(
    bounds, costs.check_inference_memory, config, Experiment(config).source
  )
  one, many = (bound(n, cache=decoder.num_bytes(1)) for n in (1, 1001))
  cache = decoder.num_bytes(1000)
  assert cache < many - one < 1.1 * cache


@pytest.mark.parametrize("half_size", [False, True])
def test_parameters_are_counted_without_making_the_network(half_size):
  _, model = network(**{"model.half_size": half_size})
  assert costs._num_parameters(model) == model_lib.count_parameters(model)


TEXT = {"data.name": "bytes", "data.path": "unused"}


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"train.batch_size": 10**9}, ["train.batch_size=1000000000"]),
    ({"eval.batch_size": 10**9}, ["eval.batch_size=1000000000"]),
    ({"model.width": 10**7}, ["model.width=10000000", "parameters"]),
    ({"model.width": 2**20, "model.num_layers": 10_000}, ["num_layers=10000"]),
    (TEXT | {"data.length": 2**31 - 1}, ["2147483647 positions"]),
    (TEXT | {"data.columns": 2**31 - 1}, ["embeddings of 2147483647 rows"]),
  ],
)
def test_run_larger_than_the_memory_is_rejected_at_once(changes, words):
  config = runs.tiny(**changes)
  source = Experiment(config).source
  start = time.perf_counter()
  with pytest.raises(ValueError) as error:
    costs.check_training_memory(config, source)
  assert time.perf_counter() - start < 0.5
  message = str(error.value)
  assert re.search(r"needs at least [\d,.]+ GiB of memory, but", message)
  assert "\n" not in message and all(word in message for word in words)


def test_initial_weights_need_neither_gradients_nor_a_batch():
  config = runs.tiny(**{"train.steps": 0, "train.batch_size": 10**9})
  costs.check_training_memory(config, Experiment(config).source)


def test_copy_for_a_checkpoint_must_fit_in_the_memory_of_the_host(monkeypatch):
  config, model = network()
  state = 16 * model_lib.count_parameters(model)
  monkeypatch.setattr(machine, "memory", lambda: state * 3 // 2)
  with pytest.raises(ValueError, match="parameters .* but this machine has"):
    costs.check_training_memory(config, Experiment(config).source)
