"""Tests of the config files, each the record of an experiment."""

import ast
import collections
import importlib
import itertools

import pytest
import runs

from sparse_transformer import config as config_lib, model, patterns
from sparse_transformer.training.experiment import Experiment

NAMES = sorted(path.stem for path in (runs.REPO / "configs").glob("*.py"))
NAMES.remove("default")
LONG = "imagenet64", "music"  # several seconds of reach


def load(name):
  return importlib.import_module(f"configs.{name}").get_config()


def fields(config):
  """{"group.field": type}, with the types of the items of tuples."""
  return {
    f"{group}.{name}": (type(value), {type(x) for x in value})
    if isinstance(value, tuple)
    else type(value)
    for group, values in config.to_dict().items()
    for name, value in values.items()
  }


@pytest.mark.parametrize("name", NAMES)
def test_preset_sets_only_known_fields_to_values_of_their_types(name):
  found, known = fields(load(name)), fields(config_lib.get_config())
  # The default () does not show the type of its items: integers.
  cycle, items = found["attention.cycle"]
  assert cycle is tuple and items <= {int}
  assert found | {"attention.cycle": known["attention.cycle"]} == known


@pytest.mark.parametrize("name", NAMES)
def test_docstring_has_command_size_and_expected_result(name):
  source = (runs.REPO / "configs" / f"{name}.py").read_text()
  text = " ".join(ast.get_docstring(ast.parse(source)).split())
  assert f"python train.py --config=configs/{name}.py" in text
  assert "Expected" in text
  config = load(name)
  config.data.path = "/no/such/place"  # the network is known without data
  count = model.count_parameters(Experiment(config).model)
  assert f"{count:,} parameters" in text


def seen_by_the_last(layers, n):
  """The positions that the output of the last position depends on."""
  seen, expanded = {n - 1}, collections.defaultdict(set)
  for heads in reversed(layers):
    queries = frozenset(seen)
    for pattern in set(heads):
      for i in queries - expanded[pattern]:
        seen.update(pattern.keys(i, n).tolist())
      expanded[pattern] |= queries
    if len(seen) == n:
      break
  return seen


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.soak) if name in LONG else name
    for name in NAMES
  ],
)
def test_last_position_depends_on_the_entire_past_with_any_override(name):
  config = load(name)
  for pattern, mode in itertools.product(
    patterns.FACTORIZATIONS, patterns.MODES
  ):
    config.attention.update(pattern=pattern, mode=mode)
    network = Experiment(config).model
    n = past = network.length
    if pattern == "local":
      reach = config.model.num_layers * (config.attention.window - 1)
      past = min(n, reach + 1)
    expected = set(range(n - past, n))
    assert seen_by_the_last(network.patterns, n) == expected, (pattern, mode)


def layers(**attention):
  """The patterns of the CIFAR-10 network with some attention settings."""
  config = load("cifar10_small")
  config.attention.update(attention)
  return Experiment(config).model.patterns


def test_windows_may_grow_with_depth():
  found = layers(pattern="Local(64), Local(128), Local(256)", cycle=())
  assert [heads[0].window for heads in found] == [64, 128, 256, 64]


@pytest.mark.parametrize(
  "attention, words",
  [
    (dict(stride=3073), ["attention.stride=3073", "3072"]),
    (dict(window=3073), ["attention.window=3073", "3072"]),
    (dict(pattern="Full()"), ["Full()", "query 0", "key 1,"]),
    (
      dict(pattern="Local(96), (Causal(), Block(96, causal=False) - Block(8))"),
      ["Block(96, causal=False) - Block(8)", "query 0", "key 1,"],
    ),
    (
      dict(pattern="Local(9) | Strided(96, causal=False)"),
      ["Local(9) | Strided(96, causal=False)", "query 0", "key 96,"],
    ),
  ],
)
def test_attention_that_does_not_fit_is_an_error(attention, words):
  with pytest.raises(ValueError) as error:
    layers(**attention)
  assert "\n" not in str(error.value)
  for word in words:
    assert word in str(error.value)
