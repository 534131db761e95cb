"""Tests of model/hyperparameters.py."""

import types

import networks
import pytest

from configs import cifar10, default
from sparse_transformer import model
from sparse_transformer.patterns import Local, Strided


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(num_heads=3), "num_heads=3 must divide .*width=8"),
    (dict(num_heads=8, half_size=True), "width=8 and the width 4 of queries"),
  ],
)
def test_invalid_network_is_rejected(changes, words):
  with pytest.raises(ValueError, match=words):
    networks.config(**changes)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(stride=65), "stride=65 .* 64 positions"),
    (dict(window=65), "window=65 .* 64 positions"),
    (dict(pattern="Local(3, causal=False)"), "query 0 see the later key 1"),
    (dict(pattern="Local(3) - Causal()"), "no pairs: none of the 64 queries"),
    (
      dict(pattern="(Local(8), Local(1) - Local(2))", mode="heads"),
      "Local.1. - Local.2. has no pairs",
    ),
    (
      dict(pattern="Local(6), (Causal(), Block(6, causal=False) - Block(2))"),
      r"Block\(6, causal=False\) - Block\(2\) lets query 0 see .* key 1,",
    ),
    (dict(pattern="Dilated(99999, 99999)"), "Dilated.* fit in 32 bits"),
    (
      dict(pattern="Local(8) | TopBlocks(64, 2)"),
      r"TopBlocks\(64, 2\) can have no pairs among 64 positions",
    ),
    (dict(pattern="LSH(8, 4) | Full()"), "see the later key .* & Causal"),
  ],
)
def test_pattern_that_does_not_fit_the_sequence_is_rejected(changes, message):
  settings = default.get_config()
  settings.attention.update(dict(stride=8, window=8, width=2) | changes)
  source = types.SimpleNamespace(vocab_size=17, shape=(8, 8), length=64)
  with pytest.raises(ValueError, match=message):
    model.configure(settings, source)


def test_experiment_config_becomes_the_network_it_describes():
  source = types.SimpleNamespace(vocab_size=256, shape=(32, 32, 3), length=3072)
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
  assert config.period == period
