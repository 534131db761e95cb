"""Pages and figures are those of the records: make results."""

import re
import shutil

import numpy as np
import pytest
from helpers import runs
from helpers.reference_reach import reach

from benchmarks import record
from benchmarks.readme import __main__ as pages, receptive

pytestmark = pytest.mark.tools

SCRIPT = "benchmarks/readme/__main__.py"


@pytest.fixture
def copy(tmp_path, monkeypatch):
  """The pages, figures and records in another folder."""
  shutil.copy(runs.REPO / "README.md", tmp_path)
  for name in ("docs", "weights", "benchmarks/results"):
    shutil.copytree(runs.REPO / name, tmp_path / name)
  monkeypatch.setattr(record, "REPO", tmp_path)
  monkeypatch.setattr(record, "FOLDER", tmp_path / "benchmarks" / "results")
  return tmp_path


def layers(text, number):
  config = dict(
    model=dict(
      num_layers=number,
      num_heads=2,
    ),
    attention=dict(
      mode="interleaved",
      cycle=(),
      stride=8,
      window=8,
      width=2,
      num_summaries=1,
    ),
  )
  return receptive.layers_of(config, text)


@pytest.mark.parametrize(
  "text", ["Local(5) | Strided(16, 1)", "strided", "Block(8), Summary(8, 1)"]
)
def test_receptive_fields_are_products_of_masks_over_layers(text):
  network = layers(text, 3)
  expected = reach(network, 64)[-receptive.LAST :]
  np.testing.assert_array_equal(receptive.reach(network, 64), expected)


@pytest.mark.parametrize(
  "text, number, size, sees",
  [
    ("Local(17)", 2, 33, "no"),
    ("Local(17)", 5, 81, "no"),
    ("Local(17)", 6, 97, "yes"),
    ("Local(16) | Strided(96) & Local(97)", 1, 17, "no"),
    ("Local(16) | Strided(96, 1) & Local(97)", 1, 17, "yes"),
  ],
)
def test_receptive_field_counts_bytes_before_the_target(
  text, number, size, sees
):
  """Key k holds byte k - 1, so that a window of l sees l bytes."""
  network = layers(text, number)
  assert receptive.count(network, 1536) == size
  assert receptive.sees(network, 1536, back=96) == sees


def change(path, old, new):
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new, 1))


def check(capsys, *words):
  """The exit status of the command, and the lines it prints as errors."""
  status = runs.command(SCRIPT, *words)
  return status, capsys.readouterr().err.splitlines()


def test_pages_and_figures_are_those_of_the_records(capsys):
  assert check(capsys, "--check") == (0, [])


def test_what_differs_is_corrected_and_reported(copy, capsys):
  before = runs.files(copy)
  change(copy / "README.md", "times as fast as", "times faster than")
  change(copy / "docs" / "performance.md", "| `ours` |", "| ours |")
  change(copy / "docs" / "evidence.md", "| `Local(17)`", "| `Local(18)`")
  status, lines = check(capsys)

  assert status == 1
  assert len(lines) == 4
  made = (
    "README.md: headline",
    "docs/evidence.md: longer",
    "docs/performance.md: peers",
  )
  assert lines[:3] == [f"{part} differs from the records" for part in made]
  assert runs.files(copy) == before
  assert check(capsys) == (0, [])


def test_missing_or_broken_record_is_one_clear_line(copy, capsys):
  record.path("digits").unlink()
  status, (line,) = check(capsys)
  assert status == 1
  assert "benchmarks/results/digits.json" in line
  record.path("digits").write_text("{")
  status, (line,) = check(capsys)
  assert status == 1
  assert "digits.json cannot be read" in line


def test_records_name_no_folder_of_a_machine():
  paths = sorted(record.FOLDER.glob("*.json"))
  assert len(paths) > 9
  for path in paths:
    folders = re.findall(r"(?<=[\s\"'=,])/\w+/[^\s\"]*", path.read_text())
    assert not folders, f"{path.name}: python -m benchmarks.run"


@pytest.mark.parametrize(
  "text, words",
  [
    (f"{pages.BEGIN.format('other')}\n\n{pages.END}\n", "parts: .*other"),
    ("See benchmarks/results/ago.json.", "ago.json, which is missing"),
  ],
)
def test_unknown_parts_and_records_are_rejected(text, words):
  with pytest.raises((ValueError, FileNotFoundError), match=words):
    pages.made("README.md", text)
