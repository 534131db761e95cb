"""Exported weights: names, formats, and the same logits when read back."""

import json
import os
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from helpers import networks, runs
from helpers.cases import soak
from helpers.errors import refused
from safetensors import safe_open

from sparse_transformer import config as config_lib, schema
from sparse_transformer.training import metrics
from sparse_transformer.training.checkpoints import exported
from sparse_transformer.training.experiment import Experiment, open_run

SCRIPT = "sparse_transformer/export.py"
# With all kinds of parameters; each period of the layers has a rest.
NETWORKS = dict(
  plain={
    "model.num_layers": 3,
    "attention.pattern": "strided",
  },
  experts={
    "model.num_layers": 3,
    "model.experts": 3,
    "model.sinks": True,
    "model.key_heads": 1,
    "model.positions": "rotary",
    "attention.pattern": "Local(4)",
  },
  content={
    "model.num_layers": 2,
    "attention.pattern": "(Routing(4, 8), LSH(8, 4)), Local(9)",
  },
  spans={"attention.pattern": "Local(20)", "model.max_span": 16},
)


@pytest.fixture(scope="module", params=NETWORKS)
def network(request):
  config = runs.tiny(**NETWORKS[request.param])
  return config, networks.random_params(Experiment(config).model, 0.3)


def command(workdir, path, *words):
  return runs.command(SCRIPT, f"--workdir={workdir}", f"--out={path}", *words)


def resave(path, change=lambda arrays, metadata: None):
  """Saves a file again, after a change, as another program would."""
  with safe_open(path, "numpy") as file:
    arrays = {name: file.get_tensor(name) for name in file.keys()}
    metadata = file.metadata()
  change(arrays, metadata)
  safetensors.numpy.save_file(arrays, path, metadata)


def test_weights_read_back_give_the_same_logits(network, tmp_path):
  config, params = network
  experiment = Experiment(config)
  tokens_BL = np.stack([experiment.source.examples("test")[i] for i in (0, 1)])
  apply = jax.jit(experiment.apply)
  expected_BLV = apply(params, tokens_BL)

  assert np.ptp(expected_BLV) > 1
  path = tmp_path / "weights.safetensors"
  exported.save(path, config, params)
  found, loaded, source = exported.load(path)

  assert found.to_dict() == config.to_dict()
  assert source.symbols == experiment.source.symbols
  np.testing.assert_array_equal(apply(loaded, tokens_BL), expected_BLV)


@pytest.mark.docs
def test_function_on_the_page_gives_the_same_logits(tmp_path):
  code = (runs.REPO / "docs" / "export.md").read_text()
  (code,) = re.findall(r"(?ms)^```python\n(.*?)^```$", code)
  exec(code, names := {})
  config = runs.tiny(**NETWORKS["plain"])
  experiment = Experiment(config)
  params = networks.random_params(experiment.model, 0.3)
  exported.save(tmp_path / "x.safetensors", config, params)
  arrays = safetensors.numpy.load_file(tmp_path / "x.safetensors")
  tokens_L = experiment.source.examples("test")[0]
  masks = [
    [pattern.matrix(len(tokens_L)) for pattern in heads]
    for heads in experiment.model.patterns
  ]
  found_LV = names["logits"](arrays, tokens_L, masks)
  expected_BLV = jax.jit(experiment.apply)(params, tokens_L[None])

  np.testing.assert_allclose(
    found_LV,
    expected_BLV[0],
    rtol=1e-4,
    atol=1e-4,
  )


def test_layers_are_separate_and_in_order(network, tmp_path):
  """Each array, found by its name, is where a layer of the network has it."""
  config, params = network
  exported.save(tmp_path / "x.safetensors", config, params)
  with safe_open(tmp_path / "x.safetensors", "numpy") as file:
    arrays = {name: file.get_tensor(name) for name in file.keys()}
    metadata = file.metadata()

  assert json.loads(metadata["config"])["model"]["num_heads"] == 2
  sizes = (x.size for x in jax.tree.leaves(params))
  assert sum(x.size for x in arrays.values()) == sum(sizes)
  same = np.testing.assert_array_equal
  same(arrays["token.embedding"], params["token"]["embedding"])
  same(arrays["logits.kernel"], params["logits"]["kernel"])

  # The second layer of three has experts.
  experts = params.get("expert_blocks")
  for layer in range(config.model.num_layers):
    place = (0, 0, 1)[layer] if experts else layer
    block = experts if experts and layer == 1 else params["blocks"]
    of = {x.removeprefix(f"layers.{layer}."): arrays[x] for x in arrays}
    same(of["attention.query.kernel"], block["query"]["kernel"][place])
    same(of["mlp.norm.bias"], block["mlp_norm"]["bias"][place])
    for x in ("in", "out"):
      name = f"experts_{x}" if block is experts else f"mlp_{x}"
      name_in_file = "mlp." + name.removeprefix("mlp_")
      same(of[f"{name_in_file}.kernel"], block[name]["kernel"][place])
    if experts:
      same(of["attention.sinks"], params["sinks"][layer])
    if "spans" in params:
      same(of["attention.spans"], params["spans"][layer])
    if "centroids" in params:
      same(of["attention.centroids.4"], params["centroids"]["4"][layer])


def test_file_says_what_it_holds(trained, tmp_path, capsys):
  path = tmp_path / "digits.safetensors"
  path.write_text("an older one")
  run = shutil.copytree(trained, tmp_path / "run")
  assert command(run, path, "--step=best", "--weights=params") == 0

  assert capsys.readouterr().out == f"weights of step 2 in {path}\n"
  with safe_open(path, "numpy") as file:
    metadata = file.metadata()

  assert metadata["step"] == "2"
  assert metadata["weights"] == "params"
  assert metadata["unit"] == "bits/dim"

  symbols = dict(
    size=17,
    symbols="levels",
    separator=None,
    classes=[],
  )

  assert json.loads(metadata["vocabulary"]) == symbols
  expected = open_run(run).restore().params
  same = jax.tree.map(np.array_equal, exported.load(path).params, expected)

  assert all(jax.tree.leaves(same))
  assert {x.name for x in tmp_path.iterdir()} == {path.name, "run"}


def test_run_starts_from_a_file(trained, tmp_path):
  path = tmp_path / "digits.safetensors"
  new = tmp_path / "new"
  assert command(trained, path) == 0
  start = {
    "train.steps": 0,
    "train.init_from": str(path),
    "train.seed": 1,
  }
  line = runs.DIGITS, *runs.flags_of(**start), f"--workdir={new}"
  assert runs.command("train.py", *line) == 0
  expected = open_run(trained).restore().ema
  for name in "params", "ema":
    found = getattr(open_run(new, step=0).restore(), name)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("source", ["file", "run"])
def test_pattern_of_the_weights_is_named(source, trained, tmp_path, capsys):
  path = tmp_path / "digits.safetensors"
  new = tmp_path / "new"
  assert command(trained, path) == 0
  start = {
    "train.steps": 0,
    "attention.pattern": "dense",
  }
  start["train.init_from"] = str(path if source == "file" else trained)
  words = runs.DIGITS, *runs.flags_of(**start), f"--workdir={new}"
  assert runs.command("train.py", *words) == 0
  difference = "attention.pattern=dense here, but strided there"

  assert f"; attention: {difference}\n" in capsys.readouterr().out
  assert metrics.read(new)[0]["attention"] == [difference]


def test_file_names_no_path_of_the_machine(tmp_path):
  text = tmp_path / "a text.txt"
  text.write_text("to be or not to be " * 40)
  first = runs.untrained(tmp_path / "first", runs.text(text))
  given = {
    "train.init_from": str(first),
    "attention.backend": "dense",
  }
  config = runs.text(text, **given | {"mesh.data": 1})
  run = runs.untrained(tmp_path / "run", config)
  path = tmp_path / "x.safetensors"
  assert command(run, path) == 0
  content = path.read_bytes()

  assert os.fsencode(tmp_path) not in content
  assert b"a text" not in content
  found = exported.load(path)
  assert found.config == config_lib.portable(schema.typed(config))
  changed = (
    schema.flatten(found.config).items() - schema.flatten(config).items()
  )
  default = {
    "attention.backend": "auto",
    "mesh.data": -1,
  }

  assert dict(changed) == default | {
    "data.path": "",
    "train.init_from": "",
  }


@pytest.fixture
def saved(trained, tmp_path):
  """(a file with the weights of a run, these weights)."""
  path = tmp_path / "x.safetensors"
  run = open_run(trained)
  params = run.restore().ema
  exported.save(path, run.experiment.config, params)
  return path, params


@pytest.mark.parametrize(
  "damage",
  [
    lambda content: content[:8] + b"?" + content[9:],
    lambda content: content[:-9],
    lambda content: b"",
    lambda content: b"words",
  ],
)
def test_damaged_file_is_rejected(damage, saved):
  path, _ = saved
  path.write_bytes(damage(path.read_bytes()))
  with refused("x.* is damaged or truncated: .*again$"):
    exported.load(path)


def test_file_that_was_saved_again_is_read_with_a_line(saved, capfd):
  path, params = saved
  resave(path)
  exported.load(path)

  assert capfd.readouterr().err == ""

  def change(arrays, metadata):
    metadata["format"] = "pt"
    arrays["norm.bias"] = arrays["norm.bias"] + 1

  resave(path, change)
  found = exported.load(path).params
  (line,) = capfd.readouterr().err.splitlines()

  assert re.search("the CRC-32 of .*x.safetensors differs", line)
  norm = params["norm"] | {"bias": params["norm"]["bias"] + 1}
  expected = params | {"norm": norm}
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_flipped_bit_is_noticed(saved, capfd):
  path, _ = saved
  content = bytearray(path.read_bytes())
  content[-len(content) // 2] ^= 1
  path.write_bytes(content)
  exported.load(path)

  assert "x.safetensors differs from the exported one" in capfd.readouterr().err


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda x: x.astype(np.float16), "norm.bias must be float32"),
    (lambda x: x[1:], "do not match its config: norm.bias"),
  ],
)
def test_array_of_another_kind_is_rejected(change, words, saved):
  path, _ = saved
  resave(path, lambda x, _: x.update({"norm.bias": change(x["norm.bias"])}))
  with refused(words):
    exported.load(path)


@pytest.mark.parametrize(
  "field, change",
  [
    ("vocabulary", lambda text: "[1]"),
    ("vocabulary", lambda text: text.replace("17", "-1")),
    soak("vocabulary", lambda text: text.replace("17", '"17"')),
    soak("geometry", lambda text: text.replace("64", "63")),
    soak("geometry", None),
    soak("config", lambda text: "[" * 100_000),
  ],
)
def test_metadata_that_no_run_writes_are_rejected(field, change, saved):
  path, _ = saved

  def edit(arrays, metadata):
    text = metadata.pop(field)
    if change:
      metadata[field] = change(text)

  resave(path, edit)
  match = "x.safetensors (cannot be|does not|is not a file of)"

  with refused(match):
    exported.load(path)
