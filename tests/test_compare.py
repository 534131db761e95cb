"""Tests of compare.py: budgets, choices, a comparison from end to end."""

import json

import numpy as np
import pytest
import runs

from sparse_transformer import compare
from sparse_transformer.training import costs
from sparse_transformer.training.experiment import Experiment

pytestmark = pytest.mark.filterwarnings(
  "ignore:the load_module:DeprecationWarning"
)
SCRIPT = "sparse_transformer/compare.py"


@pytest.mark.parametrize(
  "text, expected",
  [
    ("steps:500", ("steps", 500)),
    ("seconds:1.5", ("seconds", 1.5)),
    ("flops:1e15", ("flops", 1e15)),
  ],
)
def test_budget(text, expected):
  assert compare.parse_budget(text) == expected


@pytest.mark.parametrize(
  "text", ["", "500", "steps", "steps:", "steps:x", "hours:3", "steps:0"]
)
def test_budget_that_is_none(text):
  with pytest.raises(ValueError, match="steps:N, seconds:N or flops:N"):
    compare.parse_budget(text)


@pytest.mark.parametrize(
  "text, choices",
  [
    ("attention.pattern=dense,local", ["dense", "local"]),
    ("attention.pattern=dense", ["dense"]),
    ("model.width=16, 32", ["16", "32"]),
    ("attention.cycle=(0,),(1,0)", ["(0,)", "(1,0)"]),
    ("attention.pattern=BigBird(8, 3),local", ["BigBird(8, 3)", "local"]),
    ("attention.pattern=Local(4), Strided(4);dense", None),
  ],
)
def test_choices(text, choices):
  field, found = compare.parse_vary(text, runs.tiny())
  assert field == text.partition("=")[0]
  assert found == (choices or ["Local(4), Strided(4)", "dense"])


@pytest.mark.parametrize(
  "text, words",
  [
    ("pattern=dense", "no field 'pattern'"),
    ("attention.patern=dense", "no field 'attention.patern'"),
    ("attention.pattern", "different values"),
    ("attention.pattern=dense,,local", "different values"),
    ("attention.pattern=dense,dense", "different values"),
  ],
)
def test_choices_that_are_none(text, words):
  with pytest.raises(ValueError, match=words):
    compare.parse_vary(text, runs.tiny())


@pytest.mark.parametrize(
  "field, text, value",
  [
    ("model.width", "32", 32),
    ("model.dropout", "0.1", 0.1),
    ("model.half_size", "True", True),
    ("attention.cycle", "(1, 0)", (1, 0)),
    ("attention.pattern", "fixed", "fixed"),
  ],
)
def test_any_field_can_be_varied(field, text, value):
  config = runs.tiny()
  changed = compare.with_values(config, **{field: text}).to_dict()
  group, name = field.split(".")
  assert changed[group].pop(name) == value
  expected = config.to_dict()
  del expected[group][name]
  assert changed == expected


@pytest.mark.parametrize("text", ["wide", "1.5", "'a'"])
def test_value_of_another_type_is_refused(text):
  with pytest.raises(ValueError, match="model.width"):
    compare.with_values(runs.tiny(), **{"model.width": text})


def test_choices_have_folders_of_their_own():
  names = ["dense", "Local(4), Strided(4)", "Local(4) | Strided(4)", "1e-3"]
  folders = {compare.folder_name(name) for name in names}
  assert len(folders) == len(names)
  assert not any(set(folder) & set("/ |()") for folder in folders)


def test_steps_of_a_budget_of_operations():
  config = runs.tiny()
  report = costs.step(config, Experiment(config).model, 0)["flops"]
  pairs = sum(
    pattern.pairs(64)
    for heads in Experiment(config).model.patterns
    for pattern in heads
  )
  step = report["weights"] + pairs * 8 * 14 * 8
  assert compare.flops_per_step(config) == step
  assert compare.count_steps(config, "flops", 7.5 * step) == 7
  assert compare.count_steps(config, "steps", 9) == 9


def test_means_and_deviations_are_over_the_seeds():
  result = dict(steps=3, seconds=2.0, tokens_per_second=5.0, flops=1e9)
  found = compare.summarize(
    {
      "a": [
        result | dict(bits_per_dim=b, peak_bytes=p)
        for b, p in ((1.0, 7), (2.0, 9), (6.0, 8))
      ],
      "b": [result | dict(bits_per_dim=1.5, peak_bytes=1, seconds=None)],
    }
  )
  assert found[0]["bits_per_dim"] == 3 and found[0]["peak_bytes"] == 9
  assert found[0]["deviation"] == pytest.approx(np.std([1, 2, 6], ddof=1))
  assert found[1]["deviation"] is None and found[1]["seconds"] is None


def words(tmp_path, *more):
  settings = runs.tiny().to_dict()
  small = {
    f"--config.{group}.{name}={value}"
    for group in ("model", "train", "eval", "checkpoint")
    for name, value in settings[group].items()
  }
  return (
    f"--config={runs.REPO / 'configs' / 'digits.py'}",
    *sorted(small),
    f"--workdir={tmp_path / 'c'}",
    *more,
  )


def test_comparison_from_end_to_end(tmp_path, capfd):
  vary = "--vary=attention.pattern=local,Strided(8)"
  line = words(tmp_path, vary, "--budget=steps:6", "--seeds=1")
  assert runs.command(SCRIPT, *line) == 0
  root, output = tmp_path / "c", capfd.readouterr().out
  text = (root / "comparison.md").read_text()
  assert text in output and len(text.splitlines()) == 4
  rows = json.loads((root / "comparison.json").read_text())["rows"]
  assert [row["choice"] for row in rows] == ["local", "Strided(8)"]
  for row in rows:
    assert row["steps"] == 6 and row["seeds"] == 1
    assert 3 < row["bits_per_dim"] < 6 and row["deviation"] is None
    assert row["peak_bytes"] > 2**20 and row["tokens_per_second"] > 0
  page = (root / "comparison.html").read_text()
  assert "data:image/png;base64," in page and "http" not in page
  # All is done: nothing is trained again, all files stay as they are.
  before = runs.files(root)
  assert runs.command(SCRIPT, *line) == 0
  assert runs.files(root) == before
  # Another comparison does not fit in here.
  other = words(tmp_path, vary, "--budget=steps:7", "--seeds=1")
  assert runs.command(SCRIPT, *other) == 1
  assert "budget differ" in capfd.readouterr().err


@pytest.mark.soak
def test_comparison_takes_up_the_run_that_is_missing(tmp_path):
  vary = "--vary=attention.pattern=local,Strided(8)"
  line = words(tmp_path, vary, "--budget=steps:6", "--seeds=2")
  assert runs.command(SCRIPT, *line) == 0
  root = tmp_path / "c"
  for row in json.loads((root / "comparison.json").read_text())["rows"]:
    assert row["seeds"] == 2 and row["deviation"] > 0
  missing = root / "local" / "seed1" / "result.json"
  expected = json.loads(missing.read_text())
  missing.unlink()
  others = {p: p.read_bytes() for p in root.glob("*/seed*/result.json")}
  assert runs.command(SCRIPT, *line) == 0
  found = json.loads(missing.read_text())
  assert found["bits_per_dim"] == expected["bits_per_dim"]
  assert all(path.read_bytes() == text for path, text in others.items())


@pytest.mark.parametrize(
  "more, message",
  [
    (["--vary=model.width=16,banana"], "model.width=banana"),
    (["--vary=attention.pattern=local,wrong"], "unknown attention.pattern"),
    (["--vary=model.width=16", "--budget=x"], "--budget=x"),
    (["--vary=model.width=16", "--seeds=0"], "--seeds=0"),
    ([], "--vary is missing"),
  ],
)
def test_mistakes_are_one_line_and_leave_nothing(
  more, message, tmp_path, capsys
):
  assert runs.command(SCRIPT, *words(tmp_path, *more)) == 1
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1
  assert not (tmp_path / "c").exists()
