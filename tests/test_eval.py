"""Tests of the command eval.py on runs of a tiny network."""

import dataclasses
import json
import math
import re
import shutil

import jax
import numpy as np
import pytest
from helpers import runs, small_data
from helpers.cases import soak
from helpers.runs import scores

from sparse_transformer import data
from sparse_transformer.data import SPLITS
from sparse_transformer.training import loop, step as step_lib
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.evaluation import evaluations
from sparse_transformer.training.evaluation.evaluations import (
  ScoreRequest,
  evaluate,
)
from sparse_transformer.training.experiment import Experiment, open_run


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run on a text, with checkpoints of steps 2 and 4."""
  folder = tmp_path_factory.mktemp("runs")
  (folder / "text").write_bytes(b"to be or not to be, that is " * 30)
  changes = {
    "checkpoint.keep": 5,
    "model.dropout": 0.5,
  }  # not in evaluation
  config = runs.text(folder / "text", **changes)
  loop.train(config, folder / "run")
  return folder / "run"


def copy_of(workdir, folder):
  """A copy of a run that a test may change, without its scores."""
  without = shutil.ignore_patterns("evaluations")
  return shutil.copytree(workdir, folder / "run", ignore=without)


def assert_added(folder, before):
  """Checks that files of scores were added and none changed; returns them."""
  now = runs.files(folder / "evaluations")
  assert now | before == now
  return now.keys() - before.keys()


def with_random_params(state):
  random = np.random.default_rng(0)

  def draw(x):
    drawn = 0.1 * random.normal(size=x.shape)
    return drawn.astype(x.dtype)

  params = jax.tree.map(draw, state.params)
  return dataclasses.replace(
    state,
    params=params,
    ema=params,
  )


def test_every_step_is_scored_with_every_context(workdir, capfd):
  found = scores(capfd, workdir, "--min_context=0,7,31", "--step=all")
  asked = [(line["step"], line["min_context"]) for line in found]
  assert asked == [(2, 0), (2, 7), (2, 31), (4, 0), (4, 7), (4, 31)]
  assert len({line["tokens"] for line in found}) == 1
  assert len({line["bits_per_dim"] for line in found}) == 6

  again = scores(capfd, workdir, "--step=2,4", "--min_context=7")
  assert again == [found[1], found[4]]
  (last,) = scores(capfd, workdir)
  assert last == found[3]  # the last step, no context

  (raw,) = scores(capfd, workdir, "--weights=params")
  assert raw["weights"] == "params"
  assert last["weights"] == "ema"
  assert raw["bits_per_dim"] != last["bits_per_dim"]

  words = "--split=validation", "--config.eval.sequences=0"  # it scored 8
  (whole,) = scores(capfd, workdir, *words)
  assert "in_training" not in whole


def test_contexts_share_one_compilation(workdir, monkeypatch):
  made = []
  make_losses = step_lib.make_losses

  def spy(apply):
    made.append(make_losses(apply))
    return made[-1]

  monkeypatch.setattr(step_lib, "make_losses", spy)
  words = "--min_context=16,24,28,31", "--step=2,4"
  assert runs.command("eval.py", f"--workdir={workdir}", *words) == 0
  (losses,) = made
  assert losses._cache_size() == 1


def test_scores_are_float32_unless_asked(tmp_path, capfd):
  config = runs.tiny(**{"model.dtype": "float16"})
  runs.untrained(tmp_path, config, with_random_params)
  (found,) = scores(capfd, tmp_path)
  (other,) = scores(capfd, tmp_path, "--config.model.dtype=float16")
  assert found["dtype"] == "float32"
  assert other["dtype"] == "float16"
  assert found["bits_per_dim"] != other["bits_per_dim"]
  assert found["bits_per_dim"] == pytest.approx(other["bits_per_dim"], abs=0.02)


def test_products_of_float32_are_not_rounded(workdir, monkeypatch):
  """By default, accelerators round them to TF32 or bfloat16."""
  seen = []

  def losses(params, tokens_BL):
    seen.append(jax.default_matmul_precision.value)
    return np.ones(tokens_BL.shape)

  run = open_run(workdir)
  monkeypatch.setitem(vars(run.experiment), "losses", losses)
  state = run.restore()
  evaluate(run, state)
  assert {*seen} == {"highest"}
  with jax.default_matmul_precision("tensorfloat32"):  # the user's choice
    evaluate(run, state)
  assert seen[-1] == "tensorfloat32"


def test_best_step_is_the_best_validated_in_training(workdir, tmp_path, capfd):
  folder = copy_of(workdir, tmp_path)

  def validate(step, bits):
    checkpoint = folder / "checkpoints" / str(step)
    metadata = checkpoint / "about" / "metadata"
    content = json.loads(metadata.read_text()) | {"validation": bits}
    metadata.write_text(json.dumps(content))
    listed = json.loads((checkpoint / "files.json").read_text())
    listed["about/metadata"] = store.files.crc32(metadata)
    (checkpoint / "files.json").write_text(json.dumps(listed))
    return store.Saved(folder).find("best")

  assert validate(4, 4.5) == 4
  assert validate(2, math.nan) == 4  # NaN does not count as a score
  assert validate(2, 3.5) == 2
  (best,) = scores(capfd, folder, "--step=best")
  assert best["step"] == 2

  words = f"--workdir={folder}", "--num=1", "--step=best"
  assert runs.command("sparse_transformer/sample.py", *words) == 0
  assert "of step 2 in" in capfd.readouterr().out


def test_score_under_overrides_is_apart_from_that_of_the_run(
  workdir, tmp_path, capfd
):
  """Neither its file nor the report passes it off as the run's own."""
  folder = copy_of(workdir, tmp_path)
  (own,) = scores(capfd, folder)
  names = runs.files(folder / "evaluations").keys()
  # Changes that leave scores the same are not overrides.
  same = "--config.attention.backend=dense", "--config.eval.batch_size=7"
  (again,) = scores(capfd, folder, *same)
  before = runs.files(folder / "evaluations")
  assert before.keys() == names
  assert own["overrides"] == again["overrides"] == {}

  settings = {
    "attention.pattern": "Local(2)",
    "model.dtype": "float16",
  }
  for name, value in settings.items():
    (other,) = scores(capfd, folder, f"--config.{name}={value}")
    assert other["overrides"] == {name: value}
    assert other["bits_per_dim"] != own["bits_per_dim"]
  assert len(assert_added(folder, before)) == 2 * len(before)

  page = runs.report(folder)
  (table,) = re.findall("(?s)<h2>Evaluation</h2>.*?</table>", page)
  rows = [re.findall("<td>(.*?)</td>", row) for row in table.splitlines()]
  first, *others = (row[-2] for row in rows if row)
  assert first == ""
  assert sorted(others) == [f"{name}={x}" for name, x in settings.items()]


def test_first_examples_are_scored_apart(workdir, tmp_path, capfd):
  folder = copy_of(workdir, tmp_path)
  words = "--min_context=7", "--split=validation"
  (whole,) = scores(capfd, folder, *words)
  before = runs.files(folder / "evaluations")
  (part,) = scores(capfd, folder, *words, "--examples=2")
  assert part["examples"] == 2
  assert part["tokens"] == 32 + 25
  assert part["overrides"] == dict(examples=2)
  assert part["bits_per_dim"] != whole["bits_per_dim"]

  new = {x for x in assert_added(folder, before) if "png" not in x}
  assert new == {"validation-step4-context7-ema-examples2.json"}
  (every,) = scores(capfd, folder, *words, f"--examples={whole['examples']}")
  assert every["bits_per_dim"] == whole["bits_per_dim"]


def test_sentence_has_as_many_digits_as_are_known():
  score = evaluations.Score(
    split="test",
    step=1000,
    min_context=0,
    weights="ema",
    overrides={"examples": 200, "attention.pattern": "dense"},
    command="",
    dtype="float32",
    unit="bits/dim",
    bits_per_dim=1.51234,
    standard_error=0.0172,
    examples=200,
    tokens=12_800,
    stage="step 1,000",
    amount="200 images",
  )
  assert score.sentence() == (
    "test, step 1,000: 1.512 ± 0.017 bits/dim, 200 images, examples=200,"
    " attention.pattern=dense"
  )
  for unknown in None, math.nan:
    score = dataclasses.replace(
      score,
      standard_error=unknown,
      overrides={},
    )
    line = "test, step 1,000: 1.5123 bits/dim, 200 images"
    assert score.sentence() == line


# Other data than those of the run.


def write_other(name, folder, seed):
  """A folder or file with random data; the config of a run on it."""
  drawn = np.random.RandomState(seed).randint(1, 256, (18, 16), np.uint8)
  path = folder / "x"
  suffix = small_data.SUFFIXES[name]
  if name in ("images", "labelled"):  # several files
    for i, symbols in enumerate(drawn):
      small_data.write_symbols(path / "ab"[i % 2] / f"{i}{suffix}", symbols)
  else:
    path = path.with_suffix(suffix)
    small_data.write_symbols(path, drawn.ravel())

  changes = {
    "data.name": name,
    "attention.stride": 4,
    "attention.window": 4,
  }
  changes["model.task"] = "classify" if name == "labelled" else "generate"
  return path, runs.text(path, **changes)


@pytest.mark.parametrize(
  "name", ["bytes", *(soak(x) for x in small_data.SUFFIXES if x != "bytes")]
)
def test_other_data_are_scored_apart(name, tmp_path, capfd):
  folder = tmp_path / "run0"
  paths = []
  found = []
  for seed in range(2):
    path, config = write_other(name, tmp_path / f"data{seed}", seed)
    workdir = tmp_path / f"run{seed}"
    runs.untrained(workdir, config, with_random_params)
    paths.append(path)
    found += scores(capfd, workdir)

  own, of_other = found
  before = runs.files(folder / "evaluations")
  (other,) = scores(capfd, folder, f"--config.data.path={paths[1]}")
  assert other["bits_per_dim"] == of_other["bits_per_dim"]
  assert other["bits_per_dim"] != own["bits_per_dim"]
  assert other["overrides"]["data.path"] == str(paths[1])
  assert other["overrides"]["data"]["crc32"]
  assert len(assert_added(folder, before)) == len(before)

  # In another place, the same data are the run's own.
  paths[0].parent.rename(tmp_path / "moved")
  path = tmp_path / "moved" / paths[0].name
  (moved,) = scores(capfd, folder, f"--config.data.path={path}")
  assert moved | dict(command="") == own | dict(command="")


def test_text_of_another_source_is_scored_in_other_parts(workdir, capfd):
  text = workdir.parent / "other.jsonl"
  text.write_text(json.dumps(dict(text="x" * 399)))
  words = (
    "--config.data.name=jsonl",
    f"--config.data.path={text}",
    "--config.data.fractions=(0.1,0.1,0.8)",
  )
  (found,) = scores(capfd, workdir, *words)

  assert found["tokens"] == 320
  assert found["overrides"]["data.name"] == "jsonl"


def test_bits_by_position_are_written_and_drawn(workdir, capfd):
  words = "--split=validation", "--min_context=9"
  assert runs.command("eval.py", f"--workdir={workdir}", *words) == 0
  out, err = capfd.readouterr()
  result = json.loads(out)
  size = result["tokens"]
  assert err.endswith(f", {size} bytes, min_context=9\n")

  stem = workdir / "evaluations" / "validation-step4-context9-ema"
  saved = json.loads(stem.with_suffix(".json").read_text())
  bits = saved["by_position"]
  assert saved["config"]["data"]["length"] == 32
  assert saved == saved | result
  assert len(bits) == 32

  # Windows start at 0, 23, ...: how often each position counts.
  counts = np.zeros(32)
  for start in range(0, size, 23):
    first = 9 if start else 0
    counts[first : size - start] += 1
  mean = np.dot(bits, counts) / size
  assert mean == pytest.approx(result["bits_per_dim"], abs=1e-5)
  assert stem.with_suffix(".png").stat().st_size > 1000


def test_untrained_network_scores_the_size_of_its_alphabet(tmp_path, capfd):
  runs.untrained(tmp_path / "digits", runs.tiny())
  (result,) = scores(capfd, tmp_path / "digits")
  assert result["bits_per_dim"] == pytest.approx(math.log2(17), abs=1e-6)
  picture = "digits/evaluations/test-step0-context0-ema.png"
  assert (tmp_path / picture).stat().st_size > 1000
  assert result["step"] == 0
  assert result["examples"] == 200
  assert not result.keys() & {"by_channel", "optimum"}  # digits are gray

  path = tmp_path / "text"
  path.write_bytes(np.random.RandomState(0).bytes(500))
  run = runs.untrained(tmp_path / "run", runs.text(path))
  context = "--min_context=0,20"
  assert runs.command("eval.py", f"--workdir={run}", context) == 0
  said = capfd.readouterr().err.splitlines()
  ends = [x.rpartition(", ")[2] for x in said if x.startswith("test, ")]
  assert ends == ["min_context=0", "min_context=20"]
  for result in scores(capfd, run, context):
    assert result["bits_per_dim"] == pytest.approx(8, abs=1e-6)
    assert result["tokens"] == 125
    assert result["unit"] == "bits/byte"


def test_images_are_scored_by_channel(tmp_path, monkeypatch):
  images = np.random.RandomState(0).randint(0, 17, (9, 2, 2, 3), np.uint8)
  source = data.Images((2, 2, 3), 17, lambda: dict.fromkeys(SPLITS, images))
  monkeypatch.setattr(Experiment, "source", source)
  changes = {
    "attention.stride": 4,
    "attention.window": 4,
  }
  runs.untrained(tmp_path, runs.tiny(**changes), with_random_params)
  run = open_run(tmp_path)
  score = evaluate(run, run.restore(), ScoreRequest(weights="params"))
  assert len(set(score.by_channel)) == 3
  mean = np.mean(score.by_channel)
  assert score.bits_per_dim == pytest.approx(mean, rel=1e-6)


def test_score_that_cannot_be_written_is_printed(workdir, tmp_path, capfd):
  run = copy_of(workdir, tmp_path)
  (run / "evaluations").touch()
  assert runs.command("eval.py", f"--workdir={run}", "--step=all") == 1
  out, err = capfd.readouterr()
  printed = out.splitlines()
  assert len(printed) > 1
  assert len(err.splitlines()) == len(printed) + 1  # sentences
  assert all(json.loads(line)["bits_per_dim"] for line in printed)
  assert "the score cannot be written" in err
  assert "evaluations'" in err


def test_other_data_are_rejected(workdir, tmp_path, capfd, monkeypatch):
  checked = []
  monkeypatch.setattr(loop.kernel_check, "avoid_wrong", checked.append)
  run = shutil.copytree(workdir, tmp_path / "run")
  text = (workdir.parent / "text").read_bytes()
  (tmp_path / "text").write_bytes(text.replace(b"not", b"now"))
  config = json.loads((run / "config.json").read_text())
  config["data"]["path"] = str(tmp_path / "text")
  (run / "config.json").write_text(json.dumps(config))

  for name, *words in (
    ("eval.py",),
    ("sparse_transformer/sample.py", "--num=1", "--given=4"),
    ("sparse_transformer/explain.py", "--example=0"),
  ):
    assert runs.command(name, f"--workdir={run}", *words) == 1
    assert "on other data" in capfd.readouterr().err
  assert len(checked) == 3  # kernels, before they are used

  # Sampling without a prompt needs no data.
  sample = "sparse_transformer/sample.py"
  assert runs.command(sample, f"--workdir={run}", "--num=1") == 0
