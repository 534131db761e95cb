"""Tests of the command that draws samples."""

import numpy as np
import pytest
from helpers import runs
from PIL import Image

from sparse_transformer.data.text import RULE
from sparse_transformer.training.evaluation import samples


@pytest.fixture(scope="module")
def images(tmp_path_factory):
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
  folder = tmp_path_factory.mktemp("rotary")
  (folder / "text").write_bytes(b"some text " * 50)
  changes = {"attention.pattern": "Local(9) | Strided(8)"}
  changes["model.positions"] = "rotary"
  return runs.untrained(folder / "run", runs.text(folder / "text", **changes))


def test_texts_of_other_lengths_begin_alike(text, rotary, tmp_path):
  """With rotary positions, a network can also draw longer texts."""
  for workdir, lengths in (
    (text, (20, 32)),
    (rotary, (20, 32, 75)),
  ):
    found = {}
    for length in lengths:
      out = tmp_path / f"{length}"
      word = f"--length={length}"
      assert command(workdir, "--num=1", word, f"--out={out}") == 0
      found[length] = (out / "samples.txt").read_bytes()
      assert len(found[length]) == length
    assert command(workdir, "--num=1") == 0
    assert (workdir / "samples.txt").read_bytes() == found[32]
    assert all(found[lengths[-1]].startswith(x) for x in found.values())

  out = f"--out={tmp_path / 'slow'}"
  assert command(workdir, "--num=1", word, out, "--nocache") == 0
  slow = (tmp_path / "slow" / "samples.txt").read_bytes()

  assert slow == found[75]


@pytest.mark.parametrize("size", [31, 32, 500])
def test_prompt_without_room_is_cut_to_its_end(size, text, tmp_path, capfd):
  prompt = bytes(97 + i % 26 for i in range(size))
  (tmp_path / "prompt").write_bytes(prompt)
  words = f"--prompt=@{tmp_path / 'prompt'}", f"--out={tmp_path}", "--num=1"
  assert command(text, *words) == 0
  line = f"prompt has {size} symbols: its last 16 are used, as half of the 32"

  assert (line in capfd.readouterr().err) == (size > 31)
  found = (tmp_path / "samples.txt").read_bytes()
  assert len(found) == 32
  assert found.startswith(prompt if size == 31 else prompt[-16:])


def test_samples_are_printed_and_kept_apart(text, tmp_path, capsys):
  before = runs.files(text)
  prompt = "--prompt=abc --step=7"  # one word of the command
  assert command(text, "--num=1", f"--out={tmp_path}", prompt) == 0
  out = capsys.readouterr().out

  assert out.startswith("abc")
  assert f"1 sample of step 0 in {tmp_path / 'samples.txt'}" in out
  assert f"'{prompt}' --step=0" in (tmp_path / "samples.json").read_text()
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ["samples.json", "samples.txt"]
  assert runs.files(text) == before


def test_prompt_ends_where_samples_go_on(tmp_path):
  """Without the separator that ends a document."""
  (tmp_path / "text").write_bytes(b"some text " * 50)
  config = runs.text(tmp_path / "text", **{"data.documents": True})
  runs.untrained(tmp_path / "run", config)
  words = "--num=1", "--prompt=some", "--nocache"
  assert command(tmp_path / "run", *words) == 0
  found = (tmp_path / "run" / "samples.txt").read_bytes()
  assert found[:4] == b"some"
  assert found[4] != 0


def test_samples_complete_real_images_and_are_next_to_them(images):
  assert command(images, "--num=4", "--given=40") == 0
  with Image.open(images / "samples.png") as image:
    pixels = np.asarray(image.convert("L"))
  # Sheets of 2 x 2 images, 8 rows each, below labels.
  size = (len(pixels) - samples.LABEL) // 2
  scale = (size - 2 - samples.BORDER) // 8
  for top in (samples.LABEL + 1, samples.LABEL + 1 + size):
    rows = pixels[top + scale // 2 :][: 8 * scale : scale]
    drawn = rows[:, : 2 * size]
    real = rows[:, -2 * size :]
    np.testing.assert_array_equal(drawn[:5], real[:5])
    assert (drawn[5:] != real[5:]).any(1).all()
