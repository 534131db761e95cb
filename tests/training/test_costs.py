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


@pytest.mark.parametrize("more", [{}, {"model.key_heads": 1}])
def test_flops_of_weights_are_those_of_matrices(more):
  changes = {
    "attention.pattern": "dense",
    "model.half_size": True,
  }
  _, model = network(**changes, **more)
  leaves = jax.tree_util.tree_leaves_with_path(model_lib.param_shapes(model))
  matrices = [x.size for path, x in leaves if path[-1].key == "kernel"]
  flops = costs.flops_per_token(model)
  assert flops["weights"] == 6 * sum(matrices)


def test_flops_of_attention_are_those_of_pairs():
  _, model = network(**{"attention.pattern": "dense"})
  flops = costs.flops_per_token(model)
  assert costs.count_pairs(model) == 3 * 2 * 64 * 65 // 2
  # PaLM, appendix B: 12 L H Q T per token, here with half of T.
  assert flops["attention"] == 12 * 3 * 2 * 8 * (64 + 1) / 2
  assert flops["total"] == flops["weights"] + flops["attention"]


def test_experts_cost_as_many_flops_as_tokens_pass_through():
  config, model = network(**{"model.experts": 4})
  _, dense = network(**{"model.experts": 0})
  assert model_lib.layers_of(model, "expert_blocks") == [1]

  biases = 64 + 16  # of an MLP
  mlp = 2 * 16 * 64
  router = 16 * 4
  of_dense = model_lib.count_parameters(dense)
  active = model_lib.count_active_parameters(model)
  assert active == of_dense + mlp + router + biases

  flops = costs.flops_per_token(model)["weights"]
  flops -= costs.flops_per_token(dense)["weights"]
  assert flops == 6 * (mlp + router)
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
  def gradients(accumulation):
    config, model = network(**{"train.accumulation": accumulation})
    return costs.memory(config, model)["gradients"]

  assert gradients(2) == 2 * gradients(1)
