"""The page of a run is complete, and needs no other file."""

import json
import re
import shutil
import zlib

import pytest
from helpers import runs

from sparse_transformer import config
from sparse_transformer.data.text import RULE
from sparse_transformer.training import costs, metrics
from sparse_transformer.training.loop import train


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run with samples and an evaluation, on a device of a known peak."""
  folder = tmp_path_factory.mktemp("runs") / "a run & <script>"
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(costs.PEAKS, "cpu", 1e12)
    train(runs.tiny(**{"train.steps": 2}), folder)
  word = f"--workdir={folder}"
  assert runs.command("eval.py", word) == 0
  assert runs.command("sparse_transformer/sample.py", word, "--num=4") == 0
  return folder


def train_on(folder, content):
  """A run of no steps on a text, in FOLDER/text."""
  path = folder / "text"
  path.write_bytes(content)
  train(runs.text(path, **{"train.steps": 0}), folder / "run")
  return path


def test_page_is_self_contained_and_contains_everything(workdir):
  page = runs.report(workdir)
  assert "http" not in page
  assert "<script" not in page
  assert "a run &amp; &lt;script&gt;" in page
  assert "<td>2 steps, 1,024 tokens, 0.01 epochs, 0:0" in page
  for row in ("command</td><td>python", "machine</td><td>", "begun</td><td>20"):
    assert f"<td>{row}" in page

  # What differs from the defaults is shown, the rest is folded.
  settings = page.partition("<h2>Config")[2]
  shown, _, folded = settings.partition("<details>")
  assert "<td>train.steps</td><td>2</td><td>100000</td>" in shown
  assert "<td>train.seed</td><td>0</td>" in folded
  for title in ("Evaluation", "Curves", "Patterns", "Samples", "Config"):
    assert f"<h2>{title}</h2>" in page
  # Bits by position, curves, patterns, samples.
  assert len(re.findall('<img alt="[^"]+" src="data:image/png', page)) == 4

  (path,) = (workdir / "evaluations").glob("*.json")
  bits = json.loads(path.read_text())["bits_per_dim"]
  assert f"{bits:.4f} bits/dim" in page
  lines = [x for x in metrics.read(workdir) if x["split"] == "train"]
  mfu = lines[-1]["mfu"]
  assert mfu == pytest.approx(lines[-1]["model_flops_per_second"] / 1e12)
  assert f"{100 * mfu:.1f} %" in page


def test_page_shows_sampled_text_without_control_characters(tmp_path):
  train_on(tmp_path, b"some <b>text</b> " * 50)
  texts = b"<i>\x00\xff</i>", b"apart"
  (tmp_path / "run" / "samples.txt").write_bytes(RULE.join(texts))
  page = runs.report(tmp_path / "run")
  assert "&lt;i&gt;\ufffd\ufffd&lt;/i&gt;</pre>\n<pre>apart</pre>" in page
  assert "run eval.py" in page


def test_page_says_what_the_run_was_trained_on(tmp_path):
  """Also after it was moved, and other data took its place."""
  content = b"some text " * 50
  path = train_on(tmp_path, content)
  crc = f"{zlib.crc32(content):08x}"
  about = f"bytes, {path}, 500 symbols, splits 250 + 125 + 125, crc32 {crc}"
  row = f"<td>data</td><td>{about}</td>"
  assert row in runs.report(tmp_path / "run")
  path.rename(tmp_path / "moved")
  assert row in runs.report(tmp_path / "run")
  path.write_bytes(b"other text" * 90)
  assert row in runs.report(tmp_path / "run")


def test_page_lists_changes_of_the_config(workdir, tmp_path):
  copy = shutil.copytree(workdir, tmp_path / "run")
  path = copy / config.CHANGES
  change = dict(
    step=1,
    changes={"attention.pattern": ["dense", "<local>"]},
  )
  path.write_text(json.dumps(change) + "\n")
  page = runs.report(copy)
  cells = "1", "attention.pattern", "&#x27;dense&#x27;", "&#x27;&lt;local&gt;"
  assert "</td><td>".join(cells) in page
  path.write_text("{}")
  assert runs.command("sparse_transformer/report.py", f"--workdir={copy}") == 1


def test_page_needs_no_metrics_and_no_samples(workdir, tmp_path):
  copy = shutil.copytree(workdir, tmp_path / "run")
  (copy / "samples.png").unlink()
  (copy / "samples.txt").touch()
  for text in "\0\n{", '{"step": 1, "split": "skipped"}', None:
    if text is None:
      (copy / "metrics.jsonl").unlink()
    else:
      (copy / "metrics.jsonl").write_text(text)
    page = runs.report(copy)
    assert "Samples" in page
    assert "None: run python" in page

  (copy / "samples_0.wav").touch()

  assert "<pre>samples_0.wav</pre>" in runs.report(copy)
