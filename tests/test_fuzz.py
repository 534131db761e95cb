"""Mutated files and flags: a one-line error at worst.

`make soak` runs larger numbers of them.
"""

import bz2
import gzip
import io
import json
import lzma
import random
import shutil
import time
import wave
import zipfile

import pytest
import runs

from sparse_transformer import config as config_lib, patterns
from sparse_transformer.data import codecs, files


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


def wav():
  content = io.BytesIO()
  with wave.open(content, "wb") as file:
    file.setparams((1, 2, 8000, 0, "NONE", ""))
    file.writeframes(bytes(range(198)))
  return content.getvalue()


def archive():
  content = io.BytesIO()
  with zipfile.ZipFile(content, "w") as file:
    file.writestr("a", "text" * 20)
  return content.getvalue()


def decode(codec):
  return lambda path: codec.decode(path.read_bytes(), path)


def read_config(path):
  shutil.copy(path, path.parent / "config.json")
  return config_lib.read_config(path.parent)


def parse(path):
  return patterns.parse(path.read_bytes().decode("latin1"))


# {name: (content, what reads it)}
FILES = {
  "x.fasta": (b">one\nACGTNRYacgt\n>two\nTTTT\n", decode(codecs.Fasta())),
  "x.wav": (wav(), decode(codecs.Audio(12_000))),
  "text8": (b"some letters of text", decode(codecs.Letters())),
  "x.zip": (archive(), files.read),
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
@pytest.mark.filterwarnings("ignore")
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


FLAGS = (
  "--config.train.steps=4",
  "--config.attention.cycle=1,0,0",
  "--config.attention.pattern=(Local(4), Block(8)), Strided(2)",
  "--config.optimizer.learning_rate=1e-3",
  "--config.model.half_size=True",
  "--config.data.fractions=0.8,0.1,0.1",
)


@pytest.mark.parametrize(
  "rounds", [30, pytest.param(600, marks=pytest.mark.soak)]
)
@pytest.mark.filterwarnings("ignore")
def test_mutated_flag_is_a_one_line_error(rounds, capfd):
  rng = random.Random(rounds)
  config = f"--config={runs.REPO / 'configs' / 'digits.py'}"
  for _ in range(rounds):
    word = mutate(rng, rng.choice(FLAGS).encode()).decode("latin1")
    word = word.replace("\0", "")  # no command line can hold it
    # Without a workdir it ends after checking the settings at the latest.
    assert runs.command("train.py", config, word) in (0, 1), word
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) <= 1 and "Traceback" not in "".join(lines), (word, lines)
