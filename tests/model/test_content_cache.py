"""Decoding with patterns that follow the content."""

import functools

import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest

from sparse_transformer.attention import selection
from sparse_transformer.model import kv_cache, sampling
from sparse_transformer.patterns import (
  LSH,
  AdaptiveSpan,
  Block,
  Local,
  Routing,
  Strided,
  TopBlocks,
)

# The keys that steps find.

BATCH, HEADS, WIDTH = 2, 3, 8
ROUTING = Routing(5, 11)
ALGEBRA = (
  Strided(5) | TopBlocks(6, 2) | LSH(60, 4, 2),  # a window for all keys
  (LSH(5, 4) - ROUTING) & Local(30),
  Strided(4) | AdaptiveSpan(20, ramp=4),
  Block(8) & AdaptiveSpan(20, ramp=4),  # whose slots are used again
  pytest.param(
    (Local(9) | LSH(4, 4, 3)) & (TopBlocks(6, 3) | Strided(4)),
    marks=pytest.mark.soak,
  ),
)


def directions_of(pattern):
  """Those of all heads, or of each."""

  def of(content):
    if isinstance(content, AdaptiveSpan):
      return jnp.array([0.0, 7.3, 20.0])
    drawn = content.directions(WIDTH)
    if drawn is not None:
      return jnp.asarray(drawn)
    shape = HEADS, content.num_directions, WIDTH
    return jax.random.normal(jax.random.key(7), shape)

  return {c: of(c) for c in pattern.contents() if not isinstance(c, TopBlocks)}


def check_keys(pattern, n, starts):
  """After prompts, steps find the keys of one pass."""
  given = directions_of(pattern)
  shape = 2, BATCH, n, HEADS, WIDTH
  q, k = jax.random.normal(jax.random.key(n), shape)
  heads = (pattern,) * HEADS
  realize = functools.partial(selection.realize, heads, directions=given)
  expected = np.asarray(jax.jit(realize)(q, k))

  plan = kv_cache.make_plan(pattern, n)
  nums = kv_cache.num_labels(pattern, n, WIDTH)

  @jax.jit
  def add(labels, start, q, k):  # to the second of two layers
    return kv_cache.add_labels(
      pattern, labels, 1, start, q, k.swapaxes(1, 2), given
    )

  @jax.jit
  def bias_of(labels, t, held):
    # Values say which positions are read.
    k = jnp.zeros((2, BATCH, HEADS, len(held), WIDTH))
    v = jnp.broadcast_to(held[:, None], (*k.shape[:4], 1))
    return plan.take((k, v), labels, 1, t, held, given)[1:]

  for start in starts:
    labels = [jnp.zeros((2, BATCH, HEADS, n, num), jnp.int32) for num in nums]
    if start:
      labels = add(labels, 0, q[:, :start], k[:, plan.held(start)])
    for t, held in enumerate(plan.reads(start, n), start):
      labels = add(labels, t, q[:, t : t + 1], k[:, held])
      at, bias = bias_of(labels, t, held)
      real = np.broadcast_to(np.isfinite(bias), at.shape[:3])
      found = np.zeros((BATCH, HEADS, n), int)
      np.add.at(found, (*np.nonzero(real)[:2], at[real][:, 0]), 1)
      row = np.broadcast_to(expected[:, :, t], found.shape)
      np.testing.assert_array_equal(found, row, f"{start=} {t=}")


@pytest.mark.parametrize(
  "pattern, start", [(LSH(8, 4, 2), 49), (ROUTING, 1), (TopBlocks(8, 3), 17)]
)
def test_steps_find_the_keys_of_one_pass(pattern, start):
  check_keys(pattern, 50, (0, start))


@pytest.mark.parametrize("pattern", ALGEBRA, ids=str)
def test_steps_find_the_keys_of_combinations(pattern):
  check_keys(pattern, 53, (23,))


@pytest.mark.parametrize("n", [1, 8])
def test_steps_of_short_sequences(n):
  check_keys(LSH(8, 2) | TopBlocks(7, 2), n, (0,))


def test_labels_are_small_beside_keys_and_values():
  def numbers(pattern):
    return kv_cache.num_labels(pattern, 12_288, 64)

  assert numbers(LSH(64, 192, 4)) == [4]
  assert numbers(Routing(64, 128) | Local(128)) == [1]
  assert numbers(TopBlocks(64, 8)) == [8]
  assert numbers(AdaptiveSpan(1024)) == []


# Networks.

LENGTH = 37
LAYERS = (
  (LSH(4, 4, 2), Block(5) | TopBlocks(5, 2), Local(4)),
  (Routing(3, 9) | Local(3), Strided(6) | AdaptiveSpan(9, 5), LSH(9, 6)),
)


@functools.cache
def decode():
  """(network, parameters, a jitted step) of networks with LAYERS, twice."""
  config = networks.config(
    vocab_size=11,
    length=LENGTH,
    shape=(LENGTH,),
    patterns=LAYERS * 2,
    num_layers=4,
    num_heads=3,
    width=24,
    half_size=True,
    backend="dense",
  )
  decoder = kv_cache.Decoder(config)
  params = networks.random_params(config, std=0.4)
  return config, decoder, params, jax.jit(decoder.step)


def logits_of_steps(tokens, start=0):
  """The logits [B, L, V] from position `start` on."""
  _, decoder, params, step = decode()
  cache = jax.jit(decoder.prefill)(params, tokens[:, :start])
  logits = []
  for t in range(start, LENGTH):
    table = jax.tree.map(lambda x: x[0], decoder.tables(t, t + 1))
    new, cache = step(params, cache, tokens[:, t - 1], t, table)
    logits.append(new)
  return np.stack(logits, 1)


@pytest.mark.parametrize(
  "start",
  [0, 18, *(pytest.param(t, marks=pytest.mark.soak) for t in (1, LENGTH - 1))],
)
def test_steps_give_the_logits_of_one_pass(start):
  config, _, params, _ = decode()
  tokens = networks.tokens(config, seed=1)
  expected = np.asarray(networks.apply(config)(params, tokens))
  assert np.abs(expected).max() > 1
  found = logits_of_steps(tokens, start)
  np.testing.assert_allclose(found, expected[:, start:], atol=2e-4, rtol=2e-4)


def test_steps_are_exact_and_independent_of_the_batch():
  config, *_ = decode()
  tokens, others = (networks.tokens(config, seed=seed) for seed in (1, 2))
  first, again = logits_of_steps(tokens), logits_of_steps(tokens)
  np.testing.assert_array_equal(first, again)
  others[0] = tokens[0]
  beside = logits_of_steps(others)
  np.testing.assert_array_equal(beside[0], first[0])
  assert (beside[1] != first[1]).any()


def test_samples_continue_a_prompt_by_the_most_probable_symbols():
  config, decoder, params, _ = decode()
  prompts = networks.tokens(config)[:, :18].astype(np.uint8)
  drawn, _ = sampling.sample(
    decoder,
    params,
    sampling.Sampler(temperature=0),
    num=2,
    length=LENGTH,
    prompts=prompts,
  )
  logits = networks.apply(config)(params, drawn)
  np.testing.assert_array_equal(drawn[:, :18], prompts)
  np.testing.assert_array_equal(drawn[:, 18:], logits.argmax(-1)[:, 18:])
