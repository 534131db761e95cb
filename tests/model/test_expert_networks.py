"""Tests of networks that have blocks with experts between dense ones."""

import jax
import networks
import numpy as np
import pytest
from flax import nnx

from sparse_transformer import attention, model
from sparse_transformer.model import transformer
from sparse_transformer.model.block import ExpertBlock, ResidualBlock


def config(**changes):
  """Five blocks, alternately dense and with experts; the last one is dense."""
  settings = dict(
    num_layers=5,
    experts=4,
    backend="dense",
    patterns=networks.assign(num_layers=5, cycle=(1, 0, 0, 0)),
  )
  return networks.config(**settings | changes)


def params_of(config, std=0.3):
  """Random parameters with which all experts are used."""
  params = networks.random_params(config, std)
  for name in {"blocks", "expert_blocks"} & params.keys():
    norm = params[name]["mlp_norm"]
    norm["scale"] = norm["scale"] + 1
  return params


def test_dense_and_expert_blocks_alternate():
  kinds = lambda **changes: config(**changes).has_experts
  assert kinds() == (False, True, False, True, False)
  assert kinds(experts=0) == (False,) * 5
  assert kinds(experts_every=3) == (False, False, True, False, False)
  assert kinds(experts_every=1) == (True,) * 5
  assert config().period == 4  # of the patterns; a multiple of that of blocks
  same = config(patterns=networks.assign("local", num_layers=5))
  assert same.period == 2


@pytest.mark.parametrize(
  "changes",
  [
    pytest.param({}, marks=pytest.mark.soak),
    pytest.param(dict(experts=0), marks=pytest.mark.soak),
    dict(experts_every=1, num_layers=2, patterns=networks.assign()),
    # No multiple of the period, or less than one.
    dict(experts=0, num_layers=3, patterns=networks.assign(num_layers=3)),
    pytest.param(dict(experts_every=3), marks=pytest.mark.soak),
  ],
)
def test_scan_over_periods_applies_the_blocks_in_turn(changes):
  network = config(**changes)
  params, symbols = params_of(network), networks.tokens(network)
  blocks = [
    (name, nnx.graphdef(kind(network, rngs=nnx.Rngs(0))))
    for name, kind in (
      ("blocks", ResidualBlock),
      ("expert_blocks", ExpertBlock),
    )[: 1 + any(network.has_experts)]
  ]

  @jax.jit
  def in_turn(params):
    bound = transformer.bind(network, params)
    x, seen, balance = bound.embed(symbols), [0, 0], []
    for heads, has in zip(network.patterns, network.has_experts, strict=True):
      name, block = blocks[has]
      one = jax.tree.map(lambda p, has=has: p[seen[has]], params[name])
      seen[has] += 1
      attend = lambda *qkv, heads=heads: (
        attention.attend(*qkv, heads, backend="dense"),
        None,
      )
      y, _, measured = nnx.merge(block, one)(x, attend)
      x = x + y
      balance += [measured["load_balance"]] if has else []
    return bound.logits(bound.norm(x)), balance

  logits, measured = jax.jit(model.make_predict(network))(params, symbols)
  expected, balance = in_turn(params)
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
  assert len(balance) == sum(network.has_experts)
  if balance:
    np.testing.assert_allclose(measured["load_balance"], balance, rtol=1e-5)
    assert measured["expert_load"].shape == (len(balance), 4)
    np.testing.assert_allclose(measured["expert_load"].sum(1), 4, rtol=1e-5)
  np.testing.assert_array_equal(
    networks.apply(network)(params, symbols), logits
  )
