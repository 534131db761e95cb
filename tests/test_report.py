"""Tests of report.py: what stands in the page, and that a browser shows it."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import runs

from sparse_transformer.figures import html as pages
from sparse_transformer.training import loop as train

SCRIPT = "sparse_transformer/report.py"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run with samples and an evaluation."""
  folder = tmp_path_factory.mktemp("runs") / "a run & <more>"
  train.train(runs.tiny(**{"eval.every": 2}), folder)
  word = f"--workdir={folder}"
  assert runs.command("eval.py", word) == 0
  assert runs.command("sparse_transformer/sample.py", word, "--num=4") == 0
  assert runs.command(SCRIPT, word) == 0
  return folder


def test_page_stands_alone_and_holds_everything(workdir):
  page = (workdir / "report.html").read_text()
  assert "http" not in page and "<script" not in page
  assert "a run &amp; &lt;more&gt;" in page and "<more>" not in page
  for title in ("Evaluation", "Curves", "Patterns", "Samples", "Config"):
    assert f"<h2>{title}</h2>" in page
  # Bits by position, curves, throughput, patterns, samples.
  assert len(re.findall('<img alt="[^"]+" src="data:image/png', page)) == 5
  (path,) = (workdir / "evaluations").glob("*.json")
  bits = json.loads(path.read_text())["bits_per_dim"]
  assert f"{bits:.4f} bits/dim" in page
  assert "&quot;learning_rate&quot;" in page


def test_page_of_a_text_shows_it(tmp_path):
  path = tmp_path / "text"
  path.write_bytes(b"some <b>text</b> " * 50)
  config = runs.text(path, **{"train.steps": 0, "model.num_layers": 1})
  train.train(config, tmp_path / "run")
  (tmp_path / "run" / "samples.txt").write_bytes(b"<i>\x00\xff</i>")
  assert runs.command(SCRIPT, f"--workdir={tmp_path / 'run'}") == 0
  page = (tmp_path / "run" / "report.html").read_text()
  assert "&lt;i&gt;\ufffd\ufffd&lt;/i&gt;" in page
  assert "run eval.py" in page


def test_run_without_a_checkpoint_is_refused(tmp_path, capsys):
  from sparse_transformer.training import checkpoint

  checkpoint.write_config(tmp_path, runs.tiny())
  assert runs.command(SCRIPT, f"--workdir={tmp_path}") == 1
  assert "no checkpoint" in capsys.readouterr().err
  assert not (tmp_path / "report.html").exists()


def test_table_escapes_its_cells():
  text = pages.table([("a", "<b>"), (1, "x & y")])
  assert "<th>&lt;b&gt;</th>" in text and "<td>x &amp; y</td>" in text


@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")
def test_browser_shows_the_page_from_disk(workdir, tmp_path):
  page = workdir / "report.html"
  # A copy that says, when all is loaded, which pictures have pixels.
  probe = """<script>
    addEventListener("load", () => {
      const sizes = [...document.images].map(i => i.naturalWidth);
      document.title = "sizes " + sizes.join(" ");
    });
    </script></body>"""
  copy = tmp_path / "report.html"
  copy.write_text(page.read_text().replace("</body>", probe))

  def run(path, *words):
    return subprocess.run(
      [
        BROWSER,
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND"),
        f"--user-data-dir={tmp_path / 'profile'}",
        *("--enable-logging=stderr", "--v=0", "--window-size=1100,3000"),
        *words,
        path.as_uri(),
      ],
      capture_output=True,
      text=True,
      timeout=120,
      check=True,
    )

  done = run(copy, "--dump-dom")
  sizes = re.search("<title>sizes ([0-9 ]+)</title>", done.stdout)[1].split()
  assert len(sizes) == 5 and all(int(size) > 100 for size in sizes)
  assert "CONSOLE" not in done.stderr  # where its errors would stand
  shot = tmp_path / "shot.png"
  run(page, f"--screenshot={shot}")
  from PIL import Image

  with Image.open(shot) as image:
    pixels = np.asarray(image.convert("RGB"))
  assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
