"""Tests of networks: their config, parameters, reach, and dropout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import networks
from helpers.networks import LENGTH, assign
from helpers.reference_reach import reach

from sparse_transformer import model
from sparse_transformer.patterns import Local


@pytest.mark.parametrize(
  "num_layers, cycle, period",
  [
    (5, (), 2),
    (8, (1, 0, 0, 0), 4),
    (3, (1, 0, 0, 0), 3),
    (4, (0,), 1),
  ],
)
def test_period_is_the_number_of_layers_after_which_patterns_repeat(
  num_layers, cycle, period
):
  assigned = assign(num_layers=num_layers, cycle=cycle)
  config = networks.config(num_layers=num_layers, patterns=assigned)
  assert model.period(config) == period


# Parameters.


def assert_spread(parameter, std):
  """At least 8,192 draws: their standard deviation is known to 1 %."""
  np.testing.assert_allclose(np.std(parameter), std, rtol=0.03)
  assert abs(np.mean(parameter)) < 0.05 * std


def test_initial_parameters_have_the_published_spread():
  d = 128
  layers = 3
  config = networks.config(
    vocab_size=256,
    length=64 * 64,
    shape=(64, 64, 1),
    width=d,
    num_layers=layers,
    half_size=True,
    token_std=0.02,
    position_std=0.03,
  )
  params = jax.jit(lambda: model.init_params(config, 0))()
  blocks = params["blocks"]
  into = math.sqrt(0.125 / d)
  expected = {
    "query": into,
    "key": into,
    "value": into,
    "out": math.sqrt(0.125 * 0.5 / (d * layers)),
    "mlp_in": into,
    "mlp_out": math.sqrt(0.125 * 0.5 / (2 * d * layers)),
  }

  for name, std in expected.items():
    assert_spread(blocks[name]["kernel"], std)
  assert_spread(params["token"]["embedding"], 0.02)
  for axis in params["position"].values():
    assert_spread(axis["embedding"], 0.03 / math.sqrt(2))
  # 128 draws: 6 %.
  np.testing.assert_allclose(np.std(params["start"]), 0.02, rtol=0.25)

  # Layers are drawn independently.
  first, second, _ = np.asarray(blocks["query"]["kernel"])
  correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
  assert abs(correlation) < 0.05

  by_name = {}
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    by_name.setdefault(path[-1].key, []).append(x)
  assert len(by_name["bias"]) == 9
  assert len(by_name["scale"]) == 3
  for bias in by_name["bias"]:
    assert (bias == 0).all()
  for scale in by_name["scale"]:
    assert (scale == 1).all()


# What a position sees.


@pytest.mark.parametrize(
  "name, mode, backend",
  [
    ("strided", "interleaved", "auto"),
    ("fixed", "heads", "dense"),
  ],
)
def test_gradient_is_exactly_zero_where_the_patterns_do_not_reach(
  name, mode, backend
):
  # One axis of positions: each has its own embedding, which is added to the
  # symbol before it is shifted by one.
  config = networks.config(
    shape=(LENGTH, 1),
    patterns=assign(name, mode),
    backend=backend,
  )
  params = networks.random_params(config)
  apply = model.make_apply(config)
  symbols = networks.tokens(config, batch=1)

  def logits(embedding):
    position = {0: dict(embedding=embedding)}
    return apply(params | dict(position=position), symbols)[0, :, 3]

  gradients = jax.jit(jax.jacrev(logits))(params["position"][0]["embedding"])

  assert np.isfinite(gradients).all()
  found = np.any(gradients != 0, axis=-1)
  expected = np.zeros((LENGTH, LENGTH), bool)
  expected[:, :-1] = reach(config.patterns, LENGTH)[:, 1:]

  np.testing.assert_array_equal(found, expected)
  assert not np.triu(found).any()  # position i: from those before it only


# Dropout.


def test_dropout_is_determined_by_its_rng_and_needs_a_rate():
  config = networks.config(dropout=0.5)
  params = networks.random_params(config)
  symbols = networks.tokens(config)
  first, second = jax.random.split(jax.random.key(0))

  def drop(*rng):
    return networks.apply(config)(params, symbols, *rng)

  np.testing.assert_array_equal(drop(first), drop(first))
  assert (drop(first) != drop(second)).any()
  plain = networks.apply(networks.config())
  np.testing.assert_array_equal(drop(), plain(params, symbols))
  # A different program, which rounds differently.
  no_rate = plain(params, symbols, first)
  np.testing.assert_allclose(
    no_rate,
    drop(),
    rtol=1e-5,
    atol=1e-5,
  )


def test_branches_and_layers_drop_independently():
  same = ((Local(4),) * 2,) * 2
  config = networks.config(
    dropout=0.5,
    width=64,
    patterns=same,
  )
  network = networks.make(config, std=0.1)
  x = jnp.zeros((1, LENGTH, 64))
  # Constant branches: what was dropped can be read off the sum.
  of_layer = jnp.array([[1.0], [10.0]])
  for name, value in (("out", 1.0), ("mlp_out", 3.0)):
    part = getattr(network.blocks, name)
    part.kernel[...] = jnp.zeros_like(part.kernel[...])
    part.bias[...] = jnp.broadcast_to(value * of_layer, part.bias.shape)

  def run(x, rng):
    return network.run_blocks(x, network.attend, rng=rng)[0]

  out = jax.jit(run)(x, jax.random.key(0)).ravel() / 2
  # Every sum of a subset of 1, 3, 10, 30 occurs about equally often.
  values, counts = np.unique(np.round(out), return_counts=True)

  assert len(values) == 16
  assert counts.min() > 40  # of 80 expected
