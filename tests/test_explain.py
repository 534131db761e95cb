"""Tests of the command explain: the report of a config before training."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import catalogue, runs
from helpers.reference_reach import reach

from configs import digits
from sparse_transformer import patterns
from sparse_transformer.patterns import analysis
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.reports import network_report

SCRIPT = "sparse_transformer/explain.py"
TWO_LAYERS = runs.tiny(**{"model.num_layers": 2})


def report(config, *layers):
  """The report on a config, with other patterns if any are given."""
  network = Experiment(config).model
  if layers:
    network = dataclasses.replace(network, patterns=layers)
  found = network_report.describe(config, network)
  lines = network_report.render(found).splitlines()
  assert max(map(len, lines)) < 160
  return json.loads(json.dumps(dataclasses.asdict(found))) | dict(text=lines)


def test_digits():
  result = report(digits.get_config())
  parameters = result["network"]["parameters"]

  assert parameters == 1_196_416
  local, strided = result["attention"]
  assert local["layers"] == [0, 2, 4]
  assert strided["layers"] == [1, 3, 5]
  assert local["pairs"] == 64 * 8 - 28
  assert local["most_keys"] == 8
  assert local["cached_keys"] == 8
  assert strided["cached_keys"] == 64 - 7
  assert local["tiles"] == [64]
  assert local["computed"] == 64**2
  # 12 FLOPs for each pair and for each of 32 channels.
  pairs = 4 * 3 * (484 + 288)
  assert result["flops"]["attention"] == pairs * 12 * 32 / 64
  assert ["all", f"{pairs:,}"] in [x.split()[:2] for x in result["text"]]
  assert result["reach"]["layers"] == 2
  assert result["reach"]["missing"] is None
  assert result["cache"] == 4 * 3 * (8 + 57) * 64 * 4

  config = digits.get_config()
  config.model.key_heads = 2

  assert report(config)["cache"] == result["cache"] / 2
  assert result["memory"]["parameters"] == 4 * parameters


def test_pattern_of_a_user():
  thirds = catalogue.Thirds()
  local = patterns.Local(4)
  result = report(TWO_LAYERS, (thirds, local), (thirds, thirds - thirds))

  first, second, _, nothing = result["attention"]

  assert first["pattern"] == str(thirds)
  assert first["heads"] == [0]
  assert first["pairs"] == thirds.matrix(64).sum()
  assert second["pattern"] == str(local)
  assert second["heads"] == [1]
  assert nothing["pairs"] == nothing["cached_keys"] == nothing["computed"] == 0

  seen = reach(((thirds, local), (thirds,)), 64)
  missing, *_ = np.argwhere(~seen & np.tri(64, dtype=bool))

  assert result["reach"]["missing"] == missing.tolist()


def test_network_that_is_not_causal_or_has_documents_has_no_cache():
  result = report(TWO_LAYERS, *((catalogue.Around(),) * 2,) * 2)
  assert result["cache"] is None
  assert result["reach"]["layers"] is None
  assert not report(runs.text("x", **{"data.documents": True}))["cache"]
  assert any("never reaches" in line for line in result["text"])


CONTENT = (
  "Local(8) | LSH(8, 4, rounds=2)",
  "Block(8) | TopBlocks(8, 3)",
  "Routing(clusters=4, window=16)",
)


def test_patterns_that_follow_the_content():
  union, blocks, routing = (patterns.parse(text)[0][0] for text in CONTENT)
  result = report(TWO_LAYERS, (union, blocks), (routing, routing))
  rows = {row["pattern"]: row for row in result["attention"]}
  row = rows[str(blocks)]

  assert row["pairs"] == 64 * 4.5 + 64 * 8 * (0 + 1 + 2 + 3 * 5) / 8
  assert row["most_keys"] == 8 + 24
  assert row["backends"] == ["streamed", "gathered"]
  assert row["computed"] % 64 == 0
  assert row["computed"] > 64**2
  assert rows[str(routing)]["computed"] == 64**2
  assert result["cache"] == 4 * 64 * 16 * 4  # all keys and values
  # Static pairs connect what is in a block; with any of the past, all is.
  assert result["reach"]["missing"] == [8, 0]
  assert result["may_see"] == 1
  lines = [line.split()[:5] for line in result["text"]]
  assert ["may", "see", "everything", "after", "1"] in lines


def test_command_prints_a_table_and_draws(tmp_path, capsys):
  words = runs.DIGITS, f"--out={tmp_path}"
  pattern = "--config.attention.pattern=Local(2), Strided(8)"
  assert runs.command(SCRIPT, *words, pattern) == 0
  out, err = capsys.readouterr()

  assert "byte above the target, t-8" in err
  columns = next(row for row in out.splitlines() if row.startswith("pattern"))
  assert all(name in columns for name in network_report.COLUMNS)
  recomputed = "model.remat=auto: the first of none, block_but_attention, block"
  for text in str(patterns.Local(2)), "sees  ", "1,196,416", recomputed:
    assert text in out
  assert [path.name for path in tmp_path.iterdir()] == ["patterns.png"]

  words += *runs.flags_of(), "--json", "--compile"
  assert runs.command(SCRIPT, *words) == 0
  result = json.loads(capsys.readouterr().out)
  compiled = result["compiled"]
  parameters = result["network"]["parameters"]

  assert compiled["arguments"] > 3 * 4 * parameters
  assert result["remat"].startswith("model.remat=none: none needs ")


# Heads of a run.


@pytest.mark.soak
def test_heads_of_a_run_are_drawn_on_an_example(tmp_path, capsys):
  # Patterns that follow the content, two with directions in the first head.
  first = "Local(4) | Routing(4, 8) | Routing(8, 4)"
  pattern = f"({first}, Block(8) | TopBlocks(8, 3)), Strided(8)"
  changes = {
    "attention.pattern": pattern,
    "model.num_layers": 2,
  }
  run = runs.untrained(tmp_path, runs.tiny(**changes))
  words = f"--workdir={run}", "--example=3"
  assert runs.command(SCRIPT, *words, "--json") == 0
  result = json.loads(capsys.readouterr().out)
  rows = result["heads"]
  places = [(row["layer"], row["head"]) for row in rows]

  assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
  blocks, strided = patterns.parse("Block(8) | TopBlocks(8, 3), Strided(8)")
  assert rows[1]["pairs"] == analysis.count_pairs(blocks[0], 64)
  assert rows[2]["pairs"] == rows[3]["pairs"] == strided[0].pairs(64)
  pictures = (run / "attention" / f"layer_{layer}.png" for layer in (0, 1))
  assert result["pictures"] == [*map(str, pictures)]
  saved = json.loads((run / "attention" / "attention.json").read_text())
  assert saved == {key: result[key] for key in saved}
  assert runs.command(SCRIPT, *words) == 0
  out = capsys.readouterr().out

  assert str(blocks[0]) in out
  assert "entropy" in out
  page = runs.report(run)
  assert 'alt="layer_0"' in page
  assert 'alt="layer_1"' in page
