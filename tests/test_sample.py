"""Tests of the command that draws samples."""

import numpy as np
import pytest
import runs
from PIL import Image


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
  assert len(written) == 2 * 32 + len("\n\n")
  first, second = written[:32], written[34:]
  assert first[:10] == second[:10] == b"Once upon "
  assert first[10:] != second[10:]


def test_samples_complete_real_images_and_are_next_to_them(images):
  assert command(images, "--num=4", "--given=40") == 0
  with Image.open(images / "samples.png") as image:
    pixels = np.asarray(image.convert("L"))
  # Sheets of 2 x 2 images of 9 cells, with a gap of 4 cells between them.
  scale = pixels.shape[0] // 18
  assert pixels.shape == (18 * scale, (18 + 4 + 18) * scale)
  cells = pixels[scale // 2 :: scale, scale // 2 :: scale]
  drawn, real = cells[:, :18], cells[:, 22:]
  for row in (0, 9):
    np.testing.assert_array_equal(drawn[row : row + 5], real[row : row + 5])
    assert (drawn[row + 5 : row + 8] != real[row + 5 : row + 8]).any()
