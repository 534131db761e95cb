"""Tests of model/kv_cache.py."""

import functools

import catalogue
import jax
import networks
import numpy as np
import pytest

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
)

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


@functools.cache
def compiled(config):
  """(fills caches, predicts a position): compiled once for all prompts."""
  decoder = kv_cache.Decoder(config)
  return jax.jit(decoder.prefill), jax.jit(decoder.step)


def check_steps(config, start=0, batch=2, tol=2e-4):
  """Steps from a prompt of `start` symbols give the logits of a full pass."""
  prefill, step = compiled(config)
  params = networks.random_params(config, std=0.4)
  tokens = networks.tokens(config, batch, seed=1)
  expected = np.asarray(networks.apply(config)(params, tokens))
  assert np.abs(expected).max() > 1
  cache = prefill(params, tokens[:, :start])
  for t in range(start, config.length):
    found, cache = step(params, cache, tokens[:, t - 1], np.int32(t))
    np.testing.assert_allclose(found, expected[:, t], atol=tol, rtol=tol)


@pytest.mark.parametrize("start", [1, 17, LENGTH - 1])
def test_steps_continue_a_prompt(start):
  layers = (Local(5), Strided(5)), (Block(8) | Summary(8, 2), BigBird(4))
  check_steps(network(layers), start)


@pytest.mark.parametrize(
  "name, mode",
  [
    ("strided", "interleaved"),
    pytest.param("fixed", "heads", marks=pytest.mark.soak),
    pytest.param("fixed", "interleaved", marks=pytest.mark.soak),
    pytest.param("fixed", "merged", marks=pytest.mark.soak),
    pytest.param("strided", "heads", marks=pytest.mark.soak),
    pytest.param("strided", "merged", marks=pytest.mark.soak),
  ],
)
def test_layers_after_the_last_period_have_their_own_caches(name, mode):
  layers = networks.assign(name, mode, 5, num_heads=3, stride=8, window=8)
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
  # 5 slots and one for keys without a reader; 2 layers, K = 4, E = 8.
  positions, numbers = 4 * 6, 3 * 2 * 6 * 2 * (4 + 8)
  assert wide.num_bytes(3) == 4 * numbers + positions
  assert narrow.num_bytes(3) == 2 * numbers + positions


@pytest.mark.parametrize("start", [7, pytest.param(0, marks=pytest.mark.soak)])
def test_steps_choose_the_experts_of_a_full_pass(start):
  layers = (Local(5), Strided(5)), (Block(8), BigBird(4))
  check_steps(network(layers, experts=4, experts_per_token=1), start)


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
