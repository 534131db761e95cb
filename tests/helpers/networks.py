"""Helpers for several test files: tiny networks with random parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from sparse_transformer import model, patterns
from sparse_transformer.model import transformer

LENGTH = 20


def assign(name="strided", mode="interleaved", num_layers=2, **changes):
  """Patterns of all layers, with two heads each."""
  settings = dict(
    num_heads=2,
    stride=6,
    window=4,
    width=2,
    num_summaries=2,
  )
  return patterns.assign(
    name, mode, num_layers=num_layers, **settings | changes
  )


def config(**changes):
  """A tiny network; without `patterns`, they are strided, interleaved."""
  settings = dict(
    vocab_size=7,
    length=LENGTH,
    shape=(4, 5),
    num_layers=2,
    num_heads=2,
    width=8,
    half_size=False,
    dropout=0.0,
    token_std=0.013,
    position_std=0.007,
    dtype="float32",
    remat="none",
    tile=8,
  )
  settings |= changes
  assigned = assign(num_layers=max(0, settings["num_layers"]))
  return model.Config(**{"patterns": assigned} | settings)


def random_params(config, std=0.5, seed=0):
  """Large random parameters, none of them zero."""
  shapes = model.param_shapes(config)
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(std * rng.normal(size=x.shape), x.dtype), shapes
  )


def make(config, **random):
  """The network with `random_params`."""
  return transformer.bind(config, random_params(config, **random))


@functools.cache
def apply(config):
  """The network as a jitted function, compiled once for all tests."""
  return jax.jit(model.make_apply(config))


def tokens(config, batch=2, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(config.vocab_size, size=(batch, config.length))


def equations(jaxpr):
  """All equations, including those of nested jaxprs (scan, remat, ...)."""
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
