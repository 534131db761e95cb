"""Networks decode with a cache what they predict at once."""

import functools

import jax
import numpy as np
import pytest
from helpers import catalogue, networks
from helpers.cases import soak

from sparse_transformer.model import sampling
from sparse_transformer.patterns import (
  LSH,
  BigBird,
  Block,
  Local,
  Routing,
  Strided,
  Summary,
  TopBlocks,
)

LENGTH = 40
STATIC = (
  (
    Local(5),
    Strided(5),
    Local(5),
  ),
  (
    Block(8) | Summary(8, 2),
    BigBird(4),
    catalogue.Fifths(),
  ),
)
CONTENT = (
  (
    LSH(4, 4, 2),
    Block(5) | TopBlocks(5, 2),
    Local(4),
  ),
  (
    Routing(3, 9) | Local(3),
    Strided(6),
    LSH(9, 6),
  ),
)
OPTIONS = dict(key_heads=1, sinks=True, positions="rotary")


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
  decoder = sampling.Cached(config)
  return jax.jit(decoder.prefill), jax.jit(decoder.step)


TWO_PERIODS_AND_A_LAYER = STATIC * 2 + STATIC[:1]  # which has its own cache


ONE_POSITION = dict(
  length=1,
  shape=(1,),
  vocab_size=2,
  tile=0,
)


@pytest.mark.parametrize(
  "layers, start, changes",
  [
    (CONTENT * 2, 0, {}),
    soak(CONTENT * 2, 18, {}),
    soak(TWO_PERIODS_AND_A_LAYER, 1, {}),
    soak(TWO_PERIODS_AND_A_LAYER, 17, {}),
    soak(TWO_PERIODS_AND_A_LAYER, LENGTH - 1, {}),
    soak(STATIC, 17, dict(dtype="bfloat16")),
    (STATIC, 7, OPTIONS | dict(experts=4)),
    soak(((Local(3),),), 0, ONE_POSITION),
  ],
)
def test_steps_from_a_prompt_give_the_logits_of_a_full_pass(
  layers, start, changes
):
  config = network(layers, **changes)
  prefill, step = compiled(config)
  params = networks.random_params(config, std=0.4)
  tokens = networks.tokens(config, seed=1)
  expected = np.asarray(networks.apply(config)(params, tokens))
  tolerance = 0.02 if config.dtype == "bfloat16" else 2e-4
  cache = prefill(params, tokens[:, :start])
  for t in range(start, config.length):
    before = tokens[:, t - 1]
    found, cache = step(params, cache, before, np.int32(t))
    np.testing.assert_allclose(
      found,
      expected[:, t],
      atol=tolerance,
      rtol=tolerance,
    )
