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


def with_random_params(state):
  rng = np.random.default_rng(0)

  def draw(x):
    return np.asarray(0.1 * rng.normal(size=x.shape), x.dtype)

  params = jax.tree.map(draw, state.params)
  return dataclasses.replace(
    state,
    params=params,
    ema=params,
  )


def test_every_step_is_scored_with_every_context(workdir, capfd):
  found = scores(capfd, workdir, "--min_context=0,7,31", "--step=all")
  asked = [(line["step"], line["min_context"]) for line in found]

  assert asked == [(step, m) for step in (2, 4) for m in (0, 7, 31)]
  assert len({line["tokens"] for line in found}) == 1
  assert len({line["bits_per_dim"] for line in found}) == 6
  again = scores(capfd, workdir, "--step=2,4", "--min_context=7")
  assert again == [line for line in found if line["min_context"] == 7]
  assert scores(capfd, workdir) == [found[3]]  # the last step, no context
  (raw,) = scores(capfd, workdir, "--weights=params")
  assert raw["weights"] == "params"
  assert found[3]["weights"] == "ema"
  assert raw["bits_per_dim"] != found[3]["bits_per_dim"]
  words = "--split=validation", "--config.eval.sequences=0"  # it scored 8
  assert "in_training" not in scores(capfd, workdir, *words)[0]


def test_contexts_share_one_compilation(workdir, monkeypatch):
  made = []
  make_losses = step_lib.make_losses
  spy = lambda apply: made.append(make_losses(apply)) or made[-1]
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
  folder = shutil.copytree(workdir, tmp_path / "run")
  for step, bits in (
    (4, 4.5),
    (2, float("nan")),
    (2, 3.5),
  ):
    about = folder / "checkpoints" / str(step) / "about" / "metadata"
    content = json.loads(about.read_text()) | {"validation": bits}
    about.write_text(json.dumps(content))
    files = about.parents[1] / "files.json"
    crc = {"about/metadata": store.files.crc32(about)}
    files.write_text(json.dumps(json.loads(files.read_text()) | crc))
    best = 2 if bits == 3.5 else 4  # NaN does not count as a score
    assert step == 4 or store.Saved(folder).find("best") == best
  assert [x["step"] for x in scores(capfd, folder, "--step=best")] == [2]
  words = "sparse_transformer/sample.py", f"--workdir={folder}", "--num=1"
  assert runs.command(*words, "--step=best") == 0

  assert "of step 2 in" in capfd.readouterr().out


def test_score_under_overrides_is_apart_from_that_of_the_run(
  workdir, tmp_path, capfd
):
  """Neither its file nor the report passes it off as the run's own."""
  others = shutil.ignore_patterns("evaluations")
  folder = shutil.copytree(workdir, tmp_path / "run", ignore=others)
  (own,) = scores(capfd, folder)
  saved = runs.files(folder / "evaluations")
  # Changes that leave scores the same are not overrides.
  same = "--config.attention.backend=dense", "--config.eval.batch_size=7"
  (again,) = scores(capfd, folder, *same)

  assert runs.files(folder / "evaluations").keys() == saved.keys()
  assert own["overrides"] == again["overrides"] == {}

  saved = runs.files(folder / "evaluations")
  settings = {
    "attention.pattern": "Local(2)",
    "model.dtype": "float16",
  }
  for name, value in settings.items():
    (other,) = scores(capfd, folder, f"--config.{name}={value}")
    assert other["overrides"] == {name: value}
    assert other["bits_per_dim"] != own["bits_per_dim"]

  now = runs.files(folder / "evaluations")

  assert now | saved == now
  assert len(now) == 3 * len(saved)

  page = runs.report(folder)
  (table,) = re.findall("(?s)<h2>Evaluation</h2>.*?</table>", page)
  rows = [re.findall("<td>(.*?)</td>", row) for row in table.splitlines()]
  ends = [row[-2] for row in rows if row]

  assert ends[0] == ""
  assert len(ends) == 3
  assert {*ends[1:]} == {f"{k}={v}" for k, v in settings.items()}


def test_first_examples_are_scored_apart(workdir, tmp_path, capfd):
  folder = shutil.copytree(workdir, tmp_path / "run")
  words = "--min_context=7", "--split=validation"
  (whole,) = scores(capfd, folder, *words)
  saved = runs.files(folder / "evaluations")
  (part,) = scores(capfd, folder, *words, "--examples=2")

  assert part["examples"] == 2
  assert part["tokens"] == 32 + 25
  assert part["overrides"] == dict(examples=2)
  assert part["bits_per_dim"] != whole["bits_per_dim"]
  now = runs.files(folder / "evaluations")
  assert now | saved == now
  new = {"validation-step4-context7-ema-examples2.json"}
  assert {x for x in now.keys() - saved.keys() if "png" not in x} == new
  (all_,) = scores(capfd, folder, *words, f"--examples={whole['examples']}")
  assert all_["bits_per_dim"] == whole["bits_per_dim"]


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
    score = dataclasses.replace(score, standard_error=unknown, overrides={})
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
  folders = []
  paths = []
  found = []
  for seed in range(2):
    path, config = write_other(name, tmp_path / f"data{seed}", seed)
    folder = tmp_path / f"run{seed}"
    runs.untrained(folder, config, with_random_params)
    paths.append(path)
    folders.append(folder)
    found += scores(capfd, folder)

  saved = runs.files(folders[0] / "evaluations")
  (other,) = scores(capfd, folders[0], f"--config.data.path={paths[1]}")

  assert other["bits_per_dim"] == found[1]["bits_per_dim"]
  assert other["bits_per_dim"] != found[0]["bits_per_dim"]
  assert other["overrides"]["data.path"] == str(paths[1])
  assert other["overrides"]["data"]["crc32"]
  now = runs.files(folders[0] / "evaluations")
  assert now | saved == now
  assert len(now) == 2 * len(saved)

  # In another place, the same data are the run's own.
  paths[0].parent.rename(tmp_path / "moved")
  word = f"--config.data.path={tmp_path / 'moved' / paths[0].name}"
  (moved,) = scores(capfd, folders[0], word)

  assert moved | dict(command="") == found[0] | dict(command="")


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
  assert err.endswith(f", {result['tokens']} bytes, min_context=9\n")
  stem = workdir / "evaluations" / "validation-step4-context9-ema"
  saved = json.loads(stem.with_suffix(".json").read_text())
  bits = saved["by_position"]

  assert saved["config"]["data"]["length"] == 32
  assert saved == saved | result
  assert len(bits) == 32

  # Windows start at 0, 23, ...: how often each position counts.
  size = result["tokens"]
  counts = [
    sum(1 for i in range(0, size, 23) if i + p < size and (i == 0 or p >= 9))
    for p in range(32)
  ]
  total = np.dot(bits, counts) / size

  assert total == pytest.approx(result["bits_per_dim"], abs=1e-5)
  assert stem.with_suffix(".png").stat().st_size > 1000


def test_untrained_network_scores_the_size_of_its_alphabet(tmp_path, capfd):
  runs.untrained(tmp_path / "digits", runs.tiny())
  (result,) = scores(capfd, tmp_path / "digits")

  assert result["bits_per_dim"] == pytest.approx(math.log2(17), abs=1e-6)
  name = "digits/evaluations/test-step0-context0-ema.png"
  assert (tmp_path / name).stat().st_size > 1000
  assert result["step"] == 0
  assert result["examples"] == 200
  assert not result.keys() & {"by_channel", "optimum"}  # digits are gray

  path = tmp_path / "text"
  context = "--min_context=0,20"
  path.write_bytes(np.random.RandomState(0).bytes(500))
  runs.untrained(tmp_path / "run", runs.text(path))
  assert runs.command("eval.py", f"--workdir={tmp_path / 'run'}", context) == 0
  said = capfd.readouterr().err.splitlines()
  ends = [x.rpartition(", ")[2] for x in said if x.startswith("test, ")]

  assert ends == ["min_context=0", "min_context=20"]
  for result in scores(capfd, tmp_path / "run", context):
    assert result["bits_per_dim"] == pytest.approx(8, abs=1e-6)
    assert result["tokens"] == 125
    assert result["unit"] == "bits/byte"


def test_images_are_scored_by_channel(tmp_path, monkeypatch):
  images = np.random.RandomState(0).randint(0, 17, (9, 2, 2, 3), np.uint8)
  source = data.Images((2, 2, 3), 17, lambda: dict.fromkeys(SPLITS, images))
  monkeypatch.setattr(Experiment, "source", source)
  config = runs.tiny(
    **{
      "attention.stride": 4,
      "attention.window": 4,
    }
  )
  runs.untrained(tmp_path, config, with_random_params)
  run = open_run(tmp_path)
  score = evaluate(run, run.restore(), ScoreRequest(weights="params"))
  assert len(set(score.by_channel)) == 3
  mean = np.mean(score.by_channel)
  assert score.bits_per_dim == pytest.approx(mean, rel=1e-6)


def test_score_that_cannot_be_written_is_printed(workdir, tmp_path, capfd):
  run = shutil.copytree(workdir, tmp_path / "run")
  shutil.rmtree(run / "evaluations", ignore_errors=True)
  (run / "evaluations").touch()

  assert runs.command("eval.py", f"--workdir={run}", "--step=all") == 1
  out, err = capfd.readouterr()
  assert len(err.splitlines()) == len(out.splitlines()) + 1 > 2  # sentences
  assert all(json.loads(x)["bits_per_dim"] for x in out.splitlines())
  assert "the score cannot be written" in err and "evaluations'" in err


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
