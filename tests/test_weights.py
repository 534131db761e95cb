"""The networks in weights/ score what their cards say, anywhere."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from helpers import runs, small_data
from helpers.cases import soak
from safetensors import safe_open

from benchmarks import record
from sparse_transformer import config as config_lib
from sparse_transformer.training.checkpoints import exported

SHARED = small_data.SHARED / "tensorflow_datasets"
FOLDER = runs.REPO / "weights"
SLOW = "cifar10_medium", "cifar10_large"  # minutes on a CPU
# SHA-256 of the arrays, as they were trained.
ARRAYS = dict(
  digits="c3049ad50b4f6024edba6e554b83dc7acc7c2fb75b58f028a5d8ecf238cd2eb1",
  cifar10_medium=(
    "7b1d4837bf6a1086143dc40ec45e11ff9e14f592c948dae2032f43683f482aaa"
  ),
  cifar10_large=(
    "e96bbbf71fce14071f9f045ba65bff5a348f5be0d22dc0a4a21d7ed8c4ee4077"
  ),
)
CONVERT = "sparse_transformer/convert.py"
PREPARE = "python -m sparse_transformer.data prepare cifar10"
needs_cifar10 = pytest.mark.skipif(not SHARED.is_dir(), reason="needs CIFAR-10")


@pytest.mark.parametrize("name", ARRAYS)
def test_weights_are_as_trained_and_name_no_path(name, capfd):
  path = FOLDER / f"{name}.safetensors"
  content = path.read_bytes()
  arrays = content[8 + int.from_bytes(content[:8], "little") :]

  assert hashlib.sha256(arrays).hexdigest() == ARRAYS[name]
  with safe_open(path, "numpy") as file:
    metadata = file.metadata()
  settings = json.loads(metadata["config"])
  config = config_lib.from_json(settings, path)

  assert config == config_lib.portable(config)
  assert config.data.name == name.partition("_")[0]
  assert not any("/" in x.replace("bits/dim", "") for x in metadata.values())
  assert exported.load(path).config == config
  assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["digits", *(soak(x) for x in SLOW)])
def test_weights_score_what_their_card_says(name, tmp_path):
  words = []
  if name != "digits":
    if not SHARED.is_dir():
      pytest.skip("needs CIFAR-10")
    words = [f"--config.data.path={SHARED}"]

  file = FOLDER / f"{name}.safetensors"
  workdir = f"--workdir={tmp_path / 'run'}"
  card = record.read(name)
  assert runs.command(CONVERT, file, workdir, *words) == 0
  # Optimized, as for users: it takes minutes.
  optimized = dict(JAX_DISABLE_MOST_OPTIMIZATIONS=0)
  done = runs.python("eval.py", workdir, "--split=validation", **optimized)
  (bits,) = (
    x["bits_per_dim"]
    for x in card["evaluations"]
    if (x["split"], x["step"]) == ("validation", card["steps"])
  )

  assert abs(json.loads(done.stdout)["bits_per_dim"] - bits) < 1e-4


def test_data_are_asked_for_only_where_they_are_needed(
  tmp_path, capfd, monkeypatch
):
  nowhere = tmp_path / "no data"
  monkeypatch.setenv("TFDS_DATA_DIR", str(nowhere))
  workdir = f"--workdir={tmp_path / 'run'}"
  file = FOLDER / "cifar10_medium.safetensors"
  assert runs.command(CONVERT, file, workdir) == 0
  capfd.readouterr()
  sample = "sparse_transformer/sample.py"
  assert runs.command(sample, workdir, "--num=1") == 0
  out, err = capfd.readouterr()

  assert out.startswith("1 sample of converted weights in ")
  assert err.startswith("warning: the samples are drawn without real images: ")
  assert (tmp_path / "run" / "samples.png").exists()
  assert runs.command("eval.py", workdir) == 1
  (line,) = capfd.readouterr().err.splitlines()
  assert f"run `{PREPARE} '--data_dir={nowhere}'`, or set data.path" in line


@needs_cifar10
def test_data_in_their_default_place_are_found(tmp_path, capfd, monkeypatch):
  monkeypatch.setenv("TFDS_DATA_DIR", str(SHARED))
  run = tmp_path / "run"
  file = FOLDER / "cifar10_medium.safetensors"
  assert runs.command(CONVERT, file, f"--workdir={run}") == 0
  (bits,) = runs.scores(capfd, run, "--examples=8")
  assert bits["overrides"] == {"examples": 8}
  assert 2 < bits["bits_per_dim"] < 5


def commands_of_the_page():
  """The commands between ``` in weights/README.md, and those of its cards."""
  text = (FOLDER / "README.md").read_text()
  blocks = re.findall(r"(?ms)^```\n(.*?)^```$", text)
  lines = "".join(blocks).replace("\\\n", "").splitlines()
  lines += re.findall(r"\| command \| `(.*)` \|", text)
  return [shlex.split(line, comments=True) for line in lines]


def test_flags_on_the_page_exist():
  """Training takes minutes and needs data: its commands are only parsed."""
  commands = commands_of_the_page()
  trained = [words for words in commands if words[:2] == ["python", "train.py"]]
  assert len(trained) == 1 + len(ARRAYS)
  assert len(commands) == 10
  for words in trained:
    # The last flag is wrong, and read after all others.
    done = runs.python(*words[1:], "--profile=0:0", cwd=runs.REPO)
    assert "--profile=0:0 must be FIRST:LAST" in done.stderr, words


@pytest.mark.soak
def test_commands_of_the_page_work_in_a_clone(tmp_path):
  """Except those that train for minutes, or download."""
  for name in (
    "sparse_transformer",
    "configs",
    "weights",
    "benchmarks",
    "Makefile",
    "train.py",
    "eval.py",
    *(path.name for path in runs.REPO.glob("requirements*.txt")),
  ):
    (tmp_path / name).symlink_to(runs.REPO / name)

  (tmp_path / ".venv").mkdir()
  (tmp_path / ".venv" / "installed").touch()
  (tmp_path / ".venv" / "bin").mkdir()
  script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
  python = tmp_path / ".venv" / "bin" / "python"
  python.write_text(script)
  python.chmod(0o755)
  place = f"{python.parent}:{os.environ['PATH']}"
  optimized = dict(JAX_DISABLE_MOST_OPTIMIZATIONS="0")
  where = dict(
    PATH=place,
    TFDS_DATA_DIR=str(SHARED),
  )
  done = []
  for words in commands_of_the_page():
    if "eval.py" in words:
      if not SHARED.is_dir():
        continue
      words.append("--examples=4")
    if {"train.py", "prepare", "--workdir=runs/text"} & {*words}:
      continue
    subprocess.run(
      words,
      cwd=tmp_path,
      env=os.environ | optimized | where,
      check=True,
    )
    done.append(words[:3])

  assert len(done) == 2 + SHARED.is_dir(), done
  for name in ("digits", "cifar10_large"):
    assert list((tmp_path / "runs").glob(f"{name}-*/samples.png")), name
