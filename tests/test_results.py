"""Pages and figures are those of the records: make results."""

import json
import re
import shutil

import comparisons
import pytest
import runs

from benchmarks import record
from benchmarks.readme import __main__ as pages, figures

SCRIPT = "benchmarks/readme/__main__.py"


@pytest.fixture
def copy(tmp_path, monkeypatch):
  """The pages, figures and records in another folder."""
  shutil.copy(runs.REPO / "README.md", tmp_path)
  for name in ("docs", "benchmarks/results"):
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
  change(copy / "docs" / "scaling.md", "GiB |", "TiB |")
  change(copy / "docs" / "evidence.md", "| `digits` |", "| digits |")
  status, lines = check(capsys)
  assert status == 1 and len(lines) == 4
  names = [line.split(" differs")[0] for line in lines[:3]]
  assert names == [
    "README.md: speed",
    "docs/evidence.md: trained",
    "docs/scaling.md: million",
  ]
  assert runs.files(copy) == before
  assert check(capsys) == (0, [])


@pytest.mark.parametrize(
  "content, words",
  [
    (None, "benchmarks/results/digits.json"),
    ("{", "digits.json cannot be read"),
    ("{}", "README.md is made from lacks a field"),
  ],
)
def test_missing_or_broken_record_is_one_clear_line(
  content, words, copy, capsys
):
  path = record.path("digits")
  path.unlink()
  if content:
    path.write_text(content)
  status, lines = check(capsys)
  assert status == 1 and len(lines) == 1
  assert words in lines[0]


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


def test_record_of_a_comparison_becomes_a_table_and_a_figure(copy, capsys):
  made = [  # strided is ahead, and faster
    comparisons.run(choice, seed, bits + seed / 100, tokens_per_step=4096)
    for seed in range(3)
    for choice, bits in {"dense": 4.0, "strided": 3.0}.items()
  ]
  config = runs.tiny(**{"train.batch_size": 1}).to_dict()
  about = dict(budget=("seconds", 13), unit="bits/byte", commit="abcdef0")
  found = comparisons.record(*made, **about, config=config)
  record.path("cifar10_keys").write_text(json.dumps(found))
  picture = "docs/figures/cifar10_keys.png"
  assert figures.outdated() == [picture]
  status, lines = check(capsys)
  assert status == 1 and f"{picture} differs from the records" in lines
  assert check(capsys) == (0, [])
  readme = " ".join((copy / "README.md").read_text().split())
  assert (
    "n = 4,096, about 13 seconds each on a machine: `strided` 3.01 ± 0.02,"
    " `dense` 4.01 ± 0.02 bits/byte of the validation split"
  ) in readme
  text = (copy / "docs" / "evidence.md").read_text()
  assert "| strided | 3.0100 ± 0.0248 | -1.0000 ± 0.0227 | 3.0100 ±" in text
  assert "3 seeds; a machine; commit abcdef0." in text
