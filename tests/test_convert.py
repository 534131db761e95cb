"""Released weights become runs: golden files of their code, and small ones.

Golden files are beside the repository, if at all: networks with random weights,
and what the code of Jun et al. 2020 computes with them.
"""

import hashlib
import json

import jax
import numpy as np
import pytest
from helpers import released as made, runs
from helpers.cases import soak

from sparse_transformer import data
from sparse_transformer.data.scans import Scans
from sparse_transformer.patterns import Local, Strided
from sparse_transformer.training import loop, metrics
from sparse_transformer.training.checkpoints import exported, released
from sparse_transformer.training.experiment import Experiment, open_run

GOLDEN = runs.REPO.parent / "shared" / "released"
golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs golden files")
SCRIPT = "sparse_transformer/convert.py"
CLOSE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def images():
  """Images in files take the place of CIFAR-10."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(data.SOURCES, released.SOURCE, data.SOURCES["images"])
    yield


def convert(folder, arrays, images, preset, *words, **changes):
  """A run of the arrays of a file; of its images, half are the test split."""
  np.savez(folder / "weights.npz", **arrays)
  np.save(folder / "images.npy", images)
  changes |= {
    "data.path": folder / "images.npy",
    "data.fractions": "(0.25, 0.25, 0.5)",
    "train.batch_size": 2,
  }
  given = [f"--config={runs.REPO}/configs/{preset}.py"]
  given += [f"--config.{name}={x}" for name, x in changes.items()]
  given += f"--workdir={folder}/run", folder / "weights.npz"
  assert runs.command(SCRIPT, *given, *words) == 0
  return folder / "run"


def run_of(name, folder, **fields):
  """A run of a golden network on its images, and what it has to give."""
  with np.load(GOLDEN / f"{name}-io.npz") as file:
    found = {x.removeprefix("eval/"): file[x] for x in file}
  with np.load(GOLDEN / f"{name}.npz") as file:
    arrays = dict(file)
  settings = json.loads(str(found["hyperparams"]))
  ours = {
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "width": "n_embd",
  }
  changes = {f"model.{x}": settings[y] for x, y in ours.items()}
  if settings["attention_layers"] == "a":
    changes["attention.pattern"] = "dense"
  preset = "cifar10_150m" if settings["qk_ratio"] == 1 else "cifar10_15m"
  images = np.tile(found["tokens"].reshape(2, 32, 32, 3), (2, 1, 1, 1))
  run = convert(folder, arrays, images, preset, **changes | fields)
  return run, found


def differences(workdir, found):
  """The largest ones of logits and of losses, in float32."""
  run = open_run(workdir, {"model.dtype": "float32"})
  params = run.restore().ema
  tokens_BL = found["tokens"]
  logits_BLV = jax.jit(run.experiment.apply)(params, tokens_BL)
  losses_BL = run.experiment.losses(params, tokens_BL)
  of_logits = logits_BLV[:, found["positions"]] - found["logits"]
  of_losses = losses_BL - found["losses"]
  return abs(of_logits).max(), abs(of_losses).max()


@golden
@pytest.mark.parametrize(
  "name", ["half", *map(soak, ("epsilon", "full", "rot", "rot-c-tr-js"))]
)
def test_converted_network_computes_what_theirs_does(name, tmp_path, capfd):
  workdir, found = run_of(name, tmp_path)
  (result,) = runs.scores(capfd, workdir)
  assert abs(result["bits_per_dim"] - found["bits"]) < CLOSE
  assert max(differences(workdir, found)) < CLOSE


@golden
@pytest.mark.soak
@pytest.mark.parametrize(
  "name, number",
  [
    ("rot", 1),
    ("rot-c-tr-js", 4),
  ],
)
def test_converted_network_computes_what_theirs_does_in_any_order(
  name, number, tmp_path, capfd
):
  orders = ("rotation", "colors", "transposition", "jigsaw")[:number]
  workdir, found = run_of(name, tmp_path, **{"data.orders": orders})
  run = open_run(workdir, {"model.dtype": "float32"})
  params = run.restore().ema
  arrange = run.experiment.source.arrangement.arrange
  apply = jax.jit(run.experiment.apply)
  cases = {x.partition("/")[0] for x in found} & {"aug1", "aug2"}
  for case in sorted(cases):

    def of(x, case=case):
      return found[f"{case}/{x}"]

    rows_BM = np.stack([*map(arrange, found["tokens"], of("labels"))])
    np.testing.assert_array_equal(rows_BM[:, :3072], of("tokens"))
    logits_BLV = apply(params, rows_BM)[:, found["positions"]]
    assert abs(logits_BLV - of("logits")).max() < CLOSE
    losses_BL = run.experiment.losses(params, rows_BM)
    assert abs(losses_BL - of("losses")).max() < CLOSE

  labels = dict(zip(orders, found["aug1/labels"][0], strict=True))
  order = ",".join(f"{x}={label}" for x, label in labels.items())
  words = f"--order={order}", "--split=train"  # it has the first image alone
  (bits,) = runs.scores(capfd, workdir, *words)
  expected = found["aug1/losses"][0].mean() / np.log(2)
  assert abs(bits["bits_per_dim"] - expected) < CLOSE

  # Embeddings in the order of the sequence, of a network with this start only.
  plain = Experiment(run.experiment.config.replace(**{"data.orders": ()}))
  start = params["start"]
  params["start"] = sum(start[x][label] for x, label in labels.items())
  losses_1L = plain.losses(params, found["aug1-fixed/tokens"][:1])
  errors = losses_1L - found["aug1-fixed/losses"][:1]
  assert abs(errors).max() < CLOSE


# Small files.


@pytest.fixture(scope="module")
def converted(images, tmp_path_factory):
  """(a run, the arrays of its file)."""
  folder = tmp_path_factory.mktemp("x")
  starts = [
    ("sos_rot", 4),
    ("sos_tr", 2),
  ]
  small = {
    "model.width": 16,
    "model.num_layers": 4,
    "attention.stride": 24,
  }
  arrays = made.arrays(starts=starts)
  random = np.random.default_rng(0)
  pixels = random.integers(0, 256, (8, 8, 8, 3), np.uint8)
  return convert(folder, arrays, pixels, "cifar10_15m", **small), arrays


def made_of(config, folder):
  """A file of random weights of a network."""
  path = folder / "a file.safetensors"
  exported.save(path, config, Experiment(config).init().params)
  return path


def text_of(folder):
  """A text that can be taken away."""
  path = folder / "text.txt"
  path.write_text("to be or not to be " * 40)
  return path


def test_averages_are_where_they_belong(converted):
  workdir, arrays = converted
  state = open_run(workdir).restore()
  same = np.testing.assert_array_equal
  jax.tree.map(same, state.params, state.ema)

  def average(name):
    return arrays[f"model/{name}/Ema/ema:0"]

  blocks = state.ema["blocks"]
  for i in range(4):
    same(blocks["key"]["kernel"][i], average(f"h{i}/k_proj/w"))
    same(blocks["mlp_norm"]["scale"][i], average(f"h{i}/mlp/g"))
    same(blocks["mlp_out"]["bias"][i], average(f"h{i}/mlp_proj2/b"))
  same(state.ema["norm"]["bias"], average("final_norm/b"))
  same(state.ema["position"][2]["embedding"], average("pos_emb_2"))
  rotation = average("sos_token/sos_rot")
  transposition = average("sos_token/sos_tr")
  same(state.ema["start"], rotation[0] + transposition[0])


def test_averages_alone_are_read_and_the_file_is_recorded(
  converted, monkeypatch
):
  workdir, arrays = converted
  path = workdir.parent / "weights.npz"
  read = []
  get = np.lib.npyio.NpzFile.__getitem__

  def spy(self, name):
    read.append(name)
    return get(self, name)

  monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", spy)
  _, about = released.load(str(path), open_run(workdir).experiment.config)
  averages = [name for name in arrays if name.endswith("/Ema/ema:0")]
  assert sorted(read) == sorted([*averages, "best_val_loss:0"])

  start = metrics.read(workdir)[0]
  assert start == start | about
  assert start["file"] == str(path)
  assert start["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_convert_needs_no_data(tmp_path, capfd):
  """Nor does sampling; other commands say in a line which they need."""
  text = text_of(tmp_path)
  run = tmp_path / "a run"
  workdir = f"--workdir={run}"
  path = made_of(runs.text(text), tmp_path)
  moved = text.rename(tmp_path / "moved.txt")
  assert runs.command(SCRIPT, path, workdir) == 0
  out = capfd.readouterr().out
  assert out == (
    f"starts from {path}\nto evaluate: python eval.py '--workdir={run}'\n"
  )

  state = open_run(run).restore()
  expected = exported.load(path).params
  assert int(state.step) == 0
  assert runs.arrays(state.params) == runs.arrays(expected)
  assert runs.arrays(state.ema) == runs.arrays(expected)
  assert open_run(run).saved.describe(0)["data"] is None
  assert (run / "patterns.png").exists()

  sample = "sparse_transformer/sample.py"
  assert runs.command(sample, workdir, "--num=2") == 0
  assert "2 samples of converted weights in" in capfd.readouterr().out
  assert "<td>trained</td><td>converted weights</td>" in runs.report(run)
  capfd.readouterr()
  assert runs.command("eval.py", workdir) == 1
  assert "data.path is not set" in capfd.readouterr().err

  assert runs.command("eval.py", workdir, f"--config.data.path={moved}") == 0
  out, err = capfd.readouterr()
  assert json.loads(out)["tokens"] == len(moved.read_bytes()) // 4
  assert "test, converted weights: " in err

  # Weights on unknown data are trained on any that fit.
  changes = {
    "data.path": str(moved),
    "train.steps": 2,
  }
  config = open_run(run).experiment.config.replace(**changes)
  loop.train(config, run, allow_changes=True)
  assert open_run(run).saved.describe(2)["data"]["symbols"] == 760


def test_commands_on_a_file_make_a_run_of_it_once(tmp_path, capfd, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = made_of(runs.tiny(), tmp_path)
  assert runs.command(SCRIPT, path, "--workdir=converted") == 0
  capfd.readouterr()
  sample = "sparse_transformer/sample.py"
  assert runs.command(sample, f"--workdir={path}", "--num=1") == 0
  (run,) = (tmp_path / "runs").iterdir()
  assert f"{path} is now the run runs/{run.name}" in capfd.readouterr().err
  assert (run / "samples.png").exists()
  before = runs.files(run)

  (score,) = runs.scores(capfd, path)
  (expected,) = runs.scores(capfd, "converted")
  assert f"--workdir={path}" in score["command"]
  assert score | {"command": ""} == expected | {"command": ""}
  assert before.items() <= runs.files(run).items()
  assert list((tmp_path / "runs").iterdir()) == [run]


def test_images_that_are_not_there_are_not_needed(tmp_path, capfd):
  images = tmp_path / "images.npy"
  run = tmp_path / "run"
  np.save(images, np.zeros((20, 4, 6, 3), np.uint8))
  changes = {
    "data.name": "images",
    "data.path": str(images),
  }
  path = made_of(runs.tiny(**changes), tmp_path)
  moved = images.rename(tmp_path / "moved.npy")
  assert runs.command(SCRIPT, path, f"--workdir={run}") == 0
  (bits,) = runs.scores(capfd, run, f"--config.data.path={moved}")

  assert bits["tokens"] == 72 * bits["examples"]


def test_overrides_are_of_the_config_in_the_file(tmp_path, capfd):
  text = text_of(tmp_path)
  run = tmp_path / "run"
  path = made_of(runs.text(text), tmp_path)
  words = f"--config.data.path={text}", "--config.attention.pattern=dense"
  assert runs.command(SCRIPT, path, f"--workdir={run}", *words) == 0
  config = open_run(run).experiment.config
  assert config.data.length == 32
  assert config.data.path == str(text)
  assert config.attention.pattern == "dense"

  line = capfd.readouterr().out.splitlines()[0]
  assert line == (
    f"starts from {path}; attention: attention.pattern=dense here, but strided"
    " there"
  )
  (score,) = runs.scores(capfd, run)
  assert score["overrides"] == {}


def test_config_file_is_kept_with_the_run(tmp_path, capfd):
  path = made_of(runs.tiny(**{"attention.stride": 4}), tmp_path)
  file = tmp_path / "own.py"
  run = tmp_path / "run"
  file.write_text(
    "from helpers import runs\n"
    "get_config = lambda: runs.tiny(**{'attention.stride': 2})\n"
  )
  words = f"--config={file}", "--config.eval.batch_size=4"
  assert runs.command(SCRIPT, path, f"--workdir={run}", *words) == 0
  assert (run / "config.py").read_bytes() == file.read_bytes()
  config = open_run(run).experiment.config
  assert config.attention.stride == 2
  assert config.eval.batch_size == 4
  assert "attention.stride=2 here, but 4 there" in capfd.readouterr().out


@pytest.mark.soak
def test_converted_run_is_like_any(converted, tmp_path, capfd):
  workdir, _ = converted
  file = tmp_path / "x.safetensors"
  (result,) = runs.scores(capfd, workdir, "--split=validation")
  assert result["in_training"] == pytest.approx(1.9375 / np.log(2))

  words = dict(
    sample="--num=1",
    explain="--example=0",
    export=f"--out={file}",
  )
  for name, word in words.items():
    script = f"sparse_transformer/{name}.py"
    assert runs.command(script, f"--workdir={workdir}", word) == 0

  again = tmp_path / "again"
  data_path = f"--config.data.path={workdir.parent / 'images.npy'}"
  assert runs.command(SCRIPT, file, f"--workdir={again}", data_path) == 0
  (same,) = runs.scores(capfd, again, "--split=validation")
  assert same["bits_per_dim"] == result["bits_per_dim"]
  assert "in_training" not in same

  changes = {
    "train.init_from": str(workdir),
    "train.steps": 10,
    "optimizer.warmup_steps": 1,
    "train.log_every": 1,
  }
  config = open_run(workdir).experiment.config.replace(**changes)
  tuned = tmp_path / "tuned"
  loop.train(config, tuned)
  lines = metrics.read(tuned)
  nats = [line["nats"] for line in lines if line["split"] == "train"]
  assert len(nats) == 10
  assert nats[-1] < nats[0]


@golden
@pytest.mark.soak
@pytest.mark.parametrize("number", range(11))
def test_presets_have_the_arrays_of_their_code(number, tmp_path):
  """By its list of names; of full width, with 2 layers."""
  presets = json.loads((GOLDEN / "names.json").read_text()).values()
  preset = [*presets][number]
  shape = (32, 32, 3)
  settings = preset["hyperparams"]
  depth = preset["layers"]
  sizes = dict(
    width=settings["n_embd"],
    half=settings["qk_ratio"] == 0.5,
  )
  arrays = made.arrays(
    2,
    shape=shape,
    starts=preset["conditions"],
    **sizes,
  )

  assert {x: ([*y.shape], str(y.dtype)) for x, y in arrays.items()} == {
    name.replace("*", str(i)): (size, dtype)
    for name, size, dtype in preset["arrays"]
    for i in range(2 if "*" in name else 1)
  }

  inputs = np.zeros((4, *shape), np.uint8), released.PRESETS[depth]
  run = convert(tmp_path, arrays, *inputs, **{"model.num_layers": 2})
  network = open_run(run).experiment.model
  assert network.num_heads == settings["n_head"]
  kinds = dict(
    b=Local(96),
    bT=Strided(96),
  )
  cycle = settings["attention_layers"].split(",")
  found = [heads[0] for heads in network.patterns]

  assert found == [kinds[x] for x in cycle[:2]]
  starts = dict(preset["conditions"])
  narrow = made.arrays(depth, width=2, starts=starts.items())
  np.savez(tmp_path / "narrow.npz", **narrow)
  full = released.preset(str(tmp_path / "narrow.npz"))

  assert full.model.num_layers == depth
  tables = Scans(full.data.orders, shape).tables.values()
  assert [*map(len, tables)] == [n for x, n in starts.items() if x != "sos_aa"]
