"""Tests of the costs of a step, against parameters and published formulas."""

import jax
import pytest
from helpers import runs

from sparse_transformer import model as model_lib
from sparse_transformer.training import costs
from sparse_transformer.training.experiment import Experiment


def network(**changes):
  config = runs.tiny(**{"model.num_layers": 3} | changes)
  return config, Experiment(config).model


def test_flops_count_what_is_needed_and_no_more():
  changes = {
    "attention.pattern": "dense",
    "model.half_size": True,
  }
  for more in {}, {"model.key_heads": 1}:
    _, model = network(**changes, **more)
    leaves = jax.tree_util.tree_leaves_with_path(model_lib.param_shapes(model))
    matrices = [x.size for path, x in leaves if path[-1].key == "kernel"]
    found = costs.flops_per_token(model)
    assert found["weights"] == 6 * sum(matrices)

  _, model = network(**{"attention.pattern": "dense"})

  assert costs.count_pairs(model) == 3 * 2 * 64 * 65 // 2
  found = costs.flops_per_token(model)
  # PaLM, appendix B: 12 L H Q T per token, here with half of T.
  assert found["attention"] == 12 * 3 * 2 * 8 * (64 + 1) / 2
  assert found["total"] == found["weights"] + found["attention"]


def test_experts_cost_as_many_flops_as_tokens_pass_through():
  (config, model), (_, dense) = (
    network(**{"model.experts": experts}) for experts in (4, 0)
  )

  assert model_lib.layers_of(model, "expert_blocks") == [1]
  more = model_lib.count_active_parameters(model)
  more -= model_lib.count_parameters(dense) + 64 + 16  # biases of an MLP

  assert more == 2 * 16 * 64 + 16 * 4  # a second MLP, and the router
  flops, of_dense = (
    costs.flops_per_token(m)["weights"] for m in (model, dense)
  )

  assert flops - of_dense == 6 * more
  memory = costs.memory(config, model)
  assert memory["parameters"] == 4 * model_lib.count_parameters(model)


def test_utilization_is_that_of_all_devices_where_the_peak_is_known(
  monkeypatch,
):
  _, model = network()
  assert all(1e14 < peak < 1e15 for peak in costs.PEAKS.values())
  assert costs.speed(0.0, model) == {}

  found = costs.speed(50.0, model)
  devices = jax.devices()
  flops = 50 * costs.flops_per_token(model)["total"]

  assert found == dict(
    tokens_per_second=50.0,
    model_flops_per_second=flops,
  )
  monkeypatch.setitem(costs.PEAKS, devices[0].device_kind, 4 * flops)
  assert costs.speed(50.0, model) == found | dict(mfu=0.25)
  monkeypatch.setattr(jax, "devices", lambda: devices * 5)
  assert costs.speed(50.0, model)["mfu"] == pytest.approx(0.05)


def test_accumulation_keeps_a_sum_of_gradients():
  (whole, model), (half, _) = (
    network(**{"train.accumulation": micro}) for micro in (1, 2)
  )
  once, twice = (costs.memory(config, model) for config in (whole, half))
  assert twice["gradients"] == 2 * once["gradients"]
