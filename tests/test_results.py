"""Pages and figures are those of the records: make results."""

import re
import shutil

import pytest
import runs

from benchmarks import record
from benchmarks.readme import __main__ as pages

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
  change(copy / "README.md", "| `Local(128)` | ", "| `Local(128)` | 1")
  change(copy / "docs" / "speed.md", "| `ours` |", "| ours |")
  change(copy / "docs" / "evidence.md", "| 17 bytes", "| 18 bytes")
  status, lines = check(capsys)
  assert status == 1 and len(lines) == 4
  made = "README.md: speed", "docs/evidence.md: one_key", "docs/speed.md: peers"
  assert lines[:3] == [f"{part} differs from the records" for part in made]
  assert runs.files(copy) == before
  assert check(capsys) == (0, [])


def test_missing_or_broken_record_is_one_clear_line(copy, capsys):
  record.path("digits").unlink()
  status, (line,) = check(capsys)
  assert status == 1 and "benchmarks/results/digits.json" in line
  record.path("digits").write_text("{")
  status, (line,) = check(capsys)
  assert status == 1 and "digits.json cannot be read" in line


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
