"""The README's figures, which remember the records they were made from.

A figure is a PNG with the CRC-32 of its records in a text field: whether it is
of the present records can be told without drawing it, which another version of
matplotlib would do a little differently.
"""

import pathlib
import subprocess
import sys
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import record
from benchmarks.readme import evidence, records

if TYPE_CHECKING:
  from matplotlib.figure import Figure

FOLDER = record.REPO / "docs" / "figures"
FIELD = "records"


def all_of_them() -> dict[pathlib.Path, str]:
  """The record of each figure."""
  attention = {
    record.REPO / "docs" / "attention.png": "attention-amd-epyc-2-threads"
  }
  return attention | {path_of(name): name for name in evidence.drawn()}


def path_of(name: str) -> pathlib.Path:
  """The figure of the evidence in a record."""
  return FOLDER / f"{name}.png"


def outdated() -> list[str]:
  """The figures that are missing or of other records."""
  return [
    str(path.relative_to(record.REPO))
    for path, name in all_of_them().items()
    if stamp(path) != digest(name)
  ]


def digest(name: str) -> str:
  """The CRC-32 of a record, in hexadecimal digits."""
  return f"{zlib.crc32(records.path(name).read_bytes()):08x}"


def stamp(path: pathlib.Path) -> str | None:
  """The digest of the record that a figure was made from, if it is known."""
  from PIL import Image

  if not path.exists():
    return None
  with Image.open(path) as image:
    return image.info.get(FIELD)


def draw(figure: str) -> None:
  """Draws a figure, named by its path in the repository."""
  path = record.REPO / figure
  name = all_of_them()[path]
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.parent == FOLDER:
    figure_of(records.read(name)).savefig(path)
  else:
    script = record.REPO / "benchmarks" / "picture.py"
    command = [sys.executable, script, records.path(name), path]
    subprocess.run(command, check=True)
  _stamp(path, digest(name))


def _stamp(path, text):
  from PIL import Image, PngImagePlugin

  with Image.open(path) as image:
    image.load()
  info = PngImagePlugin.PngInfo()
  info.add_text(FIELD, text)
  image.save(path, pnginfo=info, optimize=True)


def figure_of(content: Mapping[str, Any]) -> "Figure":
  """The figure of a comparison, or of context."""
  from sparse_transformer.comparison import figures

  if "about" in content:
    return figures.draw(dict(content))
  return bits_by_context(content)


def bits_by_context(content: Mapping[str, Any]) -> "Figure":
  """Paired differences of bits to the first minimum context, with errors.

  Args:
    content: a record of `benchmarks.context`.
  """
  from sparse_transformer.figures import style

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
