"""Tests of what a training step stores, recomputes and never materializes."""

import collections
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import networks

from sparse_transformer import model, schema
from sparse_transformer.patterns import Block
from sparse_transformer.training.experiment import Experiment

# Rematerialization.


def remat_loss(remat, num_layers=6):
  """(loss(params), params) for some layers with dropout."""
  config = networks.config(
    num_layers=num_layers,
    patterns=((Block(16),) * 2,) * num_layers,
    width=32,
    length=96,
    shape=(96, 1),
    dropout=0.3,
    remat=remat,
    backend="streamed",
    tile=16,
  )
  symbols = networks.tokens(config)
  apply = model.make_apply(config)

  def loss(params):
    logits = apply(params, symbols, jax.random.key(1))
    return (logits**2).mean()

  return loss, networks.random_params(config, std=0.2)


@pytest.mark.soak
def test_rematerialization_saves_memory_and_changes_no_loss():
  """Nor gradients: see test_options.py."""
  losses = []
  sizes = []
  for remat in schema.REMATS:
    loss, params = remat_loss(remat)
    lowered = jax.jit(jax.value_and_grad(loss)).lower(params)
    compiled = lowered.compile()
    sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    losses.append(compiled(params)[0])

  np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
  none, outside, block = sizes
  assert block < outside < none
  assert outside < 0.6 * none  # 0.55 with jax 0.12


# [layers, batch, n, heads, width of a head]; the lse has no width.
OUTPUT = (6, 2, 96, 2, 16)


LSE = (6, 2, 96, 2)


@pytest.mark.parametrize(
  "remat, of_attention, mlp",
  [
    ("none", {OUTPUT: 4, LSE: 1}, True),
    ("block_but_attention", {OUTPUT: 1, LSE: 1}, False),
    ("block", {}, False),
  ],
)
def test_backward_pass_keeps_what_remat_says(remat, of_attention, mlp):
  loss, params = remat_loss(remat)

  def pullback(params):
    return jax.vjp(loss, params)[1]

  leaves = jax.tree.leaves(jax.eval_shape(pullback, params))
  saved = collections.Counter(x.shape for x in leaves)
  by_head = {}
  for shape, count in saved.items():
    if shape[:4] == LSE:
      by_head[shape] = count
    # Scores are never kept: nothing has two axes of positions.
    assert shape.count(96) <= 1

  assert by_head == of_attention
  inner_width = 6, 2, 96, 128
  assert (inner_width in saved) == mlp


def test_attention_is_not_repeated_when_its_outputs_are_kept():
  def products(remat):
    loss, params = remat_loss(remat)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    # Arrays of tiles: [tiles, batch, heads, positions, ...].
    return sum(
      equation.primitive.name == "dot_general"
      and equation.outvars[0].aval.ndim == 5
      for equation in networks.equations(jaxpr)
    )

  assert products("block") == 2 + 2 + 5
  assert products("block_but_attention") == products("none") == 2 + 5


# A training step, traced.


def traced_step(name, batch=1, **changes):
  """The training step of a file in configs/, without its data."""
  config = importlib.import_module(f"configs.{name}").get_config()
  config.update_from_flattened_dict(changes)
  experiment = Experiment(config)
  length = experiment.source.length
  symbols = jax.ShapeDtypeStruct((batch, length), jnp.uint8)
  state = jax.eval_shape(experiment.init)
  return jax.jit(experiment.train_step).trace(state, symbols)


# Its masks are drawn with words and features on one long axis.
WITHOUT_DROPOUT = {"model.dropout": 0.0}


def quadratic(traced, n, tile, groups=1):
  """Shapes with n x n entries, or with all keys for a tile of queries.

  The rows of a few groups of heads may follow each other along one axis.
  """
  shapes = set()
  for equation in networks.equations(traced.jaxpr.jaxpr):
    for variable in (*equation.invars, *equation.outvars):
      if hasattr(variable.aval, "shape"):
        shapes.add(variable.aval.shape)

  assert any(n in shape for shape in shapes)  # the walk has seen something

  def is_quadratic(shape):
    longest = max(shape, default=0)
    has_two = sum(size >= n for size in shape) > 1
    is_of_tile = longest >= n and shape[-2:-1] == (tile,)
    return has_two or is_of_tile or longest > groups * (n + tile)

  return [shape for shape in shapes if is_quadratic(shape)]


@pytest.mark.soak
def test_step_of_enwik8_has_nothing_of_size_n_by_n():
  # Its heads have 4 different summaries; lists are padded.
  traced = traced_step("enwik8", **WITHOUT_DROPOUT)
  assert quadratic(traced, 12_288, 64, groups=5) == []


@pytest.mark.parametrize(
  "backend, remat",
  [
    ("dense", "none"),
    ("streamed", "block"),
  ],
)
def test_only_the_reference_has_something_of_size_n_by_n(backend, remat):
  traced = traced_step(
    "enwik8",
    **{
      # Nothing else is this long, nor are all biases and gains of a layer.
      "data.length": 2560,
      "model.num_layers": 2,
      "model.width": 128,
      "model.remat": remat,
      "attention.backend": backend,
      **WITHOUT_DROPOUT,
    },
  )

  assert bool(quadratic(traced, 2560, 64)) == (backend == "dense")


def test_program_does_not_grow_with_depth():
  def size(num_layers):
    loss, params = remat_loss("block", num_layers)
    program = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
    return len([*networks.equations(program)])

  assert size(8) == size(128)
