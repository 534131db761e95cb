"""Figures, which remember the records that they were made from.

A figure is a PNG with the CRC-32 of its record in a text field, which shows
whether it is up to date without drawing it again: versions of matplotlib draw
slightly different pictures.
"""

import zlib
from collections.abc import Mapping
from typing import Any

from PIL import Image

from benchmarks import record, report
from sparse_transformer.figures import style

FIELD, PASS = "records", "forward_backward"


# By path in the repository: the name of the record.
FIGURES = {"docs/attention.png": "attention-amd-epyc-2-threads"}


def outdated() -> list[str]:
  """Figures that are missing or were made from other records."""
  return [
    figure
    for figure, name in FIGURES.items()
    if _stamp_of(record.REPO / figure) != _digest(name)
  ]


def draw(figure: str) -> None:
  name = FIGURES[figure]
  drawn = speedups(record.read(name))
  about, options = {FIELD: _digest(name)}, {"optimize": True}
  drawn.savefig(record.REPO / figure, metadata=about, pil_kwargs=options)


def _digest(name):
  return f"{zlib.crc32(record.path(name).read_bytes()):08x}"


def _stamp_of(path):
  """The digest of the record that a figure was made from, if it is known."""
  if not path.exists():
    return None
  with Image.open(path) as image:
    return image.info.get(FIELD)


def _panels(number, width, height):
  """A figure, and its axes in a row."""
  figure, axes = style.subplots(1, number, width, height)
  figure.set_layout_engine("constrained")
  for axis in axes[0]:
    axis.spines[["top", "right"]].set_visible(False)
  return figure, axes[0]


def speedups(content: Mapping[str, Any]):
  """Speed-ups, and seconds by length, of a record of `attention.py`."""
  figure, (bars, lines) = _panels(2, 11, 3.6)
  rows = {
    name: [row for row in case["rows"] if PASS in row]
    for name, case in content["cases"].items()
  }
  is_dense = lambda row: row["pattern"] == report.DENSE
  ours = [
    (row["speedup"][PASS], row["ideal"], row["pattern"].split("(block=")[0])
    for row in rows["12288"]
    if row["program"] == "ours" and not is_dense(row)
  ]
  found, ideal, names = zip(*sorted(ours), strict=True)
  bars.barh(names, ideal, 0.8, color=style.LIGHT, label="ideal, by pairs")
  bars.barh(names, found, 0.4, color=style.DARK, label="measured")
  bars.set_xscale("log")
  bars.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
  bars.set_title("speed-up over dense causal, n = 12,288")
  bars.set_xlabel("forward + backward")
  dense = filter(is_dense, rows["3072"] + rows["12288"])
  dense = [row for row in dense if row["program"] == "sdpa"]
  for points, color, label in (
    (rows["growth"], style.DARK, "Local(l) | Strided(l), l = sqrt n"),
    (dense, style.COLORS[1], "dense causal, torch SDPA"),
  ):
    n, times = zip(*((x["n"], x[PASS]["median"]) for x in points), strict=True)
    lines.loglog(n, times, "o-", color=color, label=label)
  lines.set_xlabel("n")
  lines.set_title("seconds, forward + backward, 4 heads of 64")
  for axis in (bars, lines):
    axis.legend(frameon=False, loc="lower right")
  machine = "{name}, {threads} threads, float32".format(**content["machine"])
  figure.supxlabel(machine, fontsize=8)
  return figure
