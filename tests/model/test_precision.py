"""Tests of networks in bfloat16 and float16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import networks, runs

from sparse_transformer import model
from sparse_transformer.model import transformer
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import position_losses


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_residual_stream_and_logits_are_float32(dtype):
  config = networks.config(dtype=dtype, width=32)
  params = networks.random_params(config, 0.2)
  symbols = networks.tokens(config)
  network = transformer.bind(config, params)

  def residual_stream(symbols):
    return network.run_blocks(network.embed(symbols), network.attend)[0]

  assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}
  assert jax.eval_shape(residual_stream, symbols).dtype == jnp.float32
  found = networks.apply(config)(params, symbols)
  assert found.dtype == jnp.float32

  expected = networks.apply(networks.config(width=32))(params, symbols)
  # 8 bits of mantissa, or 11, rounded about ten times on the way.
  largest_error = np.abs(found - expected).max()
  assert 0 < largest_error < 0.05 * np.abs(expected).max()


def test_parameters_are_the_same_float32_with_x64():
  changes = {
    "attention.pattern": "Routing(4, 8)",
    "model.sinks": True,
  }
  experiment = Experiment(runs.tiny(**changes))
  expected = experiment.init()
  with jax.enable_x64(True):
    found = Experiment(experiment.config).init()
  trees = found.params, found.ema, found.opt_state

  dtypes = {x.dtype for x in jax.tree.leaves(trees)}
  assert dtypes <= {np.dtype("float32"), np.dtype("int32")}
  assert runs.arrays(found.params) == runs.arrays(expected.params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_of_an_embedding_is_summed_in_float32(dtype):
  config = networks.config(
    dtype=dtype,
    vocab_size=2,
    width=4,
  )
  params = networks.random_params(config)
  symbols = networks.tokens(config, batch=512)

  def total(params):
    x_BLD = transformer.bind(config, params).embed(jnp.asarray(symbols))
    return x_BLD.sum()

  found = jax.jit(jax.grad(total))(params)["token"]["embedding"]
  # The last symbol is not embedded; each other one counts once.
  counts = np.bincount(symbols[:, :-1].ravel(), minlength=2)[:, None]

  np.testing.assert_array_equal(found, np.repeat(counts, 4, axis=1))


def deep_gradient(dtype):
  """(logits, gradients of embeddings) of a network of 48 layers."""
  config = networks.config(
    dtype=dtype,
    num_layers=48,
    patterns=networks.assign("local", "merged", 48, window=16),
    width=32,
    # Much larger than what a layer adds to them, as after training.
    token_std=0.5,
    position_std=0.5,
    remat="block",
    backend="dense",
  )
  apply = model.make_apply(config)
  symbols = networks.tokens(config)

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def gradient(params):
    logits = apply(params, symbols)
    return position_losses(logits, symbols).mean(), logits

  params = jax.jit(lambda: model.init_params(config, 0))()
  kernel = params["logits"]["kernel"]
  drawn = jax.random.normal(jax.random.key(1), kernel.shape)
  params["logits"]["kernel"] = 0.2 * drawn
  gradients, logits = gradient(params)
  embeddings = gradients["token"], gradients["position"]
  return [logits, *jax.tree.leaves(embeddings)]


@pytest.mark.soak
def test_rounding_errors_do_not_add_up_over_the_layers():
  # Twice the machine epsilon, if the residual stream were in this dtype.
  most = 0.2 * float(jnp.finfo("bfloat16").eps)
  half = deep_gradient("bfloat16")
  single = deep_gradient("float32")
  for x, y in zip(half, single, strict=True):
    error = np.linalg.norm(x - y) / np.linalg.norm(y)
    assert error < most
