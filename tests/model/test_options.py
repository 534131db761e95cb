"""Options of the network: key heads, sinks, rotary positions, documents."""

import dataclasses

import jax
import jax.numpy as jnp
import networks
import numpy as np
import optax
import pytest

from sparse_transformer import attention, model
from sparse_transformer.model import kv_cache, transformer
from sparse_transformer.patterns import Block, Causal, Local, TopBlocks
from sparse_transformer.training import optimizer

# Layers of `networks.config`, whose 20 positions have 2 heads of width 4.
LAYERS = (Local(6),) * 4, (Causal(),) * 4
OPTIONS = dict(num_heads=4, key_heads=2, sinks=True, positions="rotary_local")


def network(**changes):
  settings = dict(patterns=LAYERS, width=16) | OPTIONS | changes
  return networks.config(**settings)


# The attention of published models, written out.


@dataclasses.dataclass(frozen=True)
class Published:
  """Widths of an attention layer, and what is special about it."""

  hidden: int
  heads: int
  key_heads: int
  width: int
  sinks: bool
  normalizes: bool  # queries and keys
  base_of: dict  # of rotary positions, by window; None: dense
  windows: tuple  # of layers


# openai/gpt-oss-20b; google/gemma-3-4b.
GPT_OSS = Published(
  2880, 64, 8, 64, True, False, {128: 150_000, None: 150_000}, (128, None)
)
GEMMA3 = Published(
  2560,
  8,
  4,
  256,
  False,
  True,
  {1024: 10_000, None: 1_000_000},
  (1024,) * 5 + (None,),
)
# Widths that a test can afford, and windows shorter than the sequence.
GPT_OSS_SMALL = dataclasses.replace(GPT_OSS, hidden=512)
GEMMA3_SMALL = dataclasses.replace(
  GEMMA3,
  hidden=512,
  base_of={64: 10_000, None: 1_000_000},
  windows=(64,) * 5 + (None,),
)


def weights(published, window, seed=0):
  """Random weights that keep the scale of activations."""
  rng, of = np.random.default_rng(seed), published

  def matrix(rows, columns):
    return rng.normal(size=(rows, columns)).astype(np.float32) / np.sqrt(rows)

  wide, narrow = of.heads * of.width, of.key_heads * of.width
  return dict(
    q=matrix(of.hidden, wide),
    k=matrix(of.hidden, narrow),
    v=matrix(of.hidden, narrow),
    out=matrix(wide, of.hidden),
    sinks=rng.normal(size=of.heads).astype(np.float32),
  )


def normalized(x):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def plain_layer(of, window, w, x_LD):
  """x + attention, in float64, head by head."""
  n, half = len(x_LD), of.width // 2
  w = {name: x.astype(np.float64) for name, x in w.items()}
  at = np.arange(n)
  turns = at[:, None] * of.base_of[window] ** (-np.arange(half) / half)

  def rotated(x_LK):
    x_LK = normalized(x_LK) if of.normalizes else x_LK
    pairs = (x_LK[:, :half] + 1j * x_LK[:, half:]) * np.exp(1j * turns)
    return np.concatenate([pairs.real, pairs.imag], 1)

  y_LD = normalized(x_LD)
  distance = at[:, None] - at
  visible = (distance >= 0) & (distance < (window or n))
  outs = []
  for head in range(of.heads):
    mine = slice(head * of.width, (head + 1) * of.width)
    other = head // (of.heads // of.key_heads)
    others = slice(other * of.width, (other + 1) * of.width)
    q, k = rotated(y_LD @ w["q"][:, mine]), rotated(y_LD @ w["k"][:, others])
    scores = np.where(visible, q @ k.T / np.sqrt(of.width), -np.inf)
    p = np.exp(scores)
    sink = np.exp(w["sinks"][head]) if of.sinks else 0
    p /= p.sum(1, keepdims=True) + sink
    outs.append(p @ (y_LD @ w["v"][:, others]))
  return x_LD + np.concatenate(outs, 1) @ w["out"]


def layer(of, window, w, x_LD):
  """The same with `attend`."""
  n, base = len(x_LD), of.base_of[window]
  y_LD = x_LD * jax.lax.rsqrt((x_LD**2).mean(-1, keepdims=True) + 1e-6)
  q, k, v = (
    (y_LD @ w[name]).reshape(1, n, -1, of.width) for name in ("q", "k", "v")
  )
  if of.normalizes:
    q, k = (
      x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) for x in (q, k)
    )
  at = jnp.arange(n)
  q, k = (transformer.rotate(x, at, base) for x in (q, k))
  pattern = Causal() if window is None else Local(window)
  sinks = w["sinks"] if of.sinks else None
  out = attention.attend(q, k, v, pattern, sinks_H=sinks)
  return x_LD + out.reshape(n, -1) @ w["out"]


@pytest.mark.parametrize(
  "of, n",
  [
    (GPT_OSS_SMALL, 192),
    (GEMMA3_SMALL, 192),
    pytest.param(GPT_OSS, 192, marks=pytest.mark.soak),
    pytest.param(GEMMA3, 1200, marks=pytest.mark.soak),
  ],
  ids=["gpt_oss_small", "gemma3_small", "gpt_oss", "gemma3"],
)
def test_attention_of_published_models(of, n):
  x_LD = np.random.default_rng(1).normal(size=(n, of.hidden))
  expected, found = x_LD, jnp.asarray(x_LD, jnp.float32)
  for seed, window in enumerate(of.windows):
    w = weights(of, window, seed)
    expected = plain_layer(of, window, w, expected)
    found = jax.jit(lambda w, x, window=window: layer(of, window, w, x))(
      w, found
    )
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# The network.


def test_options_change_only_their_own_parameters():
  init = lambda config: jax.jit(lambda: model.init_params(config, 0))
  plain = jax.eval_shape(init(networks.config()))
  options = dict(patterns=LAYERS, width=16, num_heads=4)
  without = jax.eval_shape(init(networks.config(**options)))
  assert set(plain) == set(without)
  params = init(network())()
  assert set(params) ^ set(without) == {"sinks", "position"}
  assert params["sinks"].shape == (2, 4) and not params["sinks"].any()
  assert params["blocks"]["key"]["kernel"].shape == (2, 16, 8)
  assert params["blocks"]["value"]["kernel"].shape == (2, 16, 8)


def test_rotation_depends_on_distance_only():
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

  def product(t, s):
    at = (jnp.array([t]), jnp.array([s]))
    q_t, k_s = (
      transformer.rotate(x, i, 100.0) for x, i in zip((q, k), at, strict=True)
    )
    return (q_t * k_s).sum()

  np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-4)
  assert abs(product(7, 3) - product(7, 2)) > 1e-3


@pytest.mark.parametrize(
  "changes",
  [
    dict(),
    dict(
      key_heads=1,
      positions="rotary",
      patterns=((Block(4) | TopBlocks(4, 2),) * 4,) * 2,
    ),
  ],
)
def test_decoding_equals_the_whole(changes):
  config = network(**changes)
  params = networks.random_params(config)
  tokens_BL = networks.tokens(config)
  expected = np.asarray(networks.apply(config)(params, tokens_BL))
  decoder = kv_cache.Decoder(config)
  caches = jax.jit(decoder.prefill)(params, tokens_BL[:, :3])
  step = jax.jit(decoder.step)
  for t in range(3, 20):
    found, caches = step(params, caches, tokens_BL[:, t - 1], np.int32(t))
    np.testing.assert_allclose(found, expected[:, t], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  "layers", [LAYERS, ((TopBlocks(2, 3) | Block(2),) * 4,)]
)
def test_documents_do_not_see_each_other(layers):
  config = network(
    patterns=layers * (2 // len(layers)), separator=0, vocab_size=7
  )
  params = networks.random_params(config)
  tokens_L = np.random.default_rng(0).integers(1, 7, size=20)
  tokens_L[[5, 12]] = 0
  first, last = tokens_L.copy(), tokens_L.copy()
  first[:5] = 1 + tokens_L[:5] % 6
  last[13:] = 1 + tokens_L[13:] % 6
  apply = networks.apply(config)
  found, *others = (
    np.asarray(apply(params, x[None])[0]) for x in (tokens_L, first, last)
  )
  for other, changed in zip(others, (range(6), range(13, 20)), strict=True):
    same = np.delete(np.arange(20), changed)
    np.testing.assert_array_equal(found[same], other[same])
    assert (found != other).any()
  with pytest.raises(ValueError, match="one document.*--nocache"):
    kv_cache.Decoder(config).init(1)


def test_training_on_text_lowers_the_loss_and_moves_sinks():
  text = b"Sparse attention reads some of the keys.\0" * 4
  rows = np.frombuffer(text, np.uint8)[:160].reshape(8, 20).astype(np.int32)
  config = network(vocab_size=256, separator=0, token_std=0.1)
  params = jax.jit(lambda: model.init_params(config, 0))()
  apply = model.make_apply(config)
  assert not optimizer.decays(params)["sinks"]
  adam = optax.adam(0.01)

  def nats(params):
    logits = apply(params, rows)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows).mean()

  @jax.jit
  def step(params, state):
    loss, grads = jax.value_and_grad(nats)(params)
    updates, state = adam.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  state, losses = jax.jit(adam.init)(params), []
  for _ in range(30):
    params, state, loss = step(params, state)
    losses.append(float(loss))
  assert losses[0] == pytest.approx(np.log(256), rel=1e-3)
  assert losses[-1] < losses[0] / 2
  assert params["sinks"].all()


def test_layouts_of_published_models_can_have_options():
  layers = networks.assign("gpt_oss", num_heads=4)
  config = network(patterns=layers)
  assert [config.rotates(i) for i in range(2)] == [True, False]
