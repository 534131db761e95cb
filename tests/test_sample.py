"""Tests of the command that draws samples."""

import numpy as np
import pytest
from helpers import runs
from PIL import Image

from sparse_transformer.data.text import RULE
from sparse_transformer.training.evaluation import samples


def untrained_on_text(folder, **changes):
  """The workdir of a run on windows of 32 bytes."""
  path = folder / "text"
  path.write_bytes(b"some text " * 50)
  return runs.untrained(folder / "run", runs.text(path, **changes))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  """With all kinds of patterns."""
  changes = {"attention.pattern": "Block(8) | TopBlocks(8, 2) | LSH(4, 4)"}
  return untrained_on_text(tmp_path_factory.mktemp("text"), **changes)


def command(workdir, *words):
  script = "sparse_transformer/sample.py"
  return runs.command(script, f"--workdir={workdir}", *words)


def draw(workdir, folder, *words):
  """The bytes of one sample, which is written to a folder."""
  assert command(workdir, "--num=1", f"--out={folder}", *words) == 0
  return (folder / "samples.txt").read_bytes()


def test_text_continues_a_prompt(text, tmp_path):
  (tmp_path / "prompt").write_bytes(b"Once upon ")
  prompt = f"--prompt=@{tmp_path / 'prompt'}"
  assert command(text, "--num=2", prompt, f"--out={tmp_path / 'file'}") == 0
  assert command(text, "--num=2", "--prompt=Once upon ") == 0
  written = (text / "samples.txt").read_bytes()
  assert (tmp_path / "file" / "samples.txt").read_bytes() == written
  assert len(written) == 2 * 32 + len(RULE)

  first = written[:32]
  second = written[-32:]
  assert first[:10] == second[:10] == b"Once upon "
  assert first[10:] != second[10:]


@pytest.fixture(scope="module")
def rotary(tmp_path_factory):
  changes = {
    "attention.pattern": "Local(9) | Strided(8)",
    "model.positions": "rotary",
  }
  return untrained_on_text(tmp_path_factory.mktemp("rotary"), **changes)


def test_texts_of_other_lengths_begin_alike(text, rotary, tmp_path):
  """With rotary positions, a network can also draw longer texts."""
  for workdir, lengths in (
    (text, [20, 32]),
    (rotary, [20, 32, 75]),
  ):
    *shorter, longest = (
      draw(workdir, tmp_path, f"--length={length}") for length in lengths
    )
    assert len(longest) == lengths[-1]
    for found, length in zip(shorter, lengths, strict=False):
      assert len(found) == length
      assert longest.startswith(found)
    assert command(workdir, "--num=1") == 0
    assert (workdir / "samples.txt").read_bytes() == longest[:32]


@pytest.mark.parametrize("size", [31, 32, 500])
def test_prompt_without_room_is_cut_to_its_end(size, text, tmp_path, capfd):
  prompt = bytes(97 + i % 26 for i in range(size))
  (tmp_path / "prompt").write_bytes(prompt)
  found = draw(text, tmp_path, f"--prompt=@{tmp_path / 'prompt'}")
  line = f"prompt has {size} symbols, which leaves no room in a sequence of 32;"
  assert (line in capfd.readouterr().err) == (size > 31)
  assert len(found) == 32
  assert found.startswith(prompt if size == 31 else prompt[-16:])


def test_samples_are_printed_and_kept_apart(text, tmp_path, capsys):
  before = runs.files(text)
  prompt = "--prompt=abc --step=7"  # one word of the command
  draw(text, tmp_path, prompt)
  out = capsys.readouterr().out
  assert out.startswith("abc")
  assert f"1 sample of step 0 in {tmp_path / 'samples.txt'}" in out
  assert f"'{prompt}' --step=0" in (tmp_path / "samples.json").read_text()
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {"samples.json", "samples.txt"}
  assert runs.files(text) == before


def test_prompt_ends_where_samples_go_on(tmp_path):
  """Without the separator that ends a document."""
  workdir = untrained_on_text(tmp_path, **{"data.documents": True})
  found = draw(workdir, tmp_path, "--prompt=some")
  assert found[:4] == b"some"
  assert found[4] != 0


def test_samples_complete_real_images_and_are_next_to_them(tmp_path):
  runs.untrained(tmp_path, runs.tiny())
  assert command(tmp_path, "--num=4", "--given=40") == 0
  with Image.open(tmp_path / "samples.png") as image:
    pixels = np.asarray(image.convert("L"))
  # Sheets of 2 x 2 images, 8 rows each, below labels.
  size = (len(pixels) - samples.LABEL) // 2
  scale = (size - 2 - samples.BORDER) // 8
  for below in (0, size):
    top = samples.LABEL + 1 + below
    rows = pixels[top + scale // 2 :: scale][:8]
    drawn = rows[:, : 2 * size]
    real = rows[:, -2 * size :]
    np.testing.assert_array_equal(drawn[:5], real[:5])
    assert (drawn[5:] != real[5:]).any(1).all()
