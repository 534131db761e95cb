"""Mutated files, folders and settings: a one-line error at worst.

`make soak` runs larger numbers of them.
"""

import bz2
import gzip
import io
import json
import lzma
import pathlib
import random
import shutil
import time
import wave
import zipfile

import numpy as np
import pytest
import runs
from ml_collections import ConfigDict

from sparse_transformer import config as config_lib, patterns
from sparse_transformer.data import codecs, files
from sparse_transformer.training.experiment import Experiment

pytestmark = pytest.mark.filterwarnings("ignore")


def mutate(rng, content):
  """Some bytes changed, inserted, copied or cut."""
  content = bytearray(content)
  for _ in range(rng.randrange(1, 6)):
    kind, place = rng.randrange(5), rng.randrange(len(content) + 1)
    if kind == 0 and content:
      content[place % len(content)] = rng.randrange(256)
    elif kind == 1:
      del content[place : place + rng.randrange(40)]
    elif kind == 2:
      content[place:place] = rng.randbytes(rng.randrange(9))
    elif kind == 3:
      content[place:place] = content[: rng.randrange(50)]
    else:
      content = content[:place]
  return bytes(content)


def archives():
  """A WAV and a zip file."""
  sound, archive = io.BytesIO(), io.BytesIO()
  with wave.open(sound, "wb") as file:
    file.setparams((1, 2, 8000, 0, "NONE", ""))
    file.writeframes(bytes(range(198)))
  with zipfile.ZipFile(archive, "w") as file:
    file.writestr("a", "text" * 20)
  return sound.getvalue(), archive.getvalue()


def decode(codec):
  return lambda path: codec.decode(path.read_bytes(), path)


def read_config(path):
  shutil.copy(path, path.parent / "config.json")
  return config_lib.read_config(path.parent)


def parse(path):
  for heads in patterns.parse(path.read_bytes().decode("latin1")):
    for pattern in heads:
      pattern.check(100)


WAV, ZIP = archives()
# {name: (content, what reads it)}
FILES = {
  "x.fasta": (b">one\nACGTNRYacgt\n>two\nTTTT\n", decode(codecs.Fasta())),
  "x.wav": (WAV, decode(codecs.Audio(12_000))),
  "text8": (b"some letters of text", decode(codecs.Letters())),
  "x.zip": (ZIP, files.read),
  "x.gz": (gzip.compress(b"text" * 20), files.read),
  "x.bz2": (bz2.compress(b"text" * 20), files.read),
  "x.xz": (lzma.compress(b"text" * 20), files.read),
  "x.json": (json.dumps(runs.tiny().to_dict()).encode(), read_config),
  "pattern": (
    b"(Local(4), BigBird(8)), Strided(3) | Block(4) - Causal()",
    parse,
  ),
}


@pytest.mark.parametrize(
  "rounds", [100, pytest.param(1200, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("name", FILES)
def test_mutated_file_is_read_or_is_an_error(name, rounds, tmp_path):
  rng = random.Random(rounds)
  content, read = FILES[name]
  path = tmp_path / name
  path.write_bytes(content)
  read(path)
  for _ in range(rounds):
    path.write_bytes(mutate(rng, content))
    began = time.monotonic()
    try:
      read(path)
    except (ValueError, OSError) as error:
      assert str(error)
    assert time.monotonic() - began < 5


def answer(capfd, script, *words):
  """Runs a command, which must succeed or print one line of error."""
  began = time.monotonic()
  capfd.readouterr()
  status = runs.command(script, *words)
  out, err = capfd.readouterr()
  assert "Traceback" not in out + err, (words, out, err)
  assert status == 0 or (status == 1 and err.count("\n") == 1), (words, err)
  assert len(err) < 5000, (words, len(err))
  assert time.monotonic() - began < 60, words
  return status


def other_value(rng, value):
  """A value of a config: of any type, or a number that is far or near."""
  kind = rng.randrange(3)
  if kind == 0:
    return rng.choice(
      (None, True, False, (), [], {}, "", b"x", 1j, object(), len, np.int64(3))
    )
  if kind == 1 or isinstance(value, bool | str | tuple):
    if isinstance(value, str):
      return mutate(rng, value.encode()).decode("latin1")
    if isinstance(value, tuple):
      return tuple(other_value(rng, x) for x in (*value, 1)[rng.randrange(3) :])
    far = -1, 0, 1, 7, 2**31, 2**64, 10**30, 1e-300, 1e300, 0.5
    return rng.choice((*far, -0.0, float("nan"), float("inf"), -float("inf")))
  number = value + rng.choice((-1, 1, 0.1)) * rng.random() * (1 + abs(value))
  return type(value)(number)


@pytest.mark.parametrize(
  "rounds", [3, pytest.param(1000, marks=pytest.mark.soak)]
)
def test_other_value_of_a_field_is_used_or_is_an_error_that_names_it(rounds):
  rng = random.Random(rounds)
  settings = runs.tiny().to_dict()
  for group, fields in settings.items():
    for name, old in list(fields.items()) * rounds:
      value = other_value(rng, old)
      changed = settings | {group: fields | {name: value}}
      began = time.monotonic()
      try:
        experiment = Experiment(ConfigDict(changed))
        _ = experiment.source, experiment.model, experiment.optimizer
      except (ValueError, OSError) as error:
        assert name in str(error) or group == "attention", (name, value, error)
        assert len(str(error)) < 2000
      assert time.monotonic() - began < 5, (group, name, value)


def damage(rng, folder):
  """Deletes, cuts, changes, adds or replaces a file or folder in a folder."""
  paths = sorted(folder.rglob("*"))
  path, other = rng.choice(paths), rng.choice(paths)
  kind, parent = rng.randrange(7), path if path.is_dir() else path.parent
  if kind < 2:
    path.unlink() if path.is_file() else shutil.rmtree(path)
    if kind:
      path.mkdir()
  elif kind == 2:
    (parent / rng.choice(("7", "notes", ".DS_Store", "-1", "3.tmp"))).mkdir()
  elif kind == 3:
    name = rng.choice(("5", "0", "notes", "lost+found", "config.json"))
    (parent / name).write_bytes(rng.randbytes(9))
  elif kind == 4 and not {path, other} & {*path.parents, *other.parents}:
    path.rename(path.with_name(other.name + "~"))
  elif path.is_file():
    path.write_bytes(mutate(rng, path.read_bytes()))


@pytest.mark.parametrize(
  "rounds", [4, pytest.param(150, marks=pytest.mark.soak)]
)
def test_damaged_folder_of_a_run_is_used_or_is_a_one_line_error(
  rounds, trained, capfd, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  rng = random.Random(rounds)
  pathlib.Path("config.py").write_text(
    "from sparse_transformer import config\n"
    f"def get_config(): return config.read_config({str(trained)!r})"
  )
  for number in range(rounds):
    run = shutil.copytree(trained, f"run{number}")
    for _ in range(rng.randrange(1, 4)):
      damage(rng, pathlib.Path(run))
    script, *words = (
      ("eval.py",),
      ("train.py", "--config=config.py"),
      ("sparse_transformer/sample.py", "--num=1"),
    )[number % 3]
    answer(capfd, "sparse_transformer/report.py", f"--workdir={run}")
    answer(capfd, script, f"--workdir={run}", *words)
    shutil.rmtree(run)
