"""Tests of the costs of a step, against the program that JAX traces."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
import runs
from jax.extend import core

from sparse_transformer import model as model_lib, schema
from sparse_transformer.training import step as step_lib
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.explanation import costs, peaks

BFLOAT16 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32


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

  The matmuls of attention have a matrix for each sequence and head.
  """
  for eqn in program.eqns:
    for inner in programs(eqn.params):
      repeats = times * eqn.params.get("length", 1)  # length of a scan
      yield from matmuls(getattr(inner, "jaxpr", inner), repeats)
    if eqn.primitive.name == "dot_general":
      (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
      left, right, out = (x.aval for x in (*eqn.invars, *eqn.outvars))
      depth = math.prod(left.shape[axis] for axis in contracted)
      # Compilers add biases to sums in float32, and round both at once.
      is_rounded = eqn.params["precision"] == BFLOAT16
      moved = sum(
        x.size * (2 if is_rounded else x.dtype.itemsize)
        for x in (left, right, out)
      )
      flops = 2 * depth * math.prod(out.shape)
      yield not batched, times * flops, times * moved


def traced(model, batch):
  """(FLOPs, bytes) of weights and (FLOPs, bytes) of attention in a step."""
  apply = model_lib.make_apply(model)

  def loss(params, tokens_BL):
    return step_lib.position_losses(apply(params, tokens_BL), tokens_BL).mean()

  program = jax.make_jaxpr(jax.grad(loss))(
    model_lib.param_shapes(model),
    jax.ShapeDtypeStruct((batch, model.length), jnp.uint8),
  )
  found = list(matmuls(program.jaxpr))
  return tuple(
    tuple(sum(row[i] for row in found if row[0] == kind) for i in (1, 2))
    for kind in (True, False)
  )


@pytest.mark.parametrize("remat", schema.REMATS)
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
    }
  )
  # One tile: all n x n pairs are computed.
  model = dataclasses.replace(model, tile=64)
  pairs = 64**2 * model.num_layers * model.num_heads
  report = costs.step(config, model, pairs)
  (flops, moved), (attention, _) = traced(model, config.train.batch_size)
  assert moved == report["bytes"]["weights"]
  assert flops + attention == report["flops"]["total"]
  assert flops == costs.step(config, model, 0)["flops"]["total"]


def test_experts_cost_as_many_flops_as_tokens_pass_through():
  (config, model), (_, dense) = (
    network(**{"model.experts": experts, "model.remat": "block"})
    for experts in (4, 0)
  )
  assert model_lib.layers_of(model, "expert_blocks") == [1]
  costs_of = lambda model: costs.step(config, model, 0)
  more = model_lib.count_active_parameters(model)
  more -= model_lib.count_parameters(dense) + 64 + 16  # biases of an MLP
  assert more == 2 * 16 * 64 + 16 * 4  # a second MLP, and the router
  flops, of_dense = (costs_of(m)["flops"]["weights"] for m in (model, dense))
  assert flops - of_dense == 6 * more * 8 * 64
  moved, of_dense = (costs_of(m)["bytes"]["weights"] for m in (model, dense))
  # Twice the rows of tokens, four matrices in place of one; forward, backward
  # and, before the activation, again.
  tokens, sizes = 8 * 64, 16 + 64
  mlp = (tokens * sizes + 3 * 16 * 64) * (3 + 4)
  router = (tokens * (16 + 4) + 16 * 4) * 4
  assert moved - of_dense == 4 * (mlp + router)
  memory = costs.memory(config, model)
  assert memory["parameters"] == 4 * model_lib.count_parameters(model)


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
  tokens = config.train.batch_size * model.length
  assert costs.flops_per_token(config, model) == expected / tokens
  for remat in schema.REMATS:
    way = dataclasses.replace(model, remat=remat)
    assert costs.model_flops(config, way) == expected


def test_utilization_is_that_of_all_devices_where_the_peak_is_known(
  monkeypatch,
):
  assert costs.speed(0.0, 1e6, "bfloat16") == {}
  expected = dict(tokens_per_second=50.0, model_flops_per_second=5e7)
  assert costs.speed(50.0, 1e6, "bfloat16") == expected
  kind = jax.devices()[0].device_kind
  monkeypatch.setitem(peaks.PEAKS, kind, dict(bfloat16=2e8))
  assert costs.speed(50.0, 1e6, "bfloat16") == expected | dict(mfu=0.25)
  assert costs.speed(50.0, 1e6, "float16") == expected
  devices = jax.devices() * 5
  monkeypatch.setattr(jax, "devices", lambda: devices)
  assert costs.speed(50.0, 1e6, "bfloat16") == expected | dict(mfu=0.05)


def test_accumulation_keeps_a_sum_of_gradients():
  (whole, model), (half, _) = (
    network(**{"train.accumulation": micro}) for micro in (1, 2)
  )
  once, twice = (costs.memory(config, model) for config in (whole, half))
  assert twice["gradients"] == 2 * once["gradients"]
  assert costs.step(whole, model, 7) == costs.step(half, model, 7)


def test_rematerialization_recomputes_more():
  config, model = network(**{"model.num_layers": 4})
  pairs = costs.count_pairs(model)
  repeated = [
    costs.step(config, dataclasses.replace(model, remat=x), pairs)["flops"][
      "recomputed"
    ]
    for x in schema.REMATS
  ]
  assert repeated == sorted(repeated)
  assert repeated[0] == 2 * 8 * 64 * 4 * 16 * 16  # the product after attention
  # All matmuls of a block but the last, and the forward pass of attention.
  again = 4 * 16 * 16 * 4 + 4 * 16 * 64
  assert repeated[-1] == 2 * 8 * 64 * again + 2 * 16 * pairs * 8
