"""Tests of cache.py: plans from the pattern alone, steps against a pass."""

import catalogue
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from sparse_transformer import patterns
from sparse_transformer.model import kv_cache as cache, transformer as model_lib
from sparse_transformer.patterns import (
  BigBird,
  Block,
  Causal,
  Local,
  Strided,
  Summary,
  analysis as structure,
)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
  st.sampled_from(catalogue.CAUSAL), st.integers(1, 70), st.data()
)
def test_every_row_finds_its_keys(pattern, n, data):
  plan = cache.plan(pattern, n)
  assert plan.size == structure.cache_size(pattern, n)
  matrix, held = pattern.matrix(n), np.full(plan.size + 1, -1)
  start = data.draw(st.integers(0, n))
  # What prefill leaves, then what the steps write.
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
def test_what_the_layers_of_the_paper_keep_and_read(pattern, size, width):
  plan = cache.plan(pattern, 12_288)
  # The last keys of each column of Strided are read by themselves alone.
  assert (plan.size, plan.width) == (size, width)


def test_pattern_that_looks_ahead_is_refused():
  with pytest.raises(ValueError, match="see later keys"):
    cache.plan(Local(3, causal=False), 10)


LENGTH = 40


def network(layers, **changes):
  """(model.Config, params with large random values)."""
  settings = dict(
    vocab_size=11,
    length=LENGTH,
    shape=(5, 8),
    patterns=layers,
    num_layers=len(layers),
    num_heads=len(layers[0]),
    width=8 * len(layers[0]),
    half_size=True,
    dropout=0.0,
    init="code",
    token_std=1.0,
    position_std=1.0,
    dtype="float32",
    remat="block",
    tile=8,
  )
  config = model_lib.Config(**settings | changes)
  return config, random_params(config)


def random_params(config):
  from flax import nnx

  make = lambda: model_lib.Transformer(config, rngs=nnx.Rngs(0))
  shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(make)))
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.4, x.dtype), shapes
  )


def stepwise(config, params, tokens_BL, start=0):
  """Logits of positions start, start + 1, ..., one after the other."""
  decoder, n = cache.Decoder(config), config.length

  @jax.jit
  def run(params, tokens_BL):
    def step(state, inputs):
      t, before_B, table = inputs
      logits, state = decoder.step(params, state, before_B, t, table)
      return state, logits

    before = jnp.roll(tokens_BL, 1, axis=1).T[start:]
    inputs = jnp.arange(start, n), before, decoder.tables(start, n)
    state = decoder.prefill(params, tokens_BL[:, :start])
    return lax.scan(step, state, inputs)[1].swapaxes(0, 1)

  return run(params, tokens_BL)


def check(config, params, start=0):
  tokens = np.random.default_rng(1).integers(11, size=(2, LENGTH))
  from sparse_transformer.training import step as training

  whole = jax.jit(training.make_apply(config))(params, tokens)
  found = stepwise(config, params, jnp.asarray(tokens), start)
  assert np.abs(whole).max() > 1
  np.testing.assert_allclose(found, whole[:, start:], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("pattern", catalogue.CAUSAL, ids=str)
def test_steps_give_the_logits_of_a_whole_pass(pattern):
  check(*network(((pattern, pattern),) * 2))


@pytest.mark.parametrize("start", [1, 17, LENGTH - 1])
def test_steps_go_on_behind_a_prompt(start):
  layers = (Local(5), Strided(5)), (Block(8) | Summary(8, 2), BigBird(4))
  check(*network(layers), start)


@pytest.mark.parametrize("mode", patterns.MODES)
@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_modes_and_layers_that_no_period_covers(name, mode):
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
  check(*network(layers), 6)


def test_heads_with_patterns_of_their_own_keep_their_order():
  heads = Local(3), Strided(4), Local(3), catalogue.Fifths()
  check(*network((heads,) * 3), 5)


def test_cache_of_bfloat16_is_half_as_large():
  layers = ((Local(5),) * 2,) * 2
  wide, narrow = (
    cache.Decoder(network(layers, dtype=dtype)[0])
    for dtype in ("float32", "bfloat16")
  )
  assert wide.num_bytes(3) == 2 * narrow.num_bytes(3)
  # 2 layers, 5 places and one for what nobody reads, 2 heads, K = 4, E = 8.
  assert wide.num_bytes(3) == 3 * 2 * 6 * 2 * (4 + 8) * 4
