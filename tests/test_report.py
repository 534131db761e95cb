"""Pages are complete, and a browser shows them from disk at any width."""

import html
import json
import re
import shutil
import subprocess

import comparisons
import pytest
import runs

from sparse_transformer.comparison import results
from sparse_transformer.figures import style
from sparse_transformer.training import metrics
from sparse_transformer.training.analysis import peaks
from sparse_transformer.training.loop import train

SCRIPT = "sparse_transformer/report.py"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
LONG = "Neighborhood(5, 7, columns=8, channels=1) | " * 3 + "Local(8)|" * 8

# In frames as wide as a phone and as a desktop, measures what a reader can see.
PROBE = """<!DOCTYPE html><title></title><body><script>
function measure(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  const reachable = table => {
    const box = table.parentElement, cell = table.rows[0].lastElementChild;
    box.scrollLeft = 1e6;
    const end = box.getBoundingClientRect().right;
    return end <= root.clientWidth
      && cell.getBoundingClientRect().right <= end + 1;
  };
  return {
    width: frame.clientWidth,
    overflow: root.scrollWidth - root.clientWidth,
    pictures: [...page.images].map(i => [i.naturalWidth, i.clientWidth]),
    labelled: [...page.images].map(i => i.style.width != ""),
    tables: [...page.querySelectorAll("table")].map(reachable),
  };
}
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.body.remove();
  document.title = JSON.stringify(found);
});
</script>"""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run with samples and an evaluation."""
  folder = tmp_path_factory.mktemp("runs") / "a run & <script>"
  small = {"eval.batch_size": 64, "eval.every": 2}
  train(runs.tiny(**small), folder)
  word = f"--workdir={folder}"
  assert runs.command("eval.py", word) == 0
  assert runs.command("sparse_transformer/sample.py", word, "--num=4") == 0
  assert runs.command(SCRIPT, word) == 0
  return folder


def test_page_is_self_contained_and_contains_everything(workdir):
  page = (workdir / "report.html").read_text()
  assert "http" not in page and "<script" not in page
  assert "a run &amp; &lt;script&gt;" in page
  for title in ("Evaluation", "Curves", "Patterns", "Samples", "Config"):
    assert f"<h2>{title}</h2>" in page
  # Bits by position, curves, throughput, patterns, samples.
  assert len(re.findall('<img alt="[^"]+" [^>]*src="data:image/png', page)) == 5
  (path,) = (workdir / "evaluations").glob("*.json")
  bits = json.loads(path.read_text())["bits_per_dim"]
  assert f"{bits:.4f} bits/dim" in page
  assert "&quot;learning_rate&quot;" in page


def test_utilization_is_logged_shown_and_reported(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(peaks.PEAKS, "cpu", dict(float32=1e12))
  train(runs.tiny(**{"train.steps": 2}), tmp_path)
  *_, line = [x for x in metrics.read(tmp_path) if x["split"] == "train"]
  assert line["mfu"] == pytest.approx(line["model_flops_per_second"] / 1e12)
  assert f"mfu {line['mfu']:.5g}" in capsys.readouterr().out
  assert runs.command(SCRIPT, f"--workdir={tmp_path}") == 0
  page = (tmp_path / "report.html").read_text()
  assert f"{100 * line['mfu']:.1f} %" in page
  assert 'alt="model-FLOPs utilization"' in page


def test_page_shows_sampled_text_without_control_characters(tmp_path):
  path = tmp_path / "text"
  path.write_bytes(b"some <b>text</b> " * 50)
  config = runs.text(path, **{"train.steps": 0})
  train(config, tmp_path / "run")
  (tmp_path / "run" / "samples.txt").write_bytes(b"<i>\x00\xff</i>")
  assert runs.command(SCRIPT, f"--workdir={tmp_path / 'run'}") == 0
  page = (tmp_path / "run" / "report.html").read_text()
  assert "&lt;i&gt;\ufffd\ufffd&lt;/i&gt;" in page
  assert "run eval.py" in page


@pytest.mark.parametrize(
  "text",
  [None, "", "\0\n{", '{"step": 1}\n', '{"step": 1, "split": "skipped"}'],
)
def test_page_needs_no_metrics(text, workdir, tmp_path):
  copy = shutil.copytree(workdir, tmp_path / "run")
  (copy / "metrics.jsonl").unlink()
  if text is not None:
    (copy / "metrics.jsonl").write_text(text)
  (copy / "samples.png").unlink()
  (copy / "samples.txt").touch()
  assert runs.command(SCRIPT, f"--workdir={copy}") == 0
  page = (copy / "report.html").read_text()
  assert "Samples" in page and "None: run python" in page


def browse(page, tmp_path):
  """Opens a file in a browser; returns the document that it shows."""
  done = subprocess.run(
    [
      BROWSER,
      *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
      *("--disable-background-networking", "--disable-component-update"),
      *("--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND"),
      f"--user-data-dir={tmp_path / 'profile'}",
      *("--enable-logging=stderr", "--v=0", "--dump-dom", page.as_uri()),
    ],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  assert "CONSOLE" not in done.stderr  # errors of the page
  return done.stdout


def comparison_page(folder):
  """The page of a comparison of patterns, some with long names."""
  many = dict(steps=10**5, tokens_per_step=10**6, flops=1e18, peak_bytes=2**36)
  made = comparisons.record(
    *(
      comparisons.run(choice, seed, 2.5 + seed, **many)
      for choice in ("dense", LONG, "local")
      for seed in range(2)
    ),
    config=runs.tiny(**{"data.path": "folder/" * 50}).to_dict(),
  )
  results.write(folder, made)
  return folder / "comparison.html"


@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")
def test_browser_shows_all_of_a_page_at_any_width(workdir, tmp_path):
  pages = workdir / "report.html", comparison_page(tmp_path)
  frames = [
    f'<iframe width={width} height=800 style="border: 0"'
    f' srcdoc="{html.escape(page.read_text())}"></iframe>'
    for page in pages
    for width in (400, 1280)
  ]
  (probe := tmp_path / "probe.html").write_text(PROBE + "".join(frames))
  dom = browse(probe, tmp_path)
  found = json.loads(html.unescape(re.search("<title>(.*)</title>", dom)[1]))
  assert [frame["width"] for frame in found] == [400, 1280, 400, 1280]
  assert [len(frame["pictures"]) for frame in found] == [5, 5, 1, 1]
  for frame in found:
    assert frame["overflow"] <= 0
    assert frame["tables"] and all(frame["tables"])
    for (pixels, shown), labelled in zip(
      frame["pictures"], frame["labelled"], strict=True
    ):
      assert pixels > 100
      # Labels are 10 points high, and must not be less than 10 pixels.
      points = pixels / style.DPI * 72
      assert not labelled or shown >= 0.99 * points
