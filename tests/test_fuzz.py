"""Mutated files and settings: a one-line error at worst.

`make soak` runs larger numbers of them.
"""

import bz2
import gzip
import io
import json
import lzma
import random
import shutil
import wave

import numpy as np
import pytest
from helpers import runs
from helpers.cases import soak
from ml_collections import ConfigDict

from sparse_transformer import config as config_lib, patterns
from sparse_transformer.data import audio, fasta, files, text
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.optimizer import make_optimizer

pytestmark = pytest.mark.filterwarnings("ignore")


def mutate(rng, content):
  content = bytearray(content)
  for _ in range(rng.randrange(1, 6)):
    kind = rng.randrange(5)
    place = rng.randrange(len(content) + 1)
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


def sound():
  content = io.BytesIO()
  with wave.open(content, "wb") as file:
    file.setparams((1, 2, 8000, 0, "NONE", ""))
    file.writeframes(bytes(range(198)))
  return content.getvalue()


def decode(codec):
  return lambda path: codec.decode(path.read_bytes(), path)


def read_config(path):
  shutil.copy(path, path.parent / "config.json")
  return config_lib.read_config(path.parent)


def parse(path):
  for heads in patterns.parse(path.read_bytes().decode("latin1")):
    for pattern in heads:
      pattern.check(100)


# {name: (content, what reads it)}
FILES = {
  "x.fasta": (b">one\nACGTNRYacgt\n>two\nTTTT\n", decode(fasta.Fasta())),
  "x.wav": (sound(), decode(audio.Audio(12_000))),
  "text8": (b"some letters of text", decode(text.Letters())),
  "x.gz": (gzip.compress(b"text" * 20), files.read),
  "x.bz2": (bz2.compress(b"text" * 20), files.read),
  "x.xz": (lzma.compress(b"text" * 20), files.read),
  "x.json": (json.dumps(runs.tiny().to_dict()).encode(), read_config),
  "pattern": (
    b"(Local(4), BigBird(8)), Strided(3) | Block(4) - Causal()",
    parse,
  ),
}


@pytest.mark.parametrize("rounds", [100, soak(1200)])
@pytest.mark.parametrize("name", FILES)
def test_mutated_file_is_read_or_is_an_error(name, rounds, tmp_path):
  rng = random.Random(rounds)
  content, read = FILES[name]
  path = tmp_path / name
  path.write_bytes(content)
  read(path)
  for _ in range(rounds):
    path.write_bytes(mutate(rng, content))
    try:
      read(path)
    except (ValueError, OSError) as error:
      assert str(error)


ANY_TYPE = (
  None,
  True,
  False,
  (),
  [],
  {},
  "",
  b"x",
  1j,
  object(),
  len,
  np.int64(3),
)
FAR = (
  -1,
  0,
  1,
  7,
  2**31,
  2**64,
  10**30,
  1e-300,
  1e300,
  0.5,
  -0.0,
  float("nan"),
  float("inf"),
  -float("inf"),
)


def other_value(rng, value):
  """A value of a config: of any type, or a number that is far or near."""
  kind = rng.choice(("any type", "far", "near"))
  if kind == "any type":
    return rng.choice(ANY_TYPE)
  if isinstance(value, str):
    return mutate(rng, value.encode()).decode("latin1")
  if isinstance(value, tuple):
    items = (*value, 1)[rng.randrange(3) :]
    return tuple(other_value(rng, item) for item in items)
  if kind == "far" or isinstance(value, bool):
    return rng.choice(FAR)

  number = value + rng.choice((-1, 1, 0.1)) * rng.random() * (1 + abs(value))
  return type(value)(number)


@pytest.mark.parametrize("rounds", [3, soak(1000)])
def test_other_value_of_a_field_is_used_or_is_an_error_that_names_it(rounds):
  rng = random.Random(rounds)
  settings = runs.tiny().to_dict()
  for group, fields in settings.items():
    for name, old in list(fields.items()) * rounds:
      value = other_value(rng, old)
      changed = fields | {name: value}
      try:
        experiment = Experiment(ConfigDict(settings | {group: changed}))
        _ = experiment.source, experiment.model
        make_optimizer(experiment.config)
      except (ValueError, OSError) as error:
        message = str(error)
        assert name in message or group == "attention", (name, value, message)
        assert len(message) < 2000
