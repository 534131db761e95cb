"""Tests of the network, from its parameters to a traced step of training."""

import collections
import dataclasses
import functools
import importlib
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core

from configs import default
from sparse_transformer import attention, patterns
from sparse_transformer.model import transformer as model_lib
from sparse_transformer.patterns import Causal, Local, Strided
from sparse_transformer.training import step as training

LENGTH = 20
SETTINGS = dict(stride=6, window=4, width=2, num_summaries=2)


def assign(name="strided", mode="interleaved", num_layers=2, cycle=()):
  return patterns.assign(
    name, mode, num_layers=num_layers, num_heads=2, cycle=cycle, **SETTINGS
  )


def config(**changes):
  """A tiny network; its patterns are for the layers that are asked for."""
  settings = dict(
    vocab_size=7,
    length=LENGTH,
    shape=(4, 5),
    num_layers=2,
    num_heads=2,
    width=8,
    half_size=False,
    dropout=0.0,
    init="code",
    token_std=0.013,
    position_std=0.007,
    dtype="float32",
    remat="none",
    tile=8,
  )
  settings |= changes
  assigned = assign(num_layers=max(0, settings["num_layers"]))
  return model_lib.Config(**{"patterns": assigned} | settings)


def make(config, std=0.5, seed=0):
  """The network with large random parameters, none of them zero."""
  shapes = nnx.eval_shape(
    lambda: model_lib.Transformer(config, rngs=nnx.Rngs(0))
  )
  graph, shapes = nnx.split(shapes)
  rng = np.random.default_rng(seed)
  return nnx.merge(
    graph,
    jax.tree.map(
      lambda x: jnp.asarray(std * rng.normal(size=x.shape), x.dtype), shapes
    ),
  )


def run(model, symbols):
  return jax.jit(lambda symbols: model(symbols))(symbols)


def stream(model, x, key=None):
  """The residual stream behind all blocks."""
  return model._blocks(x, model.attend, None, key)[0]


def attend_to(heads):
  """What a block calls to attend to patterns."""
  return lambda q, k, v: (attention.attend(q, k, v, heads), None)


def tokens(config, batch=2, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(config.vocab_size, size=(batch, config.length))


def preset(name, **changes):
  """(config, source) of a file of configs/, without its data."""
  config = importlib.import_module(f"configs.{name}").get_config()
  for field, value in changes.items():
    config.model[field] = value
  shape, unit = {
    "cifar10": ((32, 32, 3), "bits/dim"),
    "cifar10_15m": ((32, 32, 3), "bits/dim"),
    "imagenet64": ((64, 64, 3), "bits/dim"),
    "enwik8": ((96, 128), "bits/byte"),
  }[name]
  source = types.SimpleNamespace(
    vocab_size=256, shape=shape, length=math.prod(shape), unit=unit
  )
  return config, source


# Parameters.


@pytest.mark.parametrize(
  "name, count, millions",
  [
    ("cifar10", 59_196_928, "59.2"),
    ("cifar10_15m", 14_910_976, "14.9"),
    ("enwik8", 94_949_888, "94.9"),
    ("imagenet64", 151_645_184, "151.6"),
  ],
)
def test_presets_have_the_published_number_of_parameters(name, count, millions):
  found = model_lib.count_parameters(model_lib.configure(*preset(name)))
  assert found == count
  assert f"{found / 1e6:.1f}" == millions


@pytest.mark.parametrize("init, half_size", [("code", True), ("paper", False)])
def test_initial_parameters_have_the_published_spread(init, half_size):
  d, layers = 128, 3
  model = model_lib.Transformer(
    config(
      vocab_size=256,
      length=64 * 64,
      shape=(64, 64, 1),
      width=d,
      num_layers=layers,
      half_size=half_size,
      init=init,
      token_std=0.02,
      position_std=0.03,
    ),
    rngs=nnx.Rngs(0),
  )
  inner = 2 * d if half_size else 4 * d
  into, out, mlp_out = {
    "code": (
      math.sqrt(0.125 / d),
      math.sqrt(0.125 * 0.5 / (d * layers)),
      math.sqrt(0.125 * 0.5 / (inner * layers)),
    ),
    "paper": (
      0.125 / math.sqrt(d),
      0.125 / math.sqrt(d) / math.sqrt(2 * layers),
      0.125 / math.sqrt(inner) / math.sqrt(2 * layers),
    ),
  }[init]
  token, position = {
    "code": (0.02, 0.03 / math.sqrt(2)),
    "paper": (0.125 / math.sqrt(d), 0.125 / math.sqrt(2 * d)),
  }[init]
  blocks = model.blocks
  expected = [
    (blocks.query.kernel, into),
    (blocks.key.kernel, into),
    (blocks.value.kernel, into),
    (blocks.out.kernel, out),
    (blocks.mlp_in.kernel, into),
    (blocks.mlp_out.kernel, mlp_out),
    (model.token.embedding, token),
    *((table.embedding, position) for table in model.position),
  ]
  for parameter, std in expected:
    # At least 8,192 draws: their spread is known to 1 %.
    np.testing.assert_allclose(np.std(parameter[...]), std, rtol=0.03)
    assert abs(np.mean(parameter[...])) < 0.05 * std
  # 128 draws: 6 %.
  np.testing.assert_allclose(np.std(model.start[...]), token, rtol=0.25)
  # Layers are drawn one by one.
  first, second, _ = np.asarray(blocks.query.kernel[...])
  assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05


@functools.cache
def untrained():
  return model_lib.Transformer(config(vocab_size=256), rngs=nnx.Rngs(0))


def test_initial_biases_are_zero_and_gains_one():
  params = nnx.to_pure_dict(nnx.state(untrained()))
  leaves = jax.tree_util.tree_leaves_with_path(params)
  by_name = {}
  for path, x in leaves:
    by_name.setdefault(path[-1].key, []).append(np.asarray(x))
  assert len(by_name["bias"]) == 9 and len(by_name["scale"]) == 3
  assert all((x == 0).all() for x in by_name["bias"])
  assert all((x == 1).all() for x in by_name["scale"])


def test_untrained_network_gives_every_symbol_the_same_probability():
  model = untrained()
  symbols = tokens(model.config)
  logits = run(model, symbols)
  assert logits.shape == (2, LENGTH, 256) and (logits == 0).all()
  losses = training.position_losses(logits, symbols)
  assert (losses == np.float32(math.log(256))).all()


def test_parameters_do_not_depend_on_patterns():
  def params(**changes):
    model = model_lib.Transformer(
      config(num_layers=4, **changes), rngs=nnx.Rngs(3)
    )
    return nnx.to_pure_dict(nnx.state(model))

  expected = params(patterns=((Causal(),) * 2,) * 4)
  for name, mode in CASES:
    found = params(patterns=assign(name, mode, num_layers=4))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# What a position sees.


# One factor is the same in every mode.
CASES = [
  ("dense", "merged"),
  ("local", "merged"),
  *((name, mode) for name in ("strided", "fixed") for mode in patterns.MODES),
]


def seen(settings):
  """Booleans [n, n]: which inputs may change the logits of a position."""
  return patterns.reach(settings.patterns, settings.length)


@pytest.mark.parametrize("backend", ["dense", "blocked"])
@pytest.mark.parametrize("name, mode", CASES)
def test_gradient_is_exactly_zero_where_the_patterns_do_not_reach(
  name, mode, backend
):
  # One axis of positions: each has an embedding of its own, added to the
  # symbol before it goes one place to the right.
  settings = config(
    shape=(LENGTH, 1), patterns=assign(name, mode), backend=backend
  )
  graph, params = nnx.split(make(settings))
  symbols = tokens(settings, batch=1)

  @jax.jit
  def gradient(params, i):
    def logit(params):
      return nnx.merge(graph, params)(symbols)[0, i, 3]

    return jax.grad(logit)(params)["position"][0]["embedding"][...]

  grads = np.stack([gradient(params, i) for i in range(LENGTH)])
  assert np.isfinite(grads).all()
  found = (grads != 0).any(-1)
  expected = np.zeros((LENGTH, LENGTH), bool)
  expected[:, :-1] = seen(settings)[:, 1:]
  np.testing.assert_array_equal(found, expected)
  assert not np.triu(found).any()  # position i: from those before it only


@pytest.mark.parametrize("backend", ["dense", "blocked"])
@pytest.mark.parametrize("name, mode", [("strided", "heads"), CASES[-2]])
def test_symbol_changes_only_what_the_patterns_reach(name, mode, backend):
  settings = config(patterns=assign(name, mode), backend=backend)
  model = make(settings)
  predict = jax.jit(lambda symbols: model(symbols))
  symbols = tokens(settings, batch=1)
  before = predict(symbols)
  expected = seen(settings)
  for j in range(LENGTH):
    other = symbols.copy()
    other[0, j] = (other[0, j] + 1) % settings.vocab_size
    changed = np.asarray(predict(other) != before).any((0, 2))
    reached = expected[:, j + 1] if j + 1 < LENGTH else np.zeros(LENGTH, bool)
    np.testing.assert_array_equal(changed, reached)


def test_backends_give_the_same_logits():
  settings = config(num_layers=3, patterns=assign("fixed", "merged", 3))
  symbols = tokens(settings)
  dense, blocked = (
    run(make(dataclasses.replace(settings, backend=backend)), symbols)
    for backend in ("dense", "blocked")
  )
  np.testing.assert_allclose(blocked, dense, rtol=1e-4, atol=1e-5)


# Its parts.


@pytest.mark.parametrize(
  "shape, places",
  [
    # Row and column of each position.
    ((2, 3), "00 01 02 10 11 12"),
    ((3, 2, 1), "00 01 10 11 20 21"),
    ((6, 1), "0 1 2 3 4 5"),
    # Row, column and channel.
    ((2, 2, 3), "000 001 002 010 011 012 100 101 102 110 111 112"),
  ],
)
def test_input_is_the_symbol_before_with_its_own_position(shape, places):
  places = [[int(c) for c in place] for place in places.split()]
  settings = config(shape=shape, length=len(places))
  model = make(settings)
  (symbols,) = tokens(settings, batch=1)
  table, start, tables = jax.tree.map(
    np.asarray,
    (
      model.token.embedding[...],
      model.start[...],
      [embed.embedding[...] for embed in model.position],
    ),
  )
  rows = [
    table[symbol] + sum(tables[axis][x] for axis, x in enumerate(place))
    for symbol, place in zip(symbols, places, strict=True)
  ]
  expected = np.stack([start, *rows[:-1]])
  found = model.embed(symbols[None])[0]
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_block_is_the_formula_of_the_paper():
  settings = config(half_size=True, width=8)
  _, params = nnx.split(make(settings, std=0.7).blocks)
  first = jax.tree.map(lambda p: p[0], params)
  graph = nnx.graphdef(model_lib.Block(settings, rngs=nnx.Rngs(0)))
  pattern = Local(4), Strided(6)
  x = np.random.default_rng(0).normal(size=(LENGTH, 8))
  block = nnx.merge(graph, first)
  found, _ = block(jnp.asarray(x[None], jnp.float32), attend_to(pattern))

  p = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(first))

  def linear(x, p):
    return x @ p["kernel"] + p["bias"]

  def norm(x, p):
    variance = x.var(-1, keepdims=True)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + 1e-5)
    return x * p["scale"] + p["bias"]

  def attention(x):
    q, k, v = (linear(x, p[name]) for name in ("query", "key", "value"))
    assert q.shape == k.shape == (LENGTH, 4) and v.shape == (LENGTH, 8)
    heads = []
    for head in (0, 1):
      q_h, k_h, v_h = (np.split(x, 2, axis=1)[head] for x in (q, k, v))
      weights = np.exp(q_h @ k_h.T / math.sqrt(2))
      weights *= pattern[head].matrix(LENGTH)
      heads.append(weights @ v_h / weights.sum(1, keepdims=True))
    return linear(np.concatenate(heads, 1), p["out"])

  def mlp(x):
    x = linear(x, p["mlp_in"])
    assert x.shape == (LENGTH, 16)
    return linear(x / (1 + np.exp(-1.702 * x)), p["mlp_out"])

  a = attention(norm(x, p["attention_norm"]))
  b = mlp(norm(x + a, p["mlp_norm"]))
  np.testing.assert_allclose(found[0], x + a + b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  "num_layers, name, cycle, period",
  [
    (5, "strided", (), 2),
    (6, "strided", (1, 0, 0, 0), 4),
    (3, "strided", (1, 0, 0, 0), 3),  # shorter than its cycle
  ],
)
def test_scan_over_periods_is_the_blocks_one_by_one(
  num_layers, name, cycle, period
):
  assigned = assign(name, num_layers=num_layers, cycle=cycle)
  settings = config(num_layers=num_layers, patterns=assigned)
  assert model_lib._period(assigned) == period
  model = make(settings, std=0.3)
  symbols = tokens(settings)

  def one_by_one(symbols):
    graph, params = nnx.split(model.blocks)
    x = model.embed(symbols)
    for layer in range(num_layers):
      one = jax.tree.map(lambda p, layer=layer: p[layer], params)
      x, _ = nnx.merge(graph, one)(x, attend_to(assigned[layer]))
    return model.logits(model.norm(x))

  found, expected = run(model, symbols), jax.jit(one_by_one)(symbols)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_final_norm_and_logits_are_the_formula():
  settings = config(num_layers=1)
  model = make(settings)
  symbols = tokens(settings)
  x = jax.jit(lambda x: stream(model, model.embed(x)))(symbols)
  x = np.asarray(x, np.float64)
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  x = x * np.asarray(model.norm.scale[...]) + np.asarray(model.norm.bias[...])
  expected = x @ np.asarray(model.logits.kernel[...])
  found = run(model, symbols)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# Recomputation.


def remat_loss(remat):
  """(loss(params), params) of 6 layers with dropout."""
  settings = config(
    num_layers=6,
    patterns=((Local(20),) * 2,) * 6,
    width=32,
    length=96,
    shape=(96, 1),
    dropout=0.3,
    remat=remat,
    tile=16,
  )
  graph, params = nnx.split(make(settings, std=0.2))
  symbols = tokens(settings)

  def loss(params):
    logits = nnx.merge(graph, params)(symbols, key=jax.random.key(1))
    return training.position_losses(logits, symbols).mean()

  return loss, params


@functools.cache
def compiled_gradient(remat):
  """(loss, gradients, bytes of temporary memory)."""
  loss, params = remat_loss(remat)
  compiled = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
  memory = compiled.memory_analysis().temp_size_in_bytes
  return *compiled(params), memory


@pytest.mark.parametrize("remat", model_lib.REMATS[1:])
@pytest.mark.usefixtures("optimized")
def test_recomputation_changes_no_gradient(remat):
  loss, grads, _ = compiled_gradient("none")
  found_loss, found, _ = compiled_gradient(remat)
  np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
    found,
    grads,
  )


@pytest.mark.usefixtures("optimized")
def test_recomputation_saves_memory():
  none, attention, outside, block = (
    compiled_gradient(remat)[2] for remat in model_lib.REMATS
  )
  assert block < outside < attention < none
  assert outside < none / 2


# [layers, batch, n, heads, width of a head]; the lse has no width.
ATTENTION_OUTPUTS = {(6, 2, 96, 2, 16): 1, (6, 2, 96, 2): 1}


@pytest.mark.parametrize(
  "remat, queries_and_outputs, mlp",
  [
    ("none", {(6, 2, 96, 2, 16): 4, (6, 2, 96, 2): 1}, True),
    ("attention", {}, True),
    ("block_but_attention", ATTENTION_OUTPUTS, False),
    ("block", {}, False),
  ],
)
def test_what_the_backward_pass_keeps(remat, queries_and_outputs, mlp):
  loss, params = remat_loss(remat)
  pullback = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
  saved = collections.Counter(x.shape for x in jax.tree.leaves(pullback))
  of_attention = {s: c for s, c in saved.items() if s[:4] == (6, 2, 96, 2)}
  assert of_attention == queries_and_outputs
  assert ((6, 2, 96, 128) in saved) == mlp  # the MLP's inner width
  # Never scores: nothing has two axes of positions.
  assert not any(shape.count(96) > 1 for shape in saved)


def test_attention_is_not_run_again_when_its_outputs_are_kept():
  def products(remat):
    loss, params = remat_loss(remat)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    # Of tiles: [tiles, batch, heads, positions, ...].
    return sum(
      equation.primitive.name == "dot_general"
      and equation.outvars[0].aval.ndim == 5
      for equation in equations(jaxpr)
    )

  assert products("block") == 2 + 2 + 5
  assert products("block_but_attention") == products("none") == 2 + 5


# Dropout.


def test_dropout_follows_its_key():
  settings = config(dropout=0.5)
  model = make(settings)
  symbols = tokens(settings)
  first, second = jax.random.split(jax.random.key(0))
  drop = jax.jit(lambda key: model(symbols, key=key))
  np.testing.assert_array_equal(drop(first), drop(first))
  assert (drop(first) != drop(second)).any()


def test_dropout_needs_a_key_and_a_rate():
  settings = config(dropout=0.5)
  symbols, key = tokens(settings), jax.random.key(0)
  plain = make(config())
  expected = run(plain, symbols)
  np.testing.assert_array_equal(run(make(settings), symbols), expected)
  no_rate = jax.jit(lambda key: plain(symbols, key=key))(key)
  # Compiled on its own, so not rounded alike.
  np.testing.assert_allclose(no_rate, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("branch", ["attention", "mlp"])
def test_dropout_acts_at_the_end_of_each_branch(branch):
  settings = config(dropout=0.25, width=64)
  block = model_lib.Block(settings, rngs=nnx.Rngs(0))
  silent = block.mlp_out if branch == "attention" else block.out
  silent.kernel[...] = jnp.zeros_like(silent.kernel[...])
  x = jax.random.normal(jax.random.key(1), (2, LENGTH, 64))
  attend, key = attend_to((Local(4),) * 2), jax.random.key(2)
  whole = np.asarray(block(x, attend)[0] - x)
  dropped = np.asarray(block(x, attend, key)[0] - x)
  gone = dropped == 0
  # 2,560 draws: 0.25 is met within 0.01 (one standard deviation).
  assert abs(gone.mean() - 0.25) < 0.04
  np.testing.assert_allclose(dropped[~gone], whole[~gone] / 0.75, atol=1e-5)


def test_branches_and_layers_drop_by_keys_of_their_own():
  same = ((Local(4),) * 2,) * 2
  settings = config(dropout=0.5, width=64, patterns=same)
  model = make(settings, std=0.1)
  x = jnp.zeros((1, LENGTH, 64))
  # Constant branches: what was dropped can be read off the sum.
  for name, value in (("out", 1.0), ("mlp_out", 3.0)):
    part = getattr(model.blocks, name)
    part.kernel[...] = jnp.zeros_like(part.kernel[...])
    scale = jnp.array([[1.0], [10.0]])
    part.bias[...] = value * scale * jnp.ones_like(part.bias[...])
  out = jax.jit(lambda x, key: stream(model, x, key))(x, jax.random.key(0))
  out = out.ravel() / 2
  # Every sum of a part of 1, 3, 10, 30 occurs about equally often.
  values, counts = np.unique(np.round(out), return_counts=True)
  assert len(values) == 16
  assert counts.min() > 40  # of 80 expected


# Precision.


def test_bfloat16_keeps_parameters_and_logits_in_float32():
  settings = config(dtype="bfloat16", width=32)
  model = make(settings, std=0.2)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(nnx.state(model)))
  symbols = tokens(settings)
  x = jax.eval_shape(lambda x: stream(model, model.embed(x)), symbols)
  assert x.dtype == jnp.bfloat16
  found = run(model, symbols)
  assert found.dtype == jnp.float32
  expected = run(make(config(width=32), std=0.2), symbols)
  # 8 bits of mantissa, rounded some ten times on the way.
  assert 0 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


# Errors.


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(num_layers=0), ["model.num_layers", "at least 1", "0"]),
    (dict(width=0), ["model.width", "got 0"]),
    (dict(num_heads=3), ["num_heads=3", "width=8"]),
    (
      dict(num_heads=8, half_size=True),
      ["num_heads=8", "width=8", "the 4 of queries"],
    ),
    (dict(dropout=1.0), ["model.dropout=1.0", "[0, 1)"]),
    (dict(dropout=-0.1), ["model.dropout=-0.1"]),
    (dict(init="xavier"), ["model.init 'xavier'", "code, paper"]),
    (
      dict(remat="all"),
      ["model.remat 'all'", "none, attention, block_but_attention, block"],
    ),
    (dict(dtype="float16"), ["model.dtype 'float16'", "float32, bfloat16"]),
  ],
)
def test_network_that_makes_no_sense_is_refused(changes, words):
  with pytest.raises(ValueError) as error:
    config(**changes)
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize("field", ["stride", "window"])
@pytest.mark.parametrize("value", [0, 65])
def test_pattern_longer_than_the_sequence_is_refused(field, value):
  settings = default.get_config()
  settings.attention.update(stride=8, window=8, width=2)
  settings.attention[field] = value
  source = types.SimpleNamespace(vocab_size=17, shape=(8, 8), length=64)
  with pytest.raises(ValueError, match=f"{field}={value} .* 64 positions"):
    model_lib.configure(settings, source)


def test_config_becomes_the_network_it_describes():
  settings, source = preset("cifar10")
  network = model_lib.configure(settings, source)
  assert network.length == 3072 and network.axes == (32, 32, 3)
  assert (network.qk_width, network.mlp_width) == (128, 512)
  strided, *local = network.patterns[:4]
  assert strided == (Strided(96),) * 2
  assert local == [(Local(96),) * 2] * 3


def test_sequence_that_is_too_long_is_refused():
  settings = config()
  with pytest.raises(ValueError, match="21 tokens, .* has 20 positions"):
    make(settings)(np.zeros((1, 21), int))


def test_prefix_has_the_logits_of_the_whole():
  settings = config()
  model = make(settings)
  symbols = tokens(settings)
  whole, prefix = run(model, symbols), run(model, symbols[:, :9])
  np.testing.assert_allclose(prefix, whole[:, :9], rtol=1e-4, atol=1e-5)


# A whole step of training, traced.


def traced_step(settings, source, batch=1):
  network = model_lib.configure(settings, source)
  optimizer = training.make_optimizer(settings)
  state = jax.eval_shape(lambda: training.init_state(network, optimizer, 0))
  step = functools.partial(
    training.train_step,
    apply=training.make_apply(network),
    optimizer=optimizer,
    config=settings,
  )
  symbols = jax.ShapeDtypeStruct((batch, source.length), jnp.uint8)
  return jax.jit(step).trace(state, symbols)


def equations(jaxpr):
  """All equations, those of nested jaxprs (scan, remat, ...) included."""
  for equation in jaxpr.eqns:
    yield equation
    for value in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr)),
    ):
      if isinstance(value, core.ClosedJaxpr):
        yield from equations(value.jaxpr)
      elif isinstance(value, core.Jaxpr):
        yield from equations(value)


def quadratic(traced, n, tile):
  """Shapes with n x n entries, or all keys beside a tile of queries."""
  shapes = {
    variable.aval.shape
    for equation in equations(traced.jaxpr.jaxpr)
    for variable in (*equation.invars, *equation.outvars)
    if hasattr(variable.aval, "shape")
  }
  assert any(n in shape for shape in shapes)  # the walk has seen something
  return [
    shape
    for shape in shapes
    if sum(size >= n for size in shape) > 1
    or max(shape, default=0) > n + tile
    or (max(shape, default=0) >= n and shape[-2:-1] == (tile,))
  ]


def test_step_of_enwik8_has_nothing_of_size_n_by_n():
  settings, source = preset("enwik8")
  assert quadratic(traced_step(settings, source), 12_288, 64) == []


@pytest.mark.parametrize("remat", model_lib.REMATS)
@pytest.mark.parametrize("backend", ["dense", "blocked"])
def test_only_the_reference_has_something_of_size_n_by_n(backend, remat):
  settings, source = preset("enwik8", num_layers=2, remat=remat)
  # Nothing else is this long: vocabulary, widths and batch are smaller.
  source.shape, source.length = (20, 128), 2560
  settings.attention.backend = backend
  found = quadratic(traced_step(settings, source), 2560, 64)
  assert bool(found) == (backend == "dense")


def test_deep_network_is_compiled_as_one_period():
  sizes = []
  for num_layers in (8, 128):
    settings, source = preset("cifar10", num_layers=num_layers)
    traced = traced_step(settings, source, batch=settings.train.batch_size)
    sizes.append(sum(1 for _ in equations(traced.jaxpr.jaxpr)))
  assert sizes[0] == sizes[1]
  traced.lower().compile()


def test_walk_finds_a_tile_of_queries_beside_all_keys():
  def row_by_row(q_LK):
    def scores(_, q_TK):
      return None, jnp.einsum("tk,mk->tm", q_TK, q_LK).sum()

    return jax.lax.scan(scores, None, q_LK.reshape(-1, 64, 8))[1]

  q_LK = jax.ShapeDtypeStruct((2560, 8), jnp.float32)
  assert (64, 2560) in quadratic(jax.jit(row_by_row).trace(q_LK), 2560, 64)
