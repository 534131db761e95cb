"""Tests of what is said about settings that may be a mistake."""

import pathlib
import re
import shlex

import pytest
from helpers import runs

from configs import cifar10, digits, enwik8
from sparse_transformer import config as config_lib, data
from sparse_transformer.training import banner
from sparse_transformer.training.experiment import Experiment

# Of patterns alone, as expressions.
ABOVE = [
  # In the published networks, the end of the window holds the byte above.
  (cifar10, "strided", None),
  (
    digits,
    "Local(7), Strided(8)",
    r"above the target, t-8, .* holds t-9; use S",
  ),
  (digits, "Local(7) | Strided(8)", r"; use Strided\(8, offset=1\)"),
  (digits, "strided_target", None),
  (digits, "Local(7)", None),  # does not reach the row above
  (digits, "Local(2) | Strided(4)", "t-8, "),
  (digits, "Strided(8), LSH(8, 4)", None),  # it may be among the chosen
  (digits, "Column(8, 1)", "t-8, "),
  (cifar10, "Row(32), Column(32)", "t-96, "),  # in the last channel
  (cifar10, "Column(32) | Strided(96, offset=1)", None),
  (enwik8, "Local(4) | Strided(128)", None),  # text has no rows
]


@pytest.mark.parametrize("file", [None, "a config.py"])
def test_command_at_the_end_works_in_any_folder(
  file, trained, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  experiment = Experiment(config_lib.read_config(trained))
  monkeypatch.setitem(data.SOURCES, "mine", lambda config: None)
  line = banner.end(experiment, trained, file)
  python, script, *words = shlex.split(line.partition("saved: ")[2])

  assert python == "python"
  assert pathlib.Path(script).resolve() == runs.REPO / "eval.py"
  own = [f"--config={file}"] if file else []
  assert words == [f"--workdir={trained}", *own, "--step=best"]


def assert_warns(preset, changes, words, capsys):
  config = preset.get_config()
  config.attention.update(changes)
  banner.warn(Experiment(config))
  error = capsys.readouterr().err
  assert error.count("\n") == (words is not None)
  assert re.search(words or "^$", error)


@pytest.mark.parametrize(
  "changes, words",
  [
    ({}, None),  # strided
    ({"pattern": "fixed"}, "=1, 4 heads of fixed .*num_summaries=4$"),
    ({"pattern": "fixed", "num_summaries": 2}, None),
    ({"pattern": "fixed", "mode": "heads"}, "=1, 2 heads of fixed "),
    ({"pattern": "fixed", "width": 8}, None),  # no room for more
    ({"pattern": "Block(8) | Summary(8, 2)"}, None),
  ],
)
def test_shared_summaries_are_reported(changes, words, capsys):
  assert_warns(digits, changes, words, capsys)


@pytest.mark.parametrize("preset, pattern, words", ABOVE)
def test_columns_that_skip_the_byte_above_are_reported(
  preset, pattern, words, capsys
):
  changes = {
    "pattern": pattern,
    "cycle": (),
  }
  assert_warns(preset, changes, words, capsys)
