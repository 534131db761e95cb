"""Tests of options: what they give to layers, choose and measure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import networks

from sparse_transformer import model, schema
from sparse_transformer.model import options, transformer
from sparse_transformer.patterns import (
  LSH,
  Block,
  Causal,
  Local,
  Routing,
  Strided,
  TopBlocks,
)
from sparse_transformer.training import optimizer

LENGTH = 53
HASHED = LSH(5, 4, 2)
ROUTED = Routing(3, 7)
CHOSEN = Block(8) | TopBlocks(8, 2)
HEADS = (HASHED, ROUTED), (CHOSEN,) * 2
WITH_SPANS = Strided(5), Local(40)


def config(**changes):
  """Four layers of two heads; every second one has experts."""
  settings = dict(
    length=LENGTH,
    shape=(LENGTH, 1),
    width=16,
    num_layers=4,
    experts=4,
    patterns=HEADS * 2,
  )
  return networks.config(**settings | changes)


def params_of(config, skew=0.0):
  """Random parameters; with skew, most queries point to one side."""
  params = networks.random_params(config, 0.3)
  for name in {"blocks", "expert_blocks"} & params.keys():
    for norm in ("attention_norm", "mlp_norm"):
      params[name][norm]["scale"] += 1
    params[name]["query"]["bias"] += skew
  if "spans" in params:
    params["spans"] = abs(params["spans"])
  return params


MIXED = (
  (HASHED, ROUTED),
  (Local(2) | ROUTED, Local(4)),
)


def record(cache, layer, index, inputs):
  """An `attend` that stores queries at its layer's place."""
  place = layer + len(MIXED) * index
  return inputs.v_BLGE, cache.at[place].set(inputs.q_BLHK)


def test_layers_have_a_loss_of_their_own():
  # Two periods of two layers, and one more.
  network = config(
    num_layers=5,
    experts=0,
    patterns=(MIXED * 3)[:5],
  )
  params = params_of(network)
  symbols = networks.tokens(network)

  @jax.jit
  def run(params, cache):
    bound = transformer.bind(network, params)
    embedded = bound.embed(symbols)
    return bound.run_blocks(embedded, record, cache)[1:]

  queries, measured = run(params, jnp.zeros((5, 2, LENGTH, 2, 8)))

  def directions(x):
    x = np.float64(x)
    return x / np.linalg.norm(
      x,
      axis=-1,
      keepdims=True,
    )

  for layer in range(5):
    head = 1 - layer % 2  # the one that routes
    q = directions(queries[layer, :, :, head])
    centroids = directions(params["centroids"]["3"][layer, head])
    loss = 1 - (q @ centroids.T).max(-1).mean()
    np.testing.assert_allclose(measured["codebook"][layer], loss, rtol=1e-5)


def test_only_centroids_get_a_gradient_of_their_loss():
  random = np.random.RandomState(0)
  q = random.randn(2, 9, 2, 8)
  centroids = random.randn(2, 3, 8)
  (option,) = options.of(
    config(
      experts=0,
      num_layers=1,
      patterns=HEADS[:1],
    )
  )

  def loss(q, centroids):
    arrays = option.arrays(dict(centroids={"3": centroids[None]}))
    arrays = jax.tree.map(lambda x: x[0], arrays)
    layer = options.Layer(HEADS[0], 0, arrays)
    inputs = option.inputs(layer, options.Inputs(q, q, q, {}))
    return option.measure(layer, inputs)["codebook"]

  of_q, of_centroids = jax.jit(jax.grad(loss, (0, 1)))(q, centroids)

  assert not of_q.any()
  # The head that routes has gradients, orthogonal to its centroids.
  assert not of_centroids[0].any()
  assert of_centroids[1].any(-1).all()
  np.testing.assert_allclose((of_centroids * centroids).sum(-1), 0, atol=1e-7)


def test_options_change_only_their_own_parameters():
  def init(**changes):
    settings = dict(
      experts=0,
      num_layers=2,
      patterns=((Causal(),) * 2,) * 2,
    )
    network = config(**settings | changes)
    return jax.jit(lambda: model.init_params(network, 0))()

  plain = init()
  for name, shape, changes in (
    ("sinks", (2, 2), dict(sinks=True)),
    ("spans", (2, 2), dict(max_span=9)),
    ("centroids", (2, 2, 3, 8), dict(patterns=HEADS)),
    ("position", None, dict(positions="rotary")),
  ):
    params = init(**changes)
    if name == "position":  # embeddings that rotary positions replace
      assert plain.keys() - params.keys() == {name}
      continue
    (own,) = jax.tree.leaves(params.pop(name))
    assert own.shape == shape
    assert own.any() == (name == "centroids")
    jax.tree.map(np.testing.assert_array_equal, params, plain)
    assert not any(jax.tree.leaves(optimizer.decays({name: own})))

  lengths = np.linalg.norm(init(patterns=HEADS)["centroids"]["3"], axis=-1)

  assert 0.7 < lengths.mean() < 1.4


def test_every_second_block_has_experts():
  five = config(
    num_layers=5,
    patterns=((Causal(),) * 2,) * 5,
  )
  assert model.layers_of(five, "expert_blocks") == [1, 3]
  assert model.period(five) == 2

  kernel = model.param_shapes(five)["expert_blocks"]["experts_in"]["kernel"]
  assert kernel.shape == (2, 4, 16, 64)
  of_expert = 2 * 16 * 64 + 64 + 16
  idle = 2 * 2 * of_expert
  total = model.count_parameters(five)
  assert model.count_active_parameters(five) == total - idle

  predict = jax.jit(model.make_predict(five))
  _, measured = predict(params_of(five), networks.tokens(five))
  assert measured["load_balance"].shape == (2,)
  loads = measured["expert_load"].sum(axis=1)
  np.testing.assert_allclose(loads, [4, 4], rtol=1e-5)


# What a position depends on.


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_symbol_changes_nothing_before_it_and_no_other_sequence(skew):
  network = config(patterns=(HEADS[0], (CHOSEN, Strided(5))) * 2)
  params = params_of(network, skew)
  symbols = networks.tokens(network)
  run = networks.apply(network)
  random = np.random.RandomState(0)
  logits = run(params, symbols)
  for t in random.choice(LENGTH - 1, 8, replace=False):
    changed = symbols.copy()
    changed[:, t:] = random.randint(0, 7, size=(2, LENGTH - t))
    difference = np.abs(run(params, changed) - logits)
    before = difference[:, : t + 1]
    after = difference[:, t + 1 :]
    assert before.max() < 1e-5
    assert after.max() > 0.1

  changed = symbols.copy()
  changed[1] = random.randint(0, 7, LENGTH)
  of_first = run(params, changed)[0]
  np.testing.assert_array_equal(of_first, logits[0])


# Rematerialization.


def gradient(remat, patterns=HEADS, **changes):
  """(a function that returns ((loss, logits), gradients), parameters)."""
  network = config(
    num_layers=len(patterns),
    patterns=patterns,
    remat=remat,
    **changes,
  )
  predict = model.make_predict(network)
  symbols = networks.tokens(network)

  def loss(params):
    logits, measured = predict(params, symbols)
    total = (logits**2).mean()
    for value in measured.values():
      if value.ndim == 1:
        total += value.sum()
    return total, logits

  return jax.value_and_grad(loss, has_aux=True), params_of(network)


def test_backward_pass_does_not_choose_again():
  patterns = (LSH(5, 4), ROUTED), (TopBlocks(8, 2),) * 2
  function, params = gradient("block", patterns)
  program = jax.make_jaxpr(function)(params).jaxpr
  names = [str(e.primitive) for e in networks.equations(program)]
  assert names.count("top_k") == 2  # TopBlocks, and experts
  assert names.count("argmax") == 3  # LSH, Routing and the loss of centroids


@pytest.mark.soak
@pytest.mark.parametrize(
  "patterns, changes",
  [
    (HEADS, dict(experts=4)),
    ((WITH_SPANS,), dict(experts=0, max_span=20)),
  ],
)
def test_rematerialization_changes_no_value_and_no_gradient(patterns, changes):
  """The sums of gradients, whose order differs, are rounded differently."""

  def run(remat):
    function, params = gradient(remat, patterns, **changes)
    return jax.jit(function)(params)

  def close(x, y):
    assert np.abs(x - y).max() <= 1e-6 * np.abs(y).max()

  values, gradients = run("none")
  for remat in schema.REMATS:
    found, of_parameters = run(remat)
    jax.tree.map(np.testing.assert_array_equal, found, values)
    jax.tree.map(close, of_parameters, gradients)
