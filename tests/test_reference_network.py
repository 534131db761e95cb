"""Tests of networks, with all options, against the one in NumPy."""

import functools
import importlib
import math
import re
import types

import jax
import numpy as np
import pytest
from helpers import networks, reference_network as reference
from helpers.cases import listed
from test_configs import NAMES, load

from sparse_transformer import model, patterns
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.step import position_losses

SOURCE = types.SimpleNamespace(
  vocab_size=11,
  length=30,
  shape=(6, 5),
  separator=None,
  classes=(),
  arrangement=(),
)
# What is built on `digits`, in networks of one size.
SIZE = {
  "model.num_layers": 3,
  "model.num_heads": 4,
  "model.width": 16,
  "model.dropout": 0.0,
  "attention.mode": "interleaved",
  "attention.stride": 5,
  "attention.window": 4,
  "attention.width": 2,
}
GLOBAL = "Global(1, causal=False) | "
OPTIONS = {
  "sinks": {"model.sinks": True},
  "rotary": {
    "model.positions": "rotary",
    "model.rotary_base": 50.0,
  },
  "key heads": {"model.key_heads": 2},
  "gpt-oss": {
    "model.key_heads": 1,
    "model.sinks": True,
    "model.half_size": True,
    "model.positions": "rotary",
    "attention.pattern": "gpt_oss",
  },
  "spans": {"model.max_span": 9, "attention.pattern": "dense, Local(3)"},
  "content": {"attention.pattern": "LSH(4, 4, 2), Block(5) | TopBlocks(5, 2)"},
  "experts": {
    "model.experts": 4,
    "model.num_layers": 5,
    "attention.pattern": "Routing(3, 7) | Local(3), Local(2)",
  },
  "documents": {
    "separator": 0,
    "attention.pattern": "fixed",
  },
  **{
    f"classify {pattern}": {"model.task": "classify"}
    | {"attention.pattern": pattern}
    for pattern in (
      "dense",
      "strided",
      "fixed",
      GLOBAL + "Local(3, causal=False)",
      GLOBAL + "LSH(2, 4, 1)",
      GLOBAL + "Routing(2, 3)",
    )
  },
}
CLASSES = "a", "b", "c"


@functools.cache
def preset(name):
  """(config, source) of the structure of a preset, in a small size.

  Everything that counts positions is divided by the same power of two.
  """
  config = load(name)
  source = Experiment(config).source
  network = Experiment(config).model
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
    key_heads=min(heads, network.key_heads),
    num_layers=model.period(network) + 1,
    width=max(16, 4 * heads),
    dropout=0.0,
    dtype="float32",
    remat="none",
  )
  columns, *channels = source.shape[1:]
  shape = 6, max(2, columns // scale), *channels
  return config, source_of(shape=shape, length=math.prod(shape), config=config)


def source_of(config, **changes):
  classes = CLASSES if config.model.task == "classify" else ()
  return types.SimpleNamespace(**vars(SOURCE) | dict(classes=classes) | changes)


def option(name):
  """(config, source) of a small network with an option."""
  config = importlib.import_module("configs.digits").get_config()
  changes = SIZE | OPTIONS[name]
  separator = changes.pop("separator", None)
  config.update_from_flattened_dict(changes)
  return config, source_of(config, separator=separator)


def random_params(config):
  """None is zero; the stream is so small that the epsilons of norms matter."""
  ends = {"out", "mlp_out", "experts_out", "token", "position", "start"}

  def shrink(path, x):
    return 0.02 * x if ends & {key.key for key in path[:2]} else x

  params = networks.random_params(config)
  params = jax.tree_util.tree_map_with_path(shrink, params)
  if "spans" in params:
    params["spans"] = abs(params["spans"])
  return params


QUICK = [
  (option, "gpt-oss"),
  (option, "classify dense"),
  (preset, "cifar10_fixed"),
  (preset, "enwik8_dense"),
  (preset, "lra_listops"),
]
EVERY = [(option, x) for x in OPTIONS] + [(preset, x) for x in NAMES]


@pytest.mark.parametrize("make, name", listed(QUICK, EVERY))
def test_network_is_that_of_the_papers(make, name):
  config, source = make(name)
  network = model.configure(config, source)
  params = random_params(network)
  tokens = networks.tokens(network)
  axes = [x for x in source.shape if x > 1]
  sizes = (source.length,) * 2
  rows = tokens
  if network.classifies:  # the second sequence is padded
    sizes = source.length, source.length // 2
    rows = np.c_[tokens, [0, 1], sizes]
  found = networks.apply(network)(params, rows)
  for row, size, logits in zip(tokens, sizes, found, strict=True):
    expected = reference.logits(
      config, axes, params, row[:size], source.separator
    )
    assert np.abs(expected).max() > 0.1
    logits = np.reshape(logits, expected.shape)
    np.testing.assert_allclose(
      logits,
      expected,
      rtol=0,
      atol=1e-5,
    )
    if not network.classifies:
      loss = position_losses(logits[None], row[None]).mean() / np.log(2)
      assert abs(loss - reference.bits(expected, row)) < 1e-5


@pytest.mark.parametrize("mode", patterns.MODES)
@pytest.mark.parametrize("name", ["dense", "local", "strided", "fixed"])
def test_patterns_are_those_of_the_paper(name, mode):
  settings = dict(
    stride=7,
    window=5,
    width=2,
    num_summaries=3,
  )
  layers = patterns.assign(name, mode, num_layers=3, num_heads=8, **settings)
  attention = types.SimpleNamespace(
    pattern=name,
    mode=mode,
    cycle=(),
    **settings,
  )
  for layer, heads in enumerate(layers):
    for head, pattern in enumerate(heads):
      expected = reference.mask(attention, layer, head, 40)
      np.testing.assert_array_equal(pattern.matrix(40), expected)
