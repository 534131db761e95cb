"""Draws results of `attention.py`: measured and ideal speed-ups, growth.

python benchmarks/picture.py benchmarks/results/FILE.json docs/attention.png
"""

import json
import pathlib
import sys

import matplotlib
from matplotlib import pyplot as plt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import report

matplotlib.use("Agg")

PASS = "forward_backward"
OURS, THEIRS, IDEAL = "#1b3a5c", "#c46a3d", "#8fb8de"


def timed(rows, *programs):
  """The rows of some programs that have forward + backward times."""
  return [row for row in rows if PASS in row and row["program"] in programs]


def draw_speedups(axes, rows):
  """Bars for our patterns: measured and ideal speed-up over dense attention."""
  rows = [r for r in timed(rows, "ours") if r["pattern"] != report.DENSE]
  rows.sort(key=lambda row: row["speedup"][PASS])
  places = range(len(rows))
  labels = [row["pattern"].split("(block=")[0] for row in rows]
  ideal = [row["ideal"] for row in rows]
  found = [row["speedup"][PASS] for row in rows]
  axes.barh(
    places,
    ideal,
    0.8,
    color=IDEAL,
    label="ideal, by pairs",
  )
  axes.barh(places, found, 0.4, color=OURS, label="measured")
  axes.set_yticks(places, labels)
  axes.set_xscale("log")
  axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
  axes.set_title(f"speed-up over dense causal, n = {rows[0]['n']:,}")
  axes.set_xlabel("forward + backward")
  axes.legend(loc="lower right", frameon=False)


def draw_growth(axes, growth, dense):
  """Seconds by n, for strided attention with l = sqrt n and for dense."""
  for rows, color, label in (
    (timed(growth, "ours"), OURS, "Local(l) | Strided(l), l = sqrt n"),
    (timed(dense, "sdpa"), THEIRS, "dense causal, torch SDPA"),
  ):
    rows = [r for r in rows if color == OURS or r["pattern"] == report.DENSE]
    points = [(row["n"], row[PASS]["median"]) for row in rows]
    axes.loglog(*zip(*points, strict=True), "o-", color=color, label=label)
  axes.set_xlabel("n")
  axes.set_title("seconds, forward + backward, 4 heads of 64")
  axes.legend(frameon=False)


def main(source, target):
  """Draws the results in the JSON file `source` into the PNG file `target`."""
  results = json.loads(pathlib.Path(source).read_text())
  rows = {name: case["rows"] for name, case in results["cases"].items()}
  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
  draw_speedups(left, rows["12288"])
  draw_growth(right, rows["growth"], rows["3072"] + rows["12288"])
  for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
  machine = results["machine"]
  figure.supxlabel(
    "{name}, {threads} threads, float32".format(**machine), fontsize=8
  )
  figure.tight_layout()
  figure.savefig(target, dpi=150)


if __name__ == "__main__":
  main(*sys.argv[1:])
