"""Figures, which remember the records that they were made from.

A figure is a PNG with the CRC-32 of its record in a text field, which shows
whether it is up to date without drawing it again: versions of matplotlib draw
slightly different pictures.
"""

import subprocess
import sys
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, PngImagePlugin

from benchmarks import record
from benchmarks.readme import evidence, records
from sparse_transformer.comparison import figures as comparison
from sparse_transformer.figures import style

if TYPE_CHECKING:
  from matplotlib.figure import Figure

FIELD = "records"


def all_of_them() -> dict[str, str]:
  """{path in the repository: name of the record} for each figure."""
  drawn = *evidence.COMPARISONS, *evidence.CONTEXTS
  found = {f"docs/figures/{name}.png": name for name in drawn}
  return {"docs/attention.png": "attention-amd-epyc-2-threads"} | found


def outdated() -> list[str]:
  """Figures that are missing or were made from other records."""
  return [
    figure
    for figure, name in all_of_them().items()
    if _stamp_of(record.REPO / figure) != _digest(name)
  ]


def draw(figure: str) -> None:
  """Draws a figure, named by its path in the repository."""
  path, name = record.REPO / figure, all_of_them()[figure]
  if name in evidence.COMPARISONS:
    comparison.draw(evidence.read(name)).savefig(path)
  elif name in evidence.CONTEXTS:
    bits_by_context(records.read(name)).savefig(path)
  else:
    script = record.REPO / "benchmarks" / "picture.py"
    command = [sys.executable, script, records.path(name), path]
    subprocess.run(command, check=True)
  with Image.open(path) as image:
    image.load()
  info = PngImagePlugin.PngInfo()
  info.add_text(FIELD, _digest(name))
  image.save(path, pnginfo=info, optimize=True)


def _digest(name):
  """The CRC-32 of a record, in hexadecimal digits."""
  return f"{zlib.crc32(records.path(name).read_bytes()):08x}"


def _stamp_of(path):
  """The digest of the record that a figure was made from, if it is known."""
  if not path.exists():
    return None
  with Image.open(path) as image:
    return image.info.get(FIELD)


def bits_by_context(content: Mapping[str, Any]) -> "Figure":
  """Paired differences of bits to the first minimum context, with errors.

  Args:
    content: a record of `benchmarks.context`.
  """
  figure, axes = style.subplots(1, 1, 5, 3.2)
  figure.set_layout_engine("constrained")
  axis = axes[0, 0]
  for i, run in enumerate(content["runs"]):
    rows = run["contexts"]
    # Runs are side by side, so that their errors can be told apart.
    aside = 0.06 * (i - (len(content["runs"]) - 1) / 2)
    axis.errorbar(
      np.arange(len(rows)) + aside,
      [row["difference"] for row in rows],
      [row["difference_error"] or 0 for row in rows],
      color=style.COLORS[i % len(style.COLORS)],
      marker="osD^v"[i % 5],
      ms=4,
      lw=1.2,
      capsize=3,
      label=f"{run['run']}: {rows[0]['bits']:.3f} at {rows[0]['min_context']}",
    )
  rows = content["runs"][0]["contexts"]
  axis.set_xticks(range(len(rows)), [f"{row['min_context']:,}" for row in rows])
  axis.set(
    xlabel="minimum context, symbols before each",
    ylabel=f"change of {content['runs'][0]['unit']}",
  )
  axis.spines[["top", "right"]].set_visible(False)
  axis.grid(color=style.GRID, lw=0.6)
  axis.set_axisbelow(True)
  axis.legend(frameon=False)
  return figure
