"""Colors and empty axes that all figures share."""

import os
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_transformer import atomic

if TYPE_CHECKING:  # Matplotlib is slow to import, and needed only to draw
  from matplotlib.figure import Figure

DPI = 150
DARK = "#1b3a5c"
LIGHT = "#8fb8de"
GRAY = "#66758a"
GRID = "#e3e8ee"
# A pale yellow and a pale blue.
PALE = "#fbeac0"
PALER = "#dbe8f5"
# Colors of lines that color-blind people can distinguish, too. They are the
# colors of Okabe and Ito, except yellow, which is too light for text.
COLORS = (
  "#0072b2",
  "#d55e00",
  "#009e73",
  "#cc79a7",
  "#e69f00",
  "#56b4e9",
  "#333333",
)


def subplots(
  rows: int, columns: int, width: float, height: float
) -> "tuple[Figure, np.ndarray]":
  """Makes a figure with a grid of axes.

  Args:
    rows: number of rows of axes.
    columns: number of columns of axes.
    width: width of the figure, in inches.
    height: height of the figure, in inches.

  Returns:
    The figure and an array of its axes, [rows, columns], even if both numbers
    are 1.
  """
  # A figure that pyplot does not manage needs no display, and need not be
  # closed.
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
  return figure, figure.subplots(rows, columns, squeeze=False)


def open_frame(axis: Any) -> None:
  """Frames curves on only two sides, over a pale grid."""
  axis.spines[["top", "right"]].set_visible(False)
  axis.set_axisbelow(True)
  axis.grid(color=GRID, lw=0.6)


def save(figure: "Figure", path: str | os.PathLike) -> None:
  """Writes a figure to a PNG file, either completely or not at all."""
  # The temporary file has a different suffix, so the format must be given.
  with atomic.writing(pathlib.Path(path)) as new:
    figure.savefig(new, format="png")


def rgb(color: str) -> np.ndarray:
  """Returns red, green and blue of a color, each from 0 to 255.

  >>> rgb("#0a00ff").tolist()
  [10, 0, 255]
  """
  return np.array(list(bytes.fromhex(color[1:])))
