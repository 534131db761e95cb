"""Tests of model/sampling.py; for the cache see test_cached.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import networks
from helpers.errors import refused

from sparse_transformer.model import sampling
from sparse_transformer.model.sampling import Sampler

LENGTH = networks.LENGTH
PLAIN = Sampler()


@functools.cache
def network():
  """(config, params) of a random network over 17 symbols."""
  config = networks.config(vocab_size=17, backend="dense")
  return config, networks.random_params(config)


def draw(apply, params, sampler=PLAIN, *, num, length=LENGTH, **options):
  """Sequences drawn without a cache."""
  decoder = sampling.Recompute(apply, length)
  empty = np.zeros((num, 0), "u1")
  drawn = decoder, params, sampler, empty, length
  return sampling.sample(*drawn, **options)[0]


def assert_shares(symbols, p):
  """Checks that symbols were drawn with these probabilities."""
  found = np.bincount(symbols, minlength=len(p)) / len(symbols)
  deviation = np.sqrt(p * (1 - p) / len(symbols))
  assert np.all(abs(found - p) <= 5 * deviation)


def test_temperature_zero_takes_the_most_probable_symbol_at_each_step():
  config, params = network()
  apply = networks.apply(config)
  found = draw(apply, params, Sampler(temperature=0.0), num=2)
  expected = np.zeros((2, LENGTH), np.uint8)
  for t in range(LENGTH):
    logits = np.asarray(apply(params, expected))
    expected[:, t] = logits[:, t].argmax(-1)

  np.testing.assert_array_equal(found, expected)
  assert found.dtype == np.uint8
  assert len(np.unique(found)) > 1


def test_samples_depend_on_their_seed_but_not_on_decoder_or_chunks(monkeypatch):
  config, params = network()
  cached = sampling.Cached(config)
  recomputed = sampling.Recompute(networks.apply(config), LENGTH)
  prompts = np.arange(20, dtype=np.uint8).reshape(4, 5) % 17

  def run(decoder, seed=3):
    drawn = decoder, params, Sampler(top_k=9), prompts, LENGTH
    return sampling.sample(*drawn, seed=seed)[0]

  found = run(cached)
  new = found[:, 5:]

  np.testing.assert_array_equal(found, run(recomputed))
  np.testing.assert_array_equal(found[:, :5], prompts)
  assert len(np.unique(new)) > 3
  assert (new[0] != new[1]).any()

  monkeypatch.setattr(sampling, "CHUNK", 4)
  np.testing.assert_array_equal(found, run(cached))
  assert (found != run(cached, seed=4)).any()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_symbols_are_drawn_from_the_softmax(temperature):
  num = 20_000
  logits = np.random.RandomState(0).normal(size=5).astype(np.float32)

  def apply(params, tokens_BL):
    return jnp.broadcast_to(params, (*tokens_BL.shape, 5))

  sampler = Sampler(temperature)
  drawn = draw(
    apply,
    logits[None, None],
    sampler,
    num=num,
    length=2,
  )
  first, second = np.asarray(drawn).T
  p = np.exp(logits / temperature)
  p /= p.sum()

  assert_shares(first, p)
  assert_shares(second, p)
  # Neighbors are drawn independently of each other.
  joint = np.mean((first == 0) & (second == 0))
  assert abs(joint - p[0] ** 2) < 5 * p[0] / np.sqrt(num)


def test_second_call_traces_nothing():
  traced = []

  def apply(params, tokens_BL):
    traced.append(tokens_BL.shape)
    return jnp.zeros((*tokens_BL.shape, 5)) + params

  params = np.zeros((1, 1, 5), np.float32)
  draw(apply, params, num=2)
  count = len(traced)
  draw(apply, params, num=2, seed=1)

  assert len(traced) == count > 0


def test_complete_prompts_are_returned_unchanged():
  prompts = np.arange(8, dtype=np.uint8).reshape(2, 4)
  decoder = sampling.Recompute(lambda *_: 0, 4)
  found, seconds = sampling.sample(decoder, {}, PLAIN, prompts, 4)
  np.testing.assert_array_equal(found, prompts)
  assert seconds == 0
  with refused("prompt of 4 positions"):
    sampling.sample(decoder, {}, PLAIN, prompts, 3)


def test_stop_is_checked_between_chunks_but_not_when_all_is_drawn(monkeypatch):
  monkeypatch.setattr(sampling, "CHUNK", 8)

  def apply(*_):
    return jnp.zeros((1, 20, 5))

  checks = []
  draw(apply, {}, num=1, check_stop=lambda: checks.append(1))

  assert len(checks) == 3  # at the start, and after two chunks of three


@pytest.mark.parametrize(
  "sampler, drawn",
  [
    (Sampler(top_k=1), [4]),
    (Sampler(top_k=2), [3, 4]),
    (Sampler(top_p=0.44), [4]),
    (Sampler(top_p=0.5), [3, 4]),
    (Sampler(top_p=0.8), [1, 3, 4]),
    (Sampler(top_k=2, top_p=0.55), [4]),  # 0.45 / 0.75 reach it
    (Sampler(temperature=10.0, top_k=3), [1, 3, 4]),
    (Sampler(top_k=2**70), [0, 1, 2, 3, 4]),
  ],
)
def test_top_symbols_are_drawn_in_their_proportions(sampler, drawn):
  p = np.array([0.05, 0.15, 0.05, 0.3, 0.45])
  logits = jnp.broadcast_to(jnp.log(p), (20_000, 5))
  found = sampler(logits, jax.random.key(0))

  is_drawn = np.isin(np.arange(5), drawn)
  expected = np.where(is_drawn, p, 0) ** (1 / sampler.temperature)
  assert_shares(np.asarray(found), expected / expected.sum())
