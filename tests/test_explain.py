"""Tests of the command explain: the report of a config before training."""

import dataclasses
import json

import catalogue
import numpy as np
import pytest
import runs
from PIL import Image

from configs import digits
from sparse_transformer import patterns
from sparse_transformer.patterns import analysis
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.explanation import network_report

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
  assert (local["layers"], strided["layers"]) == ([0, 2, 4], [1, 3, 5])
  assert local["pairs"] == 64 * 8 - 28 and local["keys_max"] == 8
  assert (local["cache"], strided["cache"]) == (8, 64 - 7)
  assert (local["tile"], local["computed"]) == ([64], 64**2)
  assert strided["keys_mean"] == 4.5 and strided["keys_min"] == 1
  # 14 FLOPs for each pair and for each of 32 channels.
  assert local["flops"] == 484 * 14 * 32 * 4 * 3 * 16
  assert result["total"]["pairs"] == 4 * 3 * (484 + 288)
  assert result["reach"]["layers"] == 2 and result["reach"]["missing"] is None
  assert result["cache"]["bytes"] == 4 * 3 * (8 + 57) * 64 * 4
  assert result["memory"]["parameters"] == 4 * parameters
  # The product after attention: a multiply-add for each weight and position.
  assert result["step"]["flops"]["recomputed"] == 6 * 2 * 128**2 * 64 * 16


def test_pattern_of_a_user():
  thirds, local = catalogue.Thirds(), patterns.Local(4)
  result = report(TWO_LAYERS, (thirds, local), (thirds, thirds - thirds))
  rows = result["attention"]
  names = [(row["pattern"], row["heads"]) for row in rows]
  assert names[:2] == [(str(thirds), [0]), (str(local), [1])]
  matrix = thirds.matrix(64)
  assert rows[0]["pairs"] == matrix.sum()
  assert rows[0]["keys_min"] == matrix.sum(1).min()
  empty = rows[3]
  assert (empty["pairs"], empty["cache"], empty["flops"]) == (0, 0, 0)
  seen = patterns.reach(((thirds, local), (thirds,)), 64)
  missing = np.argwhere(~seen & np.tri(64, dtype=bool))
  assert result["reach"]["missing"] == missing[0].tolist()


@pytest.mark.parametrize(
  "shape, target", [((8, 8), 32), ((4, 5, 3), 2 * 15 + 2 * 3 + 2)]
)
def test_bytes_that_keys_hold_are_those_of_the_mask(shape, target):
  n = int(np.prod(shape))
  config = Experiment(TWO_LAYERS).model
  wide = patterns.Local(3) | patterns.Strided(9), patterns.Strided(6, 1)
  chosen = patterns.LSH(8, 4), patterns.Local(3)
  none = (catalogue.Fifths() - catalogue.Fifths(),) * 2
  network = dataclasses.replace(
    config, length=n, shape=shape, patterns=(wide, chosen, wide, none)
  )
  held = network_report.find_held(network)
  assert held.target == target
  assert [group.layers for group in held.groups] == [[0, 2], [1], [3]]
  found = [
    [d for a, b in group.runs for d in range(a, b + 1)] for group in held.groups
  ]
  union = np.any([pattern.matrix(n)[target] for pattern in wide], axis=0)
  expected = [target - (k - 1) for k in np.flatnonzero(union) if k]
  assert found == [expected[::-1], [1, 2, 3], []]
  follow = [group.follows_content for group in held.groups]
  assert follow == [False, True, False]
  (titles, *rows) = network_report._held_rows(held)
  assert [what for _, what, *_ in rows[1:]] == [
    "t-1 to t-3, others by content",
    "none",
  ]
  if len(shape) == 2:
    assert held.row is None and len(titles) == 2
  else:
    above = [group.above for group in held.groups]
    assert above == [15 in expected, None, False]
    assert [row[-1] for row in rows] == ["no", "by content", "no"]


def test_network_that_is_not_causal_has_no_cache():
  result = report(TWO_LAYERS, *((catalogue.Around(),) * 2,) * 2)
  assert result["cache"] is None and result["reach"]["layers"] is None
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
  assert {row["keys_min"] for row in rows.values()} == {None}
  row = rows[str(blocks)]
  assert row["pairs"] == 64 * 4.5 + 64 * 8 * (0 + 1 + 2 + 3 * 5) / 8
  assert (row["keys_max"], row["executor"]) == (8 + 24, "streamed, gathered")
  assert row["computed"] % 64 == 0 and row["computed"] > 64**2
  assert rows[str(routing)]["computed"] == 64**2
  # All keys, and labels of 64 positions: rounds, blocks and clusters.
  states = 64 * (2 + 3 + 2 * 1)
  cache = result["cache"]
  assert cache["bytes"] == cache["full_bytes"] + 4 * states
  # Static pairs connect what is in a block; with any of the past, all is.
  assert result["reach"]["missing"] == [8, 0]
  assert result["may_see"] == 1
  text = "\n".join(result["text"])
  assert "~" in text and "the content may leave fewer" in text
  lines = [line.split()[:5] for line in result["text"]]
  assert ["may", "see", "everything", "after", "1"] in lines


def test_command_says_which_bytes_keys_hold(tmp_path, capsys):
  words = runs.DIGITS, f"--out={tmp_path}"
  assert runs.command(SCRIPT, *words) == 0
  out = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
  lines = [[cell.strip() for cell in line if cell] for line in out]
  assert ["0, 2, 4", "t-1 to t-8", "yes"] in lines
  assert ["1, 3, 5", "t-1, t-9, t-17, t-25, t-33", "no"] in lines
  pattern = "--config.attention.pattern=Local(2), Strided(8)"
  assert runs.command(SCRIPT, *words, pattern) == 0
  assert "byte above the target, t-8" in capsys.readouterr().err
  target = "--config.attention.pattern=strided_target"
  assert runs.command(SCRIPT, *words, target, "--json", "--compile") == 0
  output = capsys.readouterr()
  assert not output.err
  result = json.loads(output.out)
  held, compiled = result["held"], result["compiled"]
  assert compiled["arguments"] > 3 * 4 * result["network"]["parameters"]
  assert (held["target"], held["row"]) == (36, 8)
  assert held["groups"][1]["runs"] == [[d, d] for d in (8, 16, 24, 32)]
  assert held["groups"][1]["above"] is True


def test_command_prints_a_table_and_draws(tmp_path, capsys):
  assert runs.command(SCRIPT, runs.DIGITS, f"--out={tmp_path}") == 0
  out = capsys.readouterr().out
  columns = next(row for row in out.splitlines() if row.startswith("pattern"))
  assert all(name in columns for name in network_report.COLUMNS)
  for words in str(patterns.Local(8)), "everything after 2 layers", "1,196,416":
    assert words in out
  pictures = sorted(path.name for path in tmp_path.iterdir())
  assert pictures == ["pattern_0.png", "pattern_1.png", "patterns.png"]
  widths = []
  for picture in pictures:
    with Image.open(tmp_path / picture) as image:
      widths.append(image.width)
  assert widths[0] == widths[1] < widths[2]  # one pattern, and both


# Heads of a run.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The workdir of a run with patterns that follow the content."""
  # Two with directions in the first head.
  first = "Local(4) | Routing(4, 8) | Routing(8, 4)"
  pattern = f"({first}, Block(8) | TopBlocks(8, 3)), Strided(8)"
  changes = {"attention.pattern": pattern, "model.num_layers": 2}
  config = runs.tiny(**changes)
  return runs.untrained(tmp_path_factory.mktemp("run"), config)


def heads(capsys, *words):
  assert runs.command(SCRIPT, *words, "--example=3", "--json") == 0
  return json.loads(capsys.readouterr().out)


def test_heads_of_a_run_are_drawn_on_an_example(run, capsys):
  word = f"--workdir={run}"
  result = heads(capsys, word)
  rows = result["heads"]
  places = [(row["layer"], row["head"]) for row in rows]
  assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
  blocks, strided = patterns.parse("Block(8) | TopBlocks(8, 3), Strided(8)")
  assert rows[1]["pairs"] == analysis.count_pairs(blocks[0], 64)
  assert rows[2]["pairs"] == rows[3]["pairs"] == strided[0].pairs(64)
  assert result["pictures"] == [
    str(run / "attention" / f"layer_{layer}.png") for layer in (0, 1)
  ]
  saved = json.loads((run / "attention" / "attention.json").read_text())
  assert saved == {key: result[key] for key in saved}
  sharp = heads(capsys, word, "--temperature=0.1", f"--out={run / 'sharp'}")
  for row, other in zip(rows, sharp["heads"], strict=True):
    assert other["pairs"] == row["pairs"]
    assert 0 < other["entropy"] < row["entropy"]
  assert runs.command(SCRIPT, word, "--example=3") == 0
  out = capsys.readouterr().out
  assert str(blocks[0]) in out and "entropy" in out
  assert runs.command("sparse_transformer/report.py", word) == 0
  page = (run / "report.html").read_text()
  assert "heads, layer_0" in page and "heads, layer_1" in page
