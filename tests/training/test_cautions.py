"""Tests of what is said about settings that are probably an accident."""

import re

import pytest
import runs

from configs import default, digits, enwik8, text_small
from sparse_transformer.training import cautions, loop


@pytest.mark.parametrize(
  "preset, changes, words",
  [
    (digits, {}, None),  # strided
    (digits, {"pattern": "fixed"}, "=1, 4 heads of fixed .*num_summaries=4$"),
    (digits, {"pattern": "fixed", "num_summaries": 2}, None),
    (digits, {"pattern": "fixed", "mode": "heads"}, "=1, 2 heads of fixed "),
    (digits, {"pattern": "fixed", "width": 4}, "num_summaries=2$"),
    (digits, {"pattern": "fixed", "width": 8}, None),  # no room for more
    (digits, {"pattern": "Block(8) | Summary(8, 2)"}, None),
    (default, {"pattern": "fixed_lra", "mode": "merged"}, "4 heads of fixed_l"),
    (enwik8, {}, None),
    (text_small, {}, None),
  ],
)
def test_shared_summaries_are_reported(preset, changes, words, capsys):
  config = preset.get_config()
  config.attention.update(changes)
  cautions.report(config)
  error = capsys.readouterr().err
  assert error.count("\n") == (words is not None)
  assert re.search(words or "^$", error)


def test_training_starts_with_the_line(tmp_path, capsys):
  changes = {"attention.pattern": "fixed", "train.steps": 0}
  loop.train(runs.tiny(**changes), tmp_path)
  assert "attention.num_summaries=1" in capsys.readouterr().err
