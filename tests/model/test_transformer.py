"""Tests of model/transformer.py: parameters, reach, embedding, dropout."""

import math

import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
from flax import nnx
from networks import LENGTH, assign

from sparse_transformer import attention, model, patterns
from sparse_transformer.model.block import ResidualBlock
from sparse_transformer.patterns import Causal, Local

# Parameters.


def test_initial_parameters_have_the_published_spread():
  d, layers = 128, 3
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
  into = math.sqrt(0.125 / d)
  out = math.sqrt(0.125 * 0.5 / (d * layers))
  mlp_out = math.sqrt(0.125 * 0.5 / (2 * d * layers))
  token, position = 0.02, 0.03 / math.sqrt(2)
  blocks = params["blocks"]
  expected = [
    (blocks["query"]["kernel"], into),
    (blocks["key"]["kernel"], into),
    (blocks["value"]["kernel"], into),
    (blocks["out"]["kernel"], out),
    (blocks["mlp_in"]["kernel"], into),
    (blocks["mlp_out"]["kernel"], mlp_out),
    (params["token"]["embedding"], token),
    *((axis["embedding"], position) for axis in params["position"].values()),
  ]
  for parameter, std in expected:
    # At least 8,192 draws: their standard deviation is known to 1 %.
    np.testing.assert_allclose(np.std(parameter), std, rtol=0.03)
    assert abs(np.mean(parameter)) < 0.05 * std
  # 128 draws: 6 %.
  np.testing.assert_allclose(np.std(params["start"]), token, rtol=0.25)
  # Layers are drawn independently.
  first, second, _ = np.asarray(blocks["query"]["kernel"])
  assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05
  by_name = {}
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    by_name.setdefault(path[-1].key, []).append(np.asarray(x))
  assert len(by_name["bias"]) == 9 and len(by_name["scale"]) == 3
  assert all((x == 0).all() for x in by_name["bias"])
  assert all((x == 1).all() for x in by_name["scale"])


def test_parameters_do_not_depend_on_patterns():
  def params(layers):
    config = networks.config(num_layers=4, patterns=layers)
    return jax.jit(lambda: model.init_params(config, 3))()

  expected = params(((Causal(),) * 2,) * 4)
  for mode in ("interleaved", "heads"):  # with different periods
    found = params(assign("fixed", mode, num_layers=4))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# What a position sees.


@pytest.mark.parametrize(
  "name, mode, backend",
  [
    *(("dense", "merged", "dense"), ("strided", "interleaved", "auto")),
    ("fixed", "heads", "dense"),
    *(
      pytest.param(name, mode, backend, marks=pytest.mark.soak)
      for name in ("local", "strided", "fixed")
      for mode in patterns.MODES
      for backend in ("dense", "auto")
    ),
  ],
)
def test_gradient_is_exactly_zero_where_the_patterns_do_not_reach(
  name, mode, backend
):
  # One axis of positions: each has its own embedding, which is added to the
  # symbol before it is shifted by one.
  config = networks.config(
    shape=(LENGTH, 1), patterns=assign(name, mode), backend=backend
  )
  apply, symbols = model.make_apply(config), networks.tokens(config, batch=1)

  @jax.jit
  def gradients(params):
    def gradient(i):
      def logit(embedding):
        position = {0: dict(embedding=embedding)}
        return apply(params | dict(position=position), symbols)[0, i, 3]

      return jax.grad(logit)(params["position"][0]["embedding"])

    return jax.lax.map(gradient, jnp.arange(LENGTH))

  grads = np.asarray(gradients(networks.random_params(config)))
  assert np.isfinite(grads).all()
  found = (grads != 0).any(-1)
  expected = np.zeros((LENGTH, LENGTH), bool)
  expected[:, :-1] = patterns.reach(config.patterns, LENGTH)[:, 1:]
  np.testing.assert_array_equal(found, expected)
  assert not np.triu(found).any()  # position i: from those before it only


def test_too_many_tokens_are_rejected():
  network = networks.make(networks.config())
  with pytest.raises(ValueError, match="21 tokens, .* has 20 positions"):
    network(np.zeros((1, 21), int))


def test_prefix_has_the_logits_of_the_sequence():
  config = networks.config()
  params, symbols = networks.random_params(config), networks.tokens(config)
  complete, prefix = (
    networks.apply(config)(params, x) for x in (symbols, symbols[:, :9])
  )
  np.testing.assert_allclose(prefix, complete[:, :9], rtol=1e-4, atol=1e-5)


# Dropout.


def test_dropout_is_determined_by_its_rng_and_needs_a_rate():
  config = networks.config(dropout=0.5)
  params, symbols = networks.random_params(config), networks.tokens(config)
  first, second = jax.random.split(jax.random.key(0))
  drop = lambda *rng: networks.apply(config)(params, symbols, *rng)
  np.testing.assert_array_equal(drop(first), drop(first))
  assert (drop(first) != drop(second)).any()
  plain = networks.apply(networks.config())
  np.testing.assert_array_equal(drop(), plain(params, symbols))
  # A different program, which rounds differently.
  no_rate = plain(params, symbols, first)
  np.testing.assert_allclose(no_rate, drop(), rtol=1e-5, atol=1e-5)


def test_branches_and_layers_drop_independently():
  same = ((Local(4),) * 2,) * 2
  config = networks.config(dropout=0.5, width=64, patterns=same)
  network = networks.make(config, std=0.1)
  x = jnp.zeros((1, LENGTH, 64))
  # Constant branches: what was dropped can be read off the sum.
  for name, value in (("out", 1.0), ("mlp_out", 3.0)):
    part = getattr(network.blocks, name)
    part.kernel[...] = jnp.zeros_like(part.kernel[...])
    scale = jnp.array([[1.0], [10.0]])
    part.bias[...] = value * scale * jnp.ones_like(part.bias[...])
  run = lambda x, rng: network.run_blocks(x, network.attend, rng=rng)[0]
  out = jax.jit(run)(x, jax.random.key(0)).ravel() / 2
  # Every sum of a subset of 1, 3, 10, 30 occurs about equally often.
  values, counts = np.unique(np.round(out), return_counts=True)
  assert len(values) == 16
  assert counts.min() > 40  # of 80 expected


def test_dropout_is_applied_at_the_end_of_each_branch():
  config = networks.config(dropout=0.25, width=64)
  params = networks.random_params(config, std=0.1)["blocks"]
  graph = nnx.graphdef(ResidualBlock(config, rngs=nnx.Rngs(0)))
  attend = lambda *qkv: (attention.attend(*qkv, (Local(4),) * 2), None)
  block = jax.jit(
    lambda params, x, rng=None: nnx.merge(graph, params)(x, attend, rng)[0]
  )
  x = np.random.default_rng(0).normal(size=(2, LENGTH, 64)).astype(np.float32)
  for silent in "out", "mlp_out":  # only the other branch is left
    first = jax.tree.map(lambda p: p[0], params)
    first[silent] = jax.tree.map(jnp.zeros_like, first[silent])
    complete = np.asarray(block(first, x))
    rngs = jax.random.split(jax.random.key(2))
    dropped = np.asarray(block(first, x, rngs))
    is_zero = dropped == 0
    # 2,560 draws: 0.25 is met within 0.01 (one standard deviation).
    assert abs(is_zero.mean() - 0.25) < 0.04
    np.testing.assert_allclose(
      dropped[~is_zero], complete[~is_zero] / 0.75, atol=1e-5
    )
