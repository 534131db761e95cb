"""Tests of the config files, each the record of an experiment."""

import ast
import functools
import importlib
import json
import pathlib
import re
import tempfile

import numpy as np
import pytest
from helpers import runs
from helpers.cases import soak

from sparse_transformer import config as config_lib, model, schema
from sparse_transformer.data import sources
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.reports import network_report

NAMES = sorted(path.stem for path in (runs.REPO / "configs").glob("*.py"))
NAMES.remove("default")
PAGE = (runs.REPO / "docs" / "paper.md").read_text()
# {config: (row, paper, parameters)}, from the table of that page.
ROWS = {}
for line in PAGE.splitlines():
  cells = line.strip("| ").split(" | ")
  if len(cells) == 4 and "`" in cells[1]:
    row, name, *rest = cells
    ROWS[name.strip("`")] = (row, *rest)


def load(name):
  config = importlib.import_module(f"configs.{name}").get_config()
  if config.data.name not in sources.WITHOUT_PATH:
    # Most networks are known without data.
    config.data.path = paths().get(config.data.name, "/no/such/place")
  return config


@functools.cache
def paths():
  """Two classes, and clips of the shape that configs/video.py names."""
  folder = pathlib.Path(tempfile.mkdtemp())
  for name in ("neg", "pos"):
    (folder / "texts" / name).mkdir(parents=True)
    (folder / "texts" / name / "1.txt").touch()
  np.save(folder / "clips.npy", np.zeros((49, 256, 16), np.uint8))
  return dict(
    labelled=f"{folder}/texts",
    images=f"{folder}/clips.npy",
  )


def docstring(name):
  source = (runs.REPO / "configs" / f"{name}.py").read_text()
  return " ".join(ast.get_docstring(ast.parse(source)).split())


def fields(config):
  """{"group.field": type}, with the types of the items of tuples."""
  types = {}
  for group, values in config.to_dict().items():
    for name, value in values.items():
      kind = type(value)
      if isinstance(value, tuple):
        kind = kind, {type(x) for x in value}
      types[f"{group}.{name}"] = kind
  return types


@pytest.mark.parametrize("name", NAMES)
def test_preset_sets_only_known_fields_to_values_of_their_types(name):
  found = fields(load(name))
  known = fields(config_lib.get_config())
  # The default () does not show the type of its items.
  for field, kind in (
    ("attention.cycle", int),
    ("data.orders", str),
  ):
    assert found[field] in ((tuple, set()), (tuple, {kind}))
    del found[field], known[field]

  assert found == known
  schema.typed(load(name))


@pytest.mark.parametrize("name", NAMES)
def test_docstring_has_command_size_and_expected_result(name):
  text = docstring(name)
  assert f"python train.py --config=configs/{name}.py" in text
  assert "Expected" in text or "In the paper:" in text
  count = model.count_parameters(Experiment(load(name)).model)
  assert f"{count:,} parameters" in text
  _, paper, parameters = ROWS.get(name, (None, "", f"{count:,}"))
  assert parameters == f"{count:,}"
  assert all(number in text for number in re.findall(r"\d\.\d+", paper))


# Published experiments.


def test_every_published_experiment_has_a_row_in_the_docs():
  published = r"Table \d|Tables \d|follow-up's released code"
  assert ROWS.keys() == {x for x in NAMES if re.search(published, docstring(x))}


def test_published_experiments_are_recorded_as_compiled():
  path = runs.REPO / "benchmarks" / "results" / "compiled.json"
  compiled = {
    report["preset"]
    for report in json.loads(path.read_text())
    if all(program["compiles"] for program in report["programs"])
  }
  assert ROWS.keys() <= compiled


@pytest.mark.parametrize("name", ROWS)
def test_published_experiment_names_the_source_of_each_field(name):
  known = set(re.findall(r"^\| `(\w[\w-]*)` \| [^|]* \|$", PAGE, re.MULTILINE))
  assert known == {"paper", "follow-up", "sparse_attention", "guess", "ours"}
  source = (runs.REPO / "configs" / f"{name}.py").read_text()
  for line in re.findall(r"^  config\..*", source, re.MULTILINE):
    assert re.search(r"  # ([\w-]+)", line)[1] in known, line


@pytest.mark.parametrize("name", ROWS)
def test_published_experiment_can_choose_its_best_step(name):
  config = load(name)
  assert config.eval.sequences == 0  # the entire split
  # A checkpoint is known by the validation of the same step.
  assert config.checkpoint.every == config.eval.every > 0


# As published: layers, heads, width, half size, cycle; learning rate, dropout,
# warm-up, weight decay, epochs, batch. Presets import each other, and a change
# to one must not change another unnoticed.
PUBLISHED = """
cifar10         128  2 256 1 1000 0.00035 0.25   5000 0.01     120  16
cifar10_dense   128  2 256 1 1000 0.00035 0.25   5000 0.01     120  16
cifar10_fixed   128  2 256 1    - 0.00035 0.25   5000 0.01     120  16
cifar10_58m     128  2 256 1 1000 0.00035 0.25  15000 0.01     140  16
cifar10_15m      32  2 256 1 1000 0.00035 0.005 15000 0.01   10000  16
cifar10_150m     48 16 512 0 0100 0.00015 0.005 15000 0.01   10000  16
cifar10_10m      48 16 128 0 0100 0.00015 0.005 15000 0.01   10000  16
cifar10_2m       48  8  64 0 0100 0.00015 0.005 15000 0.01   10000  16
enwik8           30  8 512 0    - 0.00035 0.4    5000 0.01      80  16
enwik8_dense     30  8 512 0    - 0.00035 0.4    5000 0.01      80  16
enwik8_strided   30  8 512 0    - 0.00035 0.4    5000 0.01      80  16
imagenet64       48 16 512 0 0100 0.00015 0.01   5000 0.01      70 128
imagenet64_150m  48 16 512 0 0100 0.00015 0.005 15000 0.001  10000 128
imagenet64_300m  96 16 512 0 0100 0.00015 0.005 15000 0.001  10000 128
"""
EXAMPLES = dict(
  cifar10=48_000,
  enwik8=90e6 / 12_288,
  imagenet64=1_231_149,
)


@pytest.mark.parametrize("line", PUBLISHED.strip().splitlines())
def test_published_experiment_has_the_published_settings(line):
  name, *expected = line.split()
  config = load(name)
  settings = config.model
  optimizer = config.optimizer
  train = config.train
  epochs = train.steps * train.batch_size / EXAMPLES[config.data.name]
  found = (
    settings.num_layers,
    settings.num_heads,
    settings.width,
    int(settings.half_size),
    "".join(map(str, config.attention.cycle)) or "-",
    optimizer.learning_rate,
    settings.dropout,
    optimizer.warmup_steps,
    optimizer.weight_decay,
    round(epochs),
    train.batch_size,
  )

  assert [str(value) for value in found] == expected
  assert epochs == pytest.approx(round(epochs), rel=1e-4)


# What positions see.


# These have too few keys or layers.
SHORT_SIGHTED = {
  "cifar10_keys",
  "cifar10_large",
  "cifar10_medium",
  "lra_image",
  "recall",
  "repeat",
  "text_medium",
  "video",
}
QUICK = [
  "cifar10",
  "digits_orders",
  "genome",
  "imagenet64_300m",
  "text_experts",
]
OTHERS = [name for name in NAMES if name not in {*QUICK, *SHORT_SIGHTED}]


@pytest.mark.parametrize("name", [*QUICK, *map(soak, OTHERS)])
def test_every_position_sees_its_entire_past(name):
  found, may_see = network_report.find_reach(Experiment(load(name)).model)
  # Whether patterns that follow the content do so depends on the content.
  assert found.layers or may_see
