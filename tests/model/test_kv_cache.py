"""Tests of model/kv_cache.py."""

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
from sparse_transformer.model import kv_cache
from sparse_transformer.patterns import (
  BigBird,
  Block,
  Causal,
  Local,
  Strided,
  Summary,
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


@pytest.mark.parametrize(
  "pattern, size, width",
  [
    (Local(128), 128, 128),
    (Strided(128), 12_288 - 127, 96),
    (Block(128), 128, 128),
    (Summary(128, 32), 32 * 96, 32 * 96),
    (Block(128) | Summary(128, 32), 128 + 32 * 95, 128 + 32 * 95),
    (Causal() - Causal(), 0, 0),
  ],
  ids=str,
)
def test_slots_and_keys_per_step_in_the_layers_of_the_paper(
  pattern, size, width
):
  plan = kv_cache.make_plan(pattern, 12_288)
  # The last key in each column of Strided is read only by its own query.
  assert (plan.size, plan.width) == (size, width)


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
