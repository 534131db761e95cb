"""Tests of model/kv_cache.py."""

import functools

import catalogue
import hypothesis
import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from sparse_transformer import patterns
from sparse_transformer.attention.content import selection
from sparse_transformer.model import kv_cache
from sparse_transformer.patterns import (
  LSH,
  AdaptiveSpan,
  BigBird,
  Block,
  Local,
  Routing,
  Strided,
  Summary,
  TopBlocks,
  analysis,
)

# Plans.


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
  st.sampled_from(catalogue.CAUSAL), st.integers(1, 70), st.data()
)
def test_every_row_finds_its_keys(pattern, n, data):
  plan = kv_cache.make_plan(pattern, n)
  assert plan.size == analysis.cache_size(pattern, n)
  matrix, held = pattern.matrix(n), np.full(plan.size + 1, -1)
  start = data.draw(st.integers(0, n))
  # First what prefill leaves, then what the steps write.
  held[:] = plan.held(start)
  stop = min(n, start + 20)
  rows = plan.rows(start, stop)
  for t, row in zip(range(start, stop), rows, strict=True):
    held[plan.slots[t]] = t
    keys = held[row[row < plan.size]]
    np.testing.assert_array_equal(np.sort(keys), np.flatnonzero(matrix[t]))
    assert (row[len(keys) :] == plan.size).all()


def test_pattern_that_is_not_causal_is_rejected():
  with pytest.raises(ValueError, match="see later keys"):
    kv_cache.make_plan(Local(3, causal=False), 10)


# Steps.

LENGTH = 40


def network(layers, **changes):
  """A config with these patterns and keys narrower than values."""
  settings = dict(
    vocab_size=11,
    length=LENGTH,
    shape=(5, 8),
    patterns=layers,
    num_layers=len(layers),
    num_heads=len(layers[0]),
    width=8 * len(layers[0]),
    half_size=True,
    backend="dense",
  )
  return networks.config(**settings | changes)


def check_steps(config, start=0, batch=2, tol=2e-4):
  """Steps from a prompt of `start` symbols give the logits of a full pass."""
  decoder = kv_cache.Decoder(config)
  params = networks.random_params(config, std=0.4)
  tokens = networks.tokens(config, batch, seed=1)
  tables = decoder.tables(start, config.length)

  @jax.jit
  def steps(params, tokens_BL):
    def step(cache, inputs):
      t, last_B, table = inputs
      logits, cache = decoder.step(params, cache, last_B, t, table)
      return cache, logits

    last = jnp.roll(tokens_BL, 1, axis=1).T[start:]
    cache = decoder.prefill(params, tokens_BL[:, :start])
    inputs = jnp.arange(start, config.length), last, tables
    return lax.scan(step, cache, inputs)[1].swapaxes(0, 1)

  expected = networks.apply(config)(params, tokens)
  assert np.abs(expected).max() > 1
  np.testing.assert_allclose(
    steps(params, tokens), expected[:, start:], atol=tol, rtol=tol
  )


# Four patterns in one network, so that fewer networks are compiled.
@pytest.mark.parametrize("first", range(0, len(catalogue.CAUSAL), 4))
def test_steps_give_the_logits_of_a_full_pass(first):
  some = (*catalogue.CAUSAL, *catalogue.CAUSAL)[first : first + 4]
  check_steps(network((some[:2], some[2:])))


@pytest.mark.parametrize("start", [1, 17, LENGTH - 1])
def test_steps_continue_a_prompt(start):
  layers = (Local(5), Strided(5)), (Block(8) | Summary(8, 2), BigBird(4))
  check_steps(network(layers), start)


@pytest.mark.parametrize(
  "name, mode",
  [
    ("strided", "interleaved"),
    ("fixed", "heads"),
    pytest.param("fixed", "interleaved", marks=pytest.mark.soak),
    pytest.param("fixed", "merged", marks=pytest.mark.soak),
    pytest.param("strided", "heads", marks=pytest.mark.soak),
    pytest.param("strided", "merged", marks=pytest.mark.soak),
  ],
)
def test_layers_after_the_last_period_have_their_own_caches(name, mode):
  layers = patterns.assign(
    name,
    mode,
    num_layers=5,
    num_heads=3,
    stride=8,
    window=8,
    width=2,
    num_summaries=2,
  )
  check_steps(network(layers, backend="auto"), 6)


def test_steps_in_bfloat16_round_where_a_full_pass_does():
  layers = (Local(5), Strided(5)), (Block(8), BigBird(4))
  check_steps(network(layers, dtype="bfloat16"), 17, tol=0.02)


def test_heads_with_different_patterns_keep_their_order():
  heads = Local(3), Strided(4), Local(3), catalogue.Fifths()
  check_steps(network((heads,) * 3), 5)


@pytest.mark.parametrize("length", [1, 2])
def test_shortest_sequences_and_smallest_network(length):
  config = network(
    ((Local(3),),), length=length, shape=(length,), vocab_size=2, tile=0
  )
  check_steps(config, batch=1)
  if length > 1:
    check_steps(config, start=1, batch=1)


def test_cache_in_bfloat16_is_half_as_large():
  layers = ((Local(5),) * 2,) * 2
  wide, narrow = (
    kv_cache.Decoder(network(layers, dtype=dtype))
    for dtype in ("float32", "bfloat16")
  )
  assert wide.num_bytes(3) == 2 * narrow.num_bytes(3)
  # 2 layers, 5 slots and one for keys without a reader, 2 heads, K = 4, E = 8.
  assert wide.num_bytes(3) == 3 * 2 * 6 * 2 * (4 + 8) * 4


@pytest.mark.parametrize("start", [7, pytest.param(0, marks=pytest.mark.soak)])
def test_steps_choose_the_experts_of_a_full_pass(start):
  layers = (Local(5), Strided(5)), (Block(8), BigBird(4))
  check_steps(network(layers, experts=4, experts_per_token=1), start)


# Patterns that follow the content: the keys that steps find.

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
  """The directions of all heads, or of each."""

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
  "pattern, start",
  [
    (LSH(8, 4, 2), 49),
    (ROUTING, 1),
    pytest.param(TopBlocks(8, 3), 17, marks=pytest.mark.soak),
  ],
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


WITH_CONTENT = (
  (LSH(4, 4, 2), Block(5) | TopBlocks(5, 2), Local(4)),
  (Routing(3, 9) | Local(3), Strided(6) | AdaptiveSpan(9, 5), LSH(9, 6)),
)


@pytest.mark.parametrize(
  "start",
  [0, 18, *(pytest.param(t, marks=pytest.mark.soak) for t in (1, LENGTH - 1))],
)
def test_steps_follow_the_content_as_a_full_pass(start):
  check_steps(network(WITH_CONTENT * 2), start)
