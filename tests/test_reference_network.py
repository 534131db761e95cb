"""Tests of the network of every preset against the one in NumPy."""

import importlib
import math
import re
import types

import jax
import networks
import numpy as np
import pytest
import reference_network as reference
import runs

from sparse_transformer import model, patterns
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import position_losses

NAMES = sorted(path.stem for path in (runs.REPO / "configs").glob("*.py"))
NAMES.remove("default")
# Classifiers: see test_classify.py.
NAMES = [name for name in NAMES if not name.startswith("lra_")]


def shrink(name):
  """(config, source) of the structure of a preset, in a small size.

  Everything that counts positions is divided by the same power of two.
  """
  config = importlib.import_module(f"configs.{name}").get_config()
  config.data.path = "/no/such/place"
  source, network = Experiment(config).source, Experiment(config).model
  attention = config.attention
  scale = 2 ** max(0, int(math.log2(attention.stride / 8)))
  attention.stride //= scale
  attention.window = max(2, attention.window // scale)
  attention.width = max(1, attention.width // scale)
  # In expressions: what comes first, and windows.
  attention.pattern = re.sub(
    r"(?<=\()\d+|(?<=window=)\d+",
    lambda number: str(max(1, int(number[0]) // scale)),
    attention.pattern,
  )
  heads = min(network.num_heads, 2 * attention.num_summaries)
  config.model.update(
    num_heads=heads,
    num_layers=network.period + 1,
    width=max(16, 4 * heads),
    dropout=0.0,
    dtype="float32",
    remat="none",
  )
  columns, *channels = source.shape[1:]
  shape = 6, max(2, columns // scale), *channels
  return config, types.SimpleNamespace(
    vocab_size=11,
    length=math.prod(shape),
    shape=shape,
    separator=None,
    classes=(),
  )


def random_params(config):
  """None is zero; the stream is so small that the epsilons of norms matter."""
  ends = {"out", "mlp_out", "experts_out", "token", "position", "start"}

  def shrink(path, x):
    return 0.02 * x if ends & {key.key for key in path[:2]} else x

  params = networks.random_params(config)
  return jax.tree_util.tree_map_with_path(shrink, params)


# Of presets that differ in size or data alone, one is quick enough.
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(
      name,
      marks=[pytest.mark.soak]
      * bool(re.search(r"_\d+m$|_small|^long|genome|^stdlib", name)),
    )
    for name in NAMES
  ],
)
def test_network_of_a_preset_is_that_of_the_papers(name):
  config, source = shrink(name)
  network = model.configure(config, source)
  params = random_params(network)
  tokens = networks.tokens(network, batch=1)
  found = networks.apply(network)(params, tokens)
  loss = position_losses(found, tokens).mean() / np.log(2)

  axes = [size for size in source.shape if size > 1]
  expected = reference.logits(config, axes, params, tokens[0])
  assert np.abs(expected).max() > 1
  np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-5)
  assert abs(loss - reference.bits(expected, tokens[0])) < 1e-5


@pytest.mark.parametrize("mode", patterns.MODES)
@pytest.mark.parametrize("name", ["dense", "local", "strided", "fixed"])
def test_patterns_are_those_of_the_paper(name, mode):
  settings = dict(stride=7, window=5, width=2, num_summaries=3)
  layers = patterns.assign(name, mode, num_layers=3, num_heads=8, **settings)
  attention = types.SimpleNamespace(
    pattern=name, mode=mode, cycle=(), **settings
  )
  for layer, heads in enumerate(layers):
    for head, pattern in enumerate(heads):
      expected = reference.mask(attention, layer, head, 40)
      np.testing.assert_array_equal(pattern.matrix(40), expected)
