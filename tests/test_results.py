"""The README's numbers are those of the records: make results."""

import json
import re
import shutil

import comparisons
import pytest
import runs

from benchmarks import record
from benchmarks.readme import comparisons as evidence, figures, page, records

SCRIPT = "benchmarks/readme/__main__.py"


@pytest.fixture
def copy(tmp_path, monkeypatch):
  """The pages, figures and records in a folder of their own."""
  for name in ("README.md", "docs", "benchmarks/results"):
    source, target = runs.REPO / name, tmp_path / name
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copytree if source.is_dir() else shutil.copy
    copy(source, target)
  monkeypatch.setattr(record, "REPO", tmp_path)
  monkeypatch.setattr(record, "FOLDER", tmp_path / "benchmarks" / "results")
  monkeypatch.setattr(figures, "FOLDER", tmp_path / "docs" / "figures")
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
  change(copy / "README.md", "| `digits` | 8 x 8", "| `digits` | 9 x 9")
  change(copy / "docs" / "accelerators.md", "GiB |", "TiB |")
  (copy / "docs" / "evidence.md").unlink()
  status, lines = check(capsys)
  assert status == 1
  assert lines[:3] == [
    "README.md: the part 'trained' differs from the records",
    "docs/accelerators.md: the part 'compiled' differs from the records",
    "docs/evidence.md differs from the records",
  ]
  assert "differ in 3 places" in lines[3] and len(lines) == 4
  assert runs.files(copy) == before
  assert check(capsys) == (0, [])


def test_record_that_changes_is_noticed_in_tables_and_text(copy, capsys):
  path = copy / "benchmarks" / "results" / "digits.json"
  change(path, '"bits_per_dim": 1.9041', '"bits_per_dim": 1.7741')
  before = runs.files(copy)
  status, lines = check(capsys, "--check")
  assert status == 1
  assert lines[0] == "README.md: the part 'trained' differs from the records"
  assert "lacks what the records say: The quickstart ends with 1.77" in lines[1]
  assert re.match(r"README.md:\d+: no record has the number 1\.90", lines[2])
  assert runs.files(copy) == before


@pytest.mark.parametrize(
  "content, words",
  [
    (None, "benchmarks/results/digits.json is missing"),
    ("{", "digits.json cannot be read"),
    ("{}", "README.md is made from has no field 'machine'"),
  ],
)
def test_missing_or_broken_record_is_one_clear_line(
  content, words, copy, capsys
):
  path = copy / "benchmarks" / "results" / "digits.json"
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
    assert not folders, f"{path.name}: python -m benchmarks.keep"


def test_record_that_a_page_names_must_exist(copy, capsys):
  text = "See benchmarks/results/long_ago.json.\n\n## License"
  change(copy / "README.md", "## License", text)
  status, lines = check(capsys)
  assert status == 1 and len(lines) == 1
  assert "README.md names benchmarks/results/long_ago.json" in lines[0]


@pytest.mark.parametrize(
  "text, numbers",
  [
    ("It takes 7 seconds, or\n8.5 minutes.", [(1, "7"), (2, "8.5")]),
    ("within 1e-5 and n^1.31", [(1, "1e-5"), (1, "1.31")]),
    ("± 0.03 (2,048)", [(1, "0.03"), (1, "2,048")]),
    ("CIFAR-10 on an H100 in bfloat16, n², v5e", []),
    ("`--steps=5` [10](page-3.md)\n```\nmake 3\n```\n", [(1, "10")]),
    (
      f"{page.BEGIN.format('a')}\n\n| 4 |\n\n{page.END}\nand 5",
      [(6, "5")],
    ),
    ("in 12\nbits it is 13", [(2, "13")]),
  ],
)
def test_numbers_that_nothing_accounts_for_are_found(text, numbers):
  found = page.problems(text, ["in 12 bits"] if "in 12" in text else [])
  assert found == [
    f"README.md:{line}: no record has the number {number}; make it one of"
    " benchmarks/readme/sentences.py"
    for line, number in numbers
  ]


def test_unknown_part_of_a_page_is_an_error():
  text = f"{page.BEGIN.format('unknown')}\n\n{page.END}\n"
  with pytest.raises(ValueError, match="different parts: .*unknown"):
    page.made("README.md", text)


# Evidence.


def comparison(**changes):
  """A record of a comparison of two patterns; strided is ahead, and faster."""
  made = [
    comparisons.run(choice, seed, bits + seed / 100, tokens_per_step=4096)
    for seed in range(3)
    for choice, bits in {"dense": 4.0, "strided": 3.0}.items()
  ]
  config = runs.tiny(**{"train.batch_size": 1}).to_dict()
  about = dict(budget=("seconds", 13), unit="bits/byte", commit="abcdef0")
  return comparisons.record(*made, **about | dict(config=config) | changes)


def context():
  """A record of one run with two minimum contexts."""
  less = dict(min_context=256, bits=2.9, difference=-0.1)
  contexts = [
    dict(min_context=0, bits=3.0, difference=0.0, difference_error=0.0),
    less | dict(difference_error=0.02),
  ]
  run = dict(run="strided", length=4096, unit="bits/byte", contexts=contexts)
  about = dict(command="python -m benchmarks.context", machine="2", commit="1")
  return about | dict(symbols=65_536, block=4096, split="test", runs=[run])


def test_record_of_a_comparison_becomes_a_table_and_a_figure(copy, capsys):
  names = "long_text", "context"
  for name, content in zip(names, (comparison(), context()), strict=True):
    records.path(name).write_text(json.dumps(content))
  status, lines = check(capsys)
  assert status == 1
  for name in names:
    picture = f"docs/figures/{name}.png"
    assert f"{picture} was made from other records" in lines
    assert (copy / picture).read_bytes().startswith(b"\x89PNG")
  assert check(capsys) == (0, [])
  readme, text = (
    (copy / name).read_text() for name in ("README.md", "docs/evidence.md")
  )
  # At 40 steps, dense has its last 4.01 bits, and strided 3.01.
  assert (
    "**Patterns on text, n = 4,096, 13 seconds each.** Bits/byte of the"
    " validation split, mean ± standard deviation of 3 seeds: `strided` 3.01 ±"
    " 0.01, `dense` 4.01 ± 0.01. Difference from `dense`, seed by seed:"
    " `strided` -1.00 ± 0.00. At 40 steps: `strided` 3.01 ± 0.01, `dense` 4.01"
    " ± 0.01."
  ) in " ".join(readme.split())
  assert "![Patterns on text](docs/figures/long_text.png)" in readme
  assert "change by: `strided` -0.100 ± 0.020." in " ".join(readme.split())
  assert "| strided | 3.0100 ± 0.0100 | -1.0000 ± 0.0000 | 3.0100 ±" in text
  assert "| `strided` | 4,096 | 3.000 | -0.100 ± 0.020 |" in text
  assert "3 seeds; a machine; commit abcdef0." in text
  # Without the record, what it gave is an error until it is taken out.
  records.path("context").unlink()
  with pytest.raises(FileNotFoundError, match="context.json"):
    page.check_records("docs/evidence.md", text.replace("../", ""))


def test_headline_holds_whichever_choice_is_the_best():
  made = [comparisons.run("dense", 0, 2.0), comparisons.run("local", 0, 2.004)]
  found = comparisons.record(*made)
  assert evidence.headline(found) == (
    "Bits/dim of the validation split, 1 seed: `dense` 2.00, `local` 2.00."
    " Difference from `dense`: `local` +0.00. At 20 seconds of training:"
    " `local` 2.00, `dense` 4.00."
  )


def test_figure_of_another_record_is_outdated(copy):
  records.path("context").write_text(json.dumps(context()))
  (name,) = figures.outdated()
  figures.draw(name)
  assert figures.outdated() == []
  other = context()
  other["runs"][0]["contexts"][1]["bits"] = 2.8
  records.path("context").write_text(json.dumps(other))
  assert figures.outdated() == [name]
