"""The page about a run is complete, and a browser shows it from disk."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import runs
from PIL import Image

from sparse_transformer.config import write_config
from sparse_transformer.training.loop import train

SCRIPT = "sparse_transformer/report.py"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run with samples and an evaluation."""
  folder = tmp_path_factory.mktemp("runs") / "a run & <more>"
  small = {"model.num_layers": 1, "eval.batch_size": 64, "eval.every": 2}
  train(runs.tiny(**small), folder)
  word = f"--workdir={folder}"
  assert runs.command("eval.py", word) == 0
  assert runs.command("sparse_transformer/sample.py", word, "--num=4") == 0
  assert runs.command(SCRIPT, word) == 0
  return folder


def test_page_is_self_contained_and_contains_everything(workdir):
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


def test_page_shows_sampled_text_without_control_characters(tmp_path):
  path = tmp_path / "text"
  path.write_bytes(b"some <b>text</b> " * 50)
  config = runs.text(path, **{"train.steps": 0, "model.num_layers": 1})
  train(config, tmp_path / "run")
  (tmp_path / "run" / "samples.txt").write_bytes(b"<i>\x00\xff</i>")
  assert runs.command(SCRIPT, f"--workdir={tmp_path / 'run'}") == 0
  page = (tmp_path / "run" / "report.html").read_text()
  assert "&lt;i&gt;\ufffd\ufffd&lt;/i&gt;" in page
  assert "run eval.py" in page


def test_run_without_a_checkpoint_has_no_page(tmp_path, capsys):
  write_config(tmp_path, runs.tiny())
  assert runs.command(SCRIPT, f"--workdir={tmp_path}") == 1
  assert "no checkpoint" in capsys.readouterr().err
  assert not (tmp_path / "report.html").exists()


@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")
def test_browser_shows_the_page_from_disk(workdir, tmp_path):
  page = workdir / "report.html"
  # In a copy, the title becomes the sizes of all pictures once they are loaded.
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
  assert "CONSOLE" not in done.stderr  # errors of the page
  shot = tmp_path / "shot.png"
  run(page, f"--screenshot={shot}")
  with Image.open(shot) as image:
    pixels = np.asarray(image.convert("RGB"))
  assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
