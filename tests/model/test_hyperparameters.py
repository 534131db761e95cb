"""Tests of model/configure.py and hyperparameters.py."""

import types

import networks
import pytest

from configs import cifar10
from sparse_transformer import model
from sparse_transformer.patterns import Local, Strided


def test_experiment_config_becomes_the_network_it_describes():
  source = types.SimpleNamespace(
    separator=None, classes=(), vocab_size=256, shape=(32, 32, 3), length=3072
  )
  network = model.configure(cifar10.get_config(), source)
  assert network.length == 3072 and network.axes == (32, 32, 3)
  assert (network.qk_width, network.mlp_width) == (128, 512)
  strided, *local = network.patterns[:4]
  assert strided == (Strided(96),) * 2
  assert local == [(Local(96),) * 2] * 3


@pytest.mark.parametrize(
  "num_layers, cycle, period",
  [(5, (), 2), (8, (1, 0, 0, 0), 4), (3, (1, 0, 0, 0), 3), (4, (0,), 1)],
)
def test_period_is_the_number_of_layers_after_which_patterns_repeat(
  num_layers, cycle, period
):
  assigned = networks.assign(num_layers=num_layers, cycle=cycle)
  config = networks.config(num_layers=num_layers, patterns=assigned)
  assert model.period(config) == period
