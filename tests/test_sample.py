"""Tests of the command that draws samples."""

import numpy as np
import pytest
import runs
from PIL import Image

from sparse_transformer.data import codecs
from sparse_transformer.training.evaluation import samples


@pytest.fixture(scope="module")
def images(tmp_path_factory):
  """The workdir of a run on images of 8 x 8."""
  config = runs.tiny()
  return runs.untrained(tmp_path_factory.mktemp("images"), config)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  """The workdir of a run on windows of 32 bytes, with all kinds of patterns."""
  folder = tmp_path_factory.mktemp("text")
  (folder / "text").write_bytes(b"some text " * 50)
  pattern = {"attention.pattern": "Block(8) | TopBlocks(8, 2) | LSH(4, 4)"}
  config = runs.text(folder / "text", **pattern)
  return runs.untrained(folder / "run", config)


def command(workdir, *words):
  script = "sparse_transformer/sample.py"
  return runs.command(script, f"--workdir={workdir}", *words)


def test_text_continues_a_prompt(text, tmp_path):
  (tmp_path / "prompt").write_bytes(b"Once upon ")
  prompt = f"--prompt={tmp_path / 'prompt'}"
  assert command(text, "--num=2", prompt) == 0
  written = (text / "samples.txt").read_bytes()
  assert len(written) == 2 * 32 + len(codecs.RULE)
  first, second = written[:32], written[-32:]
  assert first[:10] == second[:10] == b"Once upon "
  assert first[10:] != second[10:]


def test_samples_complete_real_images_and_are_next_to_them(images):
  assert command(images, "--num=4", "--given=40") == 0
  with Image.open(images / "samples.png") as image:
    pixels = np.asarray(image.convert("L"))
  # Sheets of 2 x 2 images, 8 rows each, below labels.
  size = (len(pixels) - samples.LABEL) // 2
  scale = (size - 2 - samples.BORDER) // 8
  for top in (samples.LABEL + 1, samples.LABEL + 1 + size):
    rows = pixels[top + scale // 2 :][: 8 * scale : scale]
    drawn, real = rows[:, : 2 * size], rows[:, -2 * size :]
    np.testing.assert_array_equal(drawn[:5], real[:5])
    assert (drawn[5:] != real[5:]).any(1).all()
