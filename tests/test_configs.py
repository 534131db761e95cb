"""Tests of the config files: each is the record of an experiment."""

import ast
import importlib

import pytest
import runs

from configs import default
from sparse_transformer import patterns
from sparse_transformer.model import transformer as model
from sparse_transformer.training import checkpoint, step as training
from sparse_transformer.training.experiment import Experiment

NAMES = sorted(path.stem for path in (runs.REPO / "configs").glob("*.py"))
NAMES = [name for name in NAMES if name != "__init__"]
PRESETS = [name for name in NAMES if name != "default"]


def load(name):
  return importlib.import_module(f"configs.{name}")


def fields(config):
  """{"group.field": type}, and the types of the items of a tuple."""
  return {
    f"{group}.{name}": (type(value), {type(x) for x in value})
    if isinstance(value, tuple)
    else type(value)
    for group, values in config.to_dict().items()
    for name, value in values.items()
  }


def test_groups_are_those_a_workdir_must_have():
  assert set(default.get_config()) == set(checkpoint.GROUPS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_sets_only_known_fields_to_their_types(name):
  found, known = fields(load(name).get_config()), fields(default.get_config())
  # () says nothing of what it holds: layers in turn, as whole numbers.
  for each in (found, known):
    each["attention.cycle"] = each["attention.cycle"][0]
  assert found == known
  cycle = load(name).get_config().attention.cycle
  assert all(type(factor) is int for factor in cycle)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_says_how_it_is_run_and_what_to_expect(name):
  source = (runs.REPO / "configs" / f"{name}.py").read_text()
  text = ast.get_docstring(ast.parse(source))
  assert f"python train.py --config=configs/{name}.py" in text
  assert "Expected" in text


@pytest.mark.parametrize("name", PRESETS)
def test_network_is_known_without_any_data(name):
  config = load(name).get_config()
  config.data.path = "/no/such/place"
  experiment = Experiment(config)
  assert model.count_parameters(experiment.model) > 10_000
  training.make_optimizer(config)


@pytest.mark.parametrize("name", PRESETS)
def test_docstring_has_the_number_of_parameters_if_any(name):
  text = load(name).__doc__
  count = model.count_parameters(Experiment(load(name).get_config()).model)
  if "parameters." in text:
    assert f"{count:,}" in " ".join(text.split())


@pytest.mark.parametrize("name", NAMES)
def test_config_survives_a_workdir(name, tmp_path):
  config = load(name).get_config()
  checkpoint.write_config(tmp_path, config)
  assert checkpoint.read_config(tmp_path).to_dict() == config.to_dict()


@pytest.mark.parametrize("mode", patterns.MODES)
@pytest.mark.parametrize("pattern", patterns.FACTORIZATIONS)
@pytest.mark.parametrize("name", PRESETS)
def test_preset_takes_every_pattern_and_mode_by_override(name, pattern, mode):
  config = load(name).get_config()
  config.attention.update(pattern=pattern, mode=mode)
  layers = Experiment(config).model.patterns
  assert len(layers) == config.model.num_layers
  assert {len(heads) for heads in layers} == {config.model.num_heads}


def layers(**attention):
  """The patterns of CIFAR-10's network with some settings of attention."""
  config = load("cifar10_small").get_config()
  config.attention.update(attention)
  return Experiment(config).model.patterns


def test_windows_grow_over_the_layers():
  found = layers(pattern="Local(64), Local(128), Local(256)", cycle=())
  assert [heads[0].window for heads in found] == [64, 128, 256, 64]


@pytest.mark.parametrize(
  "attention, words",
  [
    (dict(stride=0), ["attention.stride=0", "3072"]),
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
def test_attention_that_does_not_fit_is_refused(attention, words):
  with pytest.raises(ValueError) as error:
    layers(**attention)
  assert "\n" not in str(error.value)
  for word in words:
    assert word in str(error.value)
